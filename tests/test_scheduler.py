"""What the scheduler plans, one behaviour a test; the fake worker checks every message."""

import pytest
from model_check.cases import assert_all_as_expected, assert_empty, first_tokens, make_world
from model_check.world import World

from nvserve.core.request import ALLOWED, Phase
from nvserve.protocol.codec import encode
from nvserve.protocol.messages import (
    FinishReason,
)

# -- the phase table


@pytest.mark.parametrize("old", list(Phase))
@pytest.mark.parametrize("new", list(Phase))
def test_a_request_moves_only_along_the_phase_table(old: Phase, new: Phase) -> None:
    world = make_world()
    request = world.request(world.submit([2, 3], max_tokens=4))
    request.phase = old
    if new in ALLOWED[old]:
        request.move_to(new)
        assert request.phase is new
    else:
        with pytest.raises(AssertionError):
            request.move_to(new)


# -- plain service


@pytest.mark.parametrize("has_prefix_cache", [True, False])
@pytest.mark.parametrize("budget", [1, 7, 16])
def test_many_requests_in_a_tiny_pool_get_their_reference_tokens(
    has_prefix_cache: bool, budget: int
) -> None:
    world = make_world(
        num_blocks=12, has_prefix_cache=has_prefix_cache, max_num_batched_tokens=budget
    )
    ids = [
        world.submit([k % 3 + 2] * (5 + k), max_tokens=20, ignore_eos=True, seed=k)
        for k in range(16)
    ]
    world.run()
    assert_all_as_expected(world, ids)
    assert_empty(world)


def test_max_tokens_bounds_the_output_exactly() -> None:
    world = make_world()
    ids = [world.submit([5], max_tokens=k, ignore_eos=True) for k in (1, 2, 3)]
    world.run()
    assert [len(world.outcome(k)[0]) for k in ids] == [1, 2, 3]
    assert {world.outcome(k)[1] for k in ids} == {FinishReason.LENGTH}


def test_max_tokens_zero_is_accepted_and_finished_without_a_token() -> None:
    world = make_world()
    request_id = world.submit([5, 6], max_tokens=0)
    assert world.outcome(request_id) == ([], FinishReason.LENGTH)
    assert world.scheduler.plan() is None


def test_the_context_ends_a_request_that_asks_for_more() -> None:
    world = make_world(max_model_len=20)
    ids = [world.submit([2] * k, max_tokens=1000, ignore_eos=True) for k in (18, 19)]
    world.run()
    assert [len(world.outcome(k)[0]) for k in ids] == [2, 1]


def test_a_stop_token_ends_the_output_and_is_part_of_it() -> None:
    tokens = first_tokens(8)
    world = make_world()
    request_id = world.submit([5], max_tokens=8, stop_token_ids=[tokens[3]], ignore_eos=True)
    world.run()
    expected = tokens[: tokens.index(tokens[3]) + 1]
    assert world.outcome(request_id) == (expected, FinishReason.STOP)


def test_eos_stops_unless_it_is_ignored() -> None:
    tokens = first_tokens(8)
    world = make_world(eos_token_ids=frozenset({tokens[2]}))
    stopped = world.submit([5], max_tokens=8)
    ignoring = world.submit([5], max_tokens=8, ignore_eos=True)
    world.run()
    assert world.outcome(stopped) == (tokens[:3], FinishReason.STOP)
    assert world.outcome(ignoring) == (tokens, FinishReason.LENGTH)


def test_a_stop_token_before_min_tokens_does_not_stop() -> None:
    tokens = first_tokens(8)
    world = make_world()
    request_id = world.submit(
        [5], max_tokens=8, min_tokens=5, stop_token_ids=[tokens[1]], ignore_eos=True
    )
    world.run()
    assert len(world.outcome(request_id)[0]) >= 5


def test_decodes_come_before_prompts_under_one_budget() -> None:
    world = make_world(max_num_batched_tokens=8)
    world.submit([2] * 4, max_tokens=20, ignore_eos=True)
    world.step()
    world.submit([3] * 20, max_tokens=4)
    output = world.scheduler.plan()
    assert output is not None
    assert output.chunks is not None
    assert output.joins == [0]
    assert output.chunks.counts == [7]


