"""The search for a poison request: it alone fails, whatever company it comes in."""

import pytest
from model_check.cases import make_world
from model_check.world import World

from nvserve.core.request import Phase
from nvserve.protocol.messages import FinishReason, StepFailed


def run_with_poison(
    world: World, poison: set[int], *, num_output: int, core_deaths: frozenset[int] = frozenset()
) -> int:
    """Steps with a poison request that has so many tokens fail; returns how many failed.

    After the failures of these numbers core is killed as well.
    """
    num_failed = 0
    for _ in range(3_000):
        if not world.scheduler.requests:
            return num_failed
        world.send()
        ledger = world.scheduler.ledger
        assert ledger is not None
        step = ledger.find(ledger.num_committed)
        assert step is not None, "nothing moves"
        chunked = [request for request, _, _ in step.chunks]
        is_fatal = any(
            request.request_id in poison and request.num_output >= num_output
            for request in step.rows + chunked
        )
        if is_fatal:
            num_failed += 1
            world.fail_step()
            if num_failed in core_deaths:
                world.restart_core()
            continue
        world.work()
        world.deliver()
        world.scheduler.check()
    raise AssertionError("the search has no end")


@pytest.mark.parametrize("num_output", [0, 1, 5])
@pytest.mark.parametrize("place", [0, 7, 15])
def test_a_poison_request_fails_alone_and_the_others_finish(num_output: int, place: int) -> None:
    world = make_world(max_num_seqs=16, num_blocks=200, max_num_batched_tokens=64)
    ids = [world.submit([k] * 5, max_tokens=12, ignore_eos=True) for k in range(16)]
    num_failed = run_with_poison(world, {ids[place]}, num_output=num_output)
    assert world.outcome(ids[place])[1] is FinishReason.ENGINE_FAULT
    others = [k for k in ids if k != ids[place]]
    assert all(world.outcome(k) == world.expected(k) for k in others)
    assert num_failed <= 7  # halves: the log of 16, and the last one once more


@pytest.mark.parametrize("core_deaths", [{1}, {2, 4}, {1, 2, 3, 4, 5, 6, 7}])
@pytest.mark.parametrize("num_output", [0, 3])
def test_a_search_outlives_core(core_deaths: set[int], num_output: int) -> None:
    world = make_world(max_num_seqs=16, num_blocks=200, max_num_batched_tokens=64)
    ids = [world.submit([k] * 5, max_tokens=12, ignore_eos=True) for k in range(16)]
    num_failed = run_with_poison(
        world, {ids[9]}, num_output=num_output, core_deaths=frozenset(core_deaths)
    )
    assert world.outcome(ids[9])[1] is FinishReason.ENGINE_FAULT
    assert all(world.outcome(k) == world.expected(k) for k in ids if k != ids[9])
    assert num_failed <= 7  # no more than without these deaths


def test_the_frontend_is_told_who_is_suspected_and_who_is_cleared() -> None:
    world = make_world(max_num_seqs=8, num_blocks=200, max_num_batched_tokens=64)
    ids = [world.submit([k] * 5, max_tokens=12, ignore_eos=True) for k in range(4)]
    world.step()
    world.send()
    world.fail_step()
    assert [world.entry(k).strikes for k in ids] == [1, 1, 1, 1]
    while len(world.scheduler.suspects) > 2:
        world.step()
    assert [world.entry(k).strikes for k in ids] == [0, 0, 1, 1]
    world.run()
    assert all(world.outcome(k) == world.expected(k) for k in ids)


def test_two_poison_requests_are_both_found() -> None:
    world = make_world(max_num_seqs=8, num_blocks=200, max_num_batched_tokens=64)
    ids = [world.submit([k] * 5, max_tokens=12, ignore_eos=True) for k in range(8)]
    run_with_poison(world, {ids[2], ids[6]}, num_output=2)
    failed = [k for k in ids if world.outcome(k)[1] is FinishReason.ENGINE_FAULT]
    assert failed == [ids[2], ids[6]]


def test_one_crash_alone_condemns_nobody() -> None:
    world = make_world()
    request_id = world.submit([2, 3], max_tokens=9, ignore_eos=True)
    world.step()
    world.send()
    world.fail_step()
    world.run()
    assert world.outcome(request_id) == world.expected(request_id)


def test_a_suspect_is_innocent_two_tokens_beyond_the_crash() -> None:
    world = make_world()
    request_id = world.submit([2, 3], max_tokens=30, ignore_eos=True)
    world.step()
    world.send()
    world.fail_step()
    assert len(world.scheduler.suspects) == 1
    for _ in range(5):
        world.step()
    assert len(world.scheduler.suspects) == 0
    assert world.request(request_id).strikes == 0


def test_a_submit_with_strikes_runs_without_company() -> None:
    world = make_world()
    innocent = world.submit([2, 3], max_tokens=30, ignore_eos=True)
    world.step()
    suspect = world.submit([4, 5], max_tokens=30, ignore_eos=True, strikes=1)
    world.step()
    assert world.request(suspect).phase is Phase.RUNNING
    assert world.request(innocent).phase is Phase.WAITING
    world.run()
    assert all(world.outcome(k) == world.expected(k) for k in (innocent, suspect))


def test_an_epoch_that_ends_from_outside_blames_nobody() -> None:
    world = make_world()
    world.submit([2, 3], max_tokens=30, ignore_eos=True)
    for _ in range(10):
        world.send()
        world.start_epoch()
        assert len(world.scheduler.suspects) == 0


def test_the_broken_epoch_names_the_requests_of_the_failed_step() -> None:
    world = make_world(max_num_seqs=2)
    ids = [world.submit([k, 3], max_tokens=30, ignore_eos=True) for k in range(3)]
    world.send()
    broken = world.scheduler.report(StepFailed(0, 0, 0, "x"), world.now)
    assert broken is not None
    assert broken.suspects == ids[:2]