def test_a_lower_priority_number_goes_first() -> None:
    world = make_world(max_num_seqs=1)
    late = world.submit([2], max_tokens=2, ignore_eos=True, priority=5)
    soon = world.submit([3], max_tokens=2, ignore_eos=True, priority=-5)
    world.step()
    assert world.request(soon).phase is Phase.RUNNING
    assert world.request(late).phase is Phase.WAITING


def test_an_unchanged_decode_step_is_a_few_bytes_whatever_the_batch() -> None:
    world = make_world(max_num_seqs=64, max_num_batched_tokens=512, block_size=16, num_blocks=512)
    for k in range(64):
        world.submit([k] * 3, max_tokens=60, ignore_eos=True)
    for _ in range(3):
        world.step()
    assert len(world.scheduler.batch.decoding) == 64  # type: ignore[union-attr]
    output = world.scheduler.plan()
    assert output is not None
    assert output.tables is None
    assert len(encode(output)) <= 64


# -- run-ahead


def test_two_steps_are_planned_ahead_and_not_a_third() -> None:
    world = make_world()
    world.submit([2, 3], max_tokens=10, ignore_eos=True)
    assert world.send()
    assert world.send()
    assert not world.send()
    world.work()
    world.deliver()
    assert world.send()


def test_a_request_whose_last_token_is_planned_leaves_the_decode_list() -> None:
    world = make_world()
    request_id = world.submit([2, 3], max_tokens=2, ignore_eos=True)
    world.send()  # prompt and first token
    world.send()  # second token
    world.work()
    world.deliver()
    assert not world.send()
    world.work()
    world.deliver()
    assert world.outcome(request_id) == world.expected(request_id)


def test_a_request_that_needs_its_token_on_the_host_runs_every_second_step() -> None:
    world = make_world()
    request_id = world.submit([2, 3], max_tokens=6, ignore_eos=True)
    world.request(request_id).must_wait = True
    other = world.submit([4, 5], max_tokens=12, ignore_eos=True)
    world.send()
    widths = [last_width(world)]
    for _ in range(5):
        world.send()
        widths.append(last_width(world))
        world.work()
        world.deliver()
    assert widths == [2, 1, 2, 1, 2, 1]
    world.run()
    assert_all_as_expected(world, [request_id, other])


def test_rows_go_to_the_oldest_where_the_budget_has_too_few() -> None:
    """Also when it needs its token on the host, and so none every second step."""
    world = make_world(max_num_batched_tokens=2)
    oldest = world.submit([2], max_tokens=10, ignore_eos=True)
    world.request(oldest).must_wait = True
    world.step()
    younger = [world.submit([3, k], max_tokens=30, ignore_eos=True) for k in range(3)]
    for _ in range(18):
        world.send()
        world.send()
        world.work()
        world.deliver()
        world.scheduler.check()
    assert world.outcome(oldest) == world.expected(oldest)
    world.run()
    assert_all_as_expected(world, younger)


def test_a_row_that_its_owner_cannot_use_goes_to_the_oldest_that_can() -> None:
    """Whatever their turn: three of these need their token on the host, so every second step."""
    world = make_world(max_num_batched_tokens=2)
    ids = [world.submit([2 + k], max_tokens=20, ignore_eos=True) for k in range(3)]
    for request_id in ids:
        world.request(request_id).must_wait = True
    ids.append(world.submit([5], max_tokens=20, ignore_eos=True))
    batch = world.scheduler.batch
    assert batch is not None
    plans = []
    world.send()
    for _ in range(24):
        world.send()
        plans.append([request.request_id for request in batch.decoding])
        world.work()
        world.deliver()
    assert plans[4:] == [ids[2:], ids[:2]] * 10
    world.run()
    assert_all_as_expected(world, ids)


def last_width(world: World) -> int:
    """Rows of the step planned last."""
    ledger = world.scheduler.ledger
    assert ledger is not None
    step = ledger.find(ledger.num_opened - 1)
    assert step is not None
    return len(step.rows)
