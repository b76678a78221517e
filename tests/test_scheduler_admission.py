"""Who is accepted, who is refused and in which words."""

import math

import pytest
from model_check.cases import assert_all_as_expected, assert_empty, make_world, refusal
from model_check.world import Entry
from msgspec.structs import replace

from nvserve.protocol.messages import (
    FinishReason,
    RefusalKind,
)

# -- admission


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("temperature", {"temperature": math.nan}),
        ("top_p", {"top_p": math.inf}),
        ("logit_bias", {"logit_bias": {97: 1.0}}),
        ("logit_bias", {"logit_bias": {5: math.nan}}),
        ("max_tokens", {"max_tokens": -1}),
        ("max_tokens", {"max_tokens": 2**64 - 1, "min_tokens": 2**64 - 1}),
        ("stop_token_ids", {"stop_token_ids": [97]}),
        ("bad_words", {"bad_words": [[1, 97]]}),
        ("seed", {"seed": -1}),
        ("priority", {"priority": 2**40}),
        ("strikes", {"strikes": -1}),
        ("deadline", {"deadline": math.nan}),
    ],
)
def test_a_submit_out_of_range_is_refused_naming_the_field(
    param: str, fields: dict[str, object]
) -> None:
    world = make_world()
    answer = refusal(world, world.submit([2, 3], **fields))
    assert (answer.kind, answer.param) == (RefusalKind.INVALID, param)
    assert not world.scheduler.requests


@pytest.mark.parametrize("prompt", [[-1], [2, 97], [2**31 - 1], []])
def test_a_prompt_outside_the_vocabulary_or_empty_is_refused(prompt: list[int]) -> None:
    world = make_world()
    answer = refusal(world, world.submit(prompt))
    assert (answer.kind, answer.param) == (RefusalKind.INVALID, "prompt")


@pytest.mark.parametrize(("length", "is_refused"), [(63, False), (64, True), (65, True)])
def test_a_prompt_must_leave_room_for_a_token(length: int, is_refused: bool) -> None:
    world = make_world()
    request_id = world.submit([2] * length, max_tokens=5)
    if is_refused:
        answer = refusal(world, request_id)
        assert (answer.kind, answer.param) == (RefusalKind.INVALID, "prompt")
        assert str(length) in answer.message
        assert "64" in answer.message
    else:
        world.run()
        assert_all_as_expected(world, [request_id])


@pytest.mark.parametrize(
    ("length", "max_tokens", "param"),
    [(48, 100, "max_tokens"), (49, 100, "prompt"), (30, 20, "max_tokens")],
)
def test_a_request_that_can_never_fit_is_refused_with_both_numbers(
    length: int, max_tokens: int, param: str
) -> None:
    world = make_world(num_blocks=4, block_size=16, max_model_len=4096)
    answer = refusal(world, world.submit([2] * length, max_tokens=max_tokens))
    assert (answer.kind, answer.param) == (RefusalKind.INVALID, param)
    assert "needs" in answer.message
    assert "pool has 3" in answer.message
    small = [world.submit([2] * 20, max_tokens=5, ignore_eos=True) for _ in range(10)]
    world.run()
    assert_all_as_expected(world, small)


def test_a_grammar_that_nobody_compiled_is_refused() -> None:
    world = make_world()
    submit = world.make_submit([2, 3], grammar="json:")
    world.journal[submit.request_id] = Entry(submit)
    world.scheduler.submit(submit)
    world.flush()
    assert refusal(world, submit.request_id).param == "grammar"


def test_a_request_that_just_fits_the_pool_runs() -> None:
    world = make_world(num_blocks=4, block_size=16, max_model_len=4096, max_num_batched_tokens=64)
    ids = [world.submit([2] * k, max_tokens=49 - k, ignore_eos=True) for k in (30, 48)]
    world.run()
    assert_all_as_expected(world, ids)
    assert_empty(world)


def test_over_the_queue_limit_a_submit_is_refused_busy_and_a_replay_is_not() -> None:
    world = make_world(max_queued_requests=2, max_num_seqs=1)
    for _ in range(3):  # one slot and two places in the queue
        world.submit([2, 3], max_tokens=3)
    answer = refusal(world, world.submit([2, 3]))
    assert answer.kind is RefusalKind.BUSY
    assert answer.retry_after_s == 0, "the frontend has the clock, and says when"
    replay = replace(world.make_submit([2, 3], max_tokens=3), is_replay=True)
    world.journal[replay.request_id] = Entry(replay)
    world.scheduler.submit(replay)
    world.run()
    assert_all_as_expected(world, [replay.request_id])


def test_a_request_keeps_its_place_while_its_grammar_is_compiled() -> None:
    world = make_world(max_queued_requests=1, max_num_seqs=1)
    for _ in range(2):
        world.submit([2, 3], max_tokens=3)
    assert refusal(world, world.submit([2, 3])).kind is RefusalKind.BUSY
    compiled = world.submit([2, 3], max_tokens=9, grammar="every third")
    world.run()
    assert_all_as_expected(world, [compiled])


def test_a_doubled_submit_is_dropped_and_counted() -> None:
    world = make_world()
    request_id = world.submit([2, 3], max_tokens=3, ignore_eos=True)
    world.scheduler.submit(world.entry(request_id).submit)
    assert world.scheduler.counters.dropped == 1
    assert world.scheduler.counters.accepted == 1
    world.run()
    assert_all_as_expected(world, [request_id])


def test_submits_before_the_pool_is_known_are_answered_once_it_is() -> None:
    world = make_world()
    world.start_core()
    good = world.submit([2, 3], max_tokens=3, ignore_eos=True)
    never = world.submit([2] * 60, max_tokens=3)
    gone = world.submit([2, 3])
    world.end(gone, FinishReason.ABORT)
    assert refusal(world, gone).kind is RefusalKind.DRAINING
    assert world.entry(good).answer is None
    assert world.scheduler.plan() is None
    world.num_blocks = 9
    world.worker.num_blocks = 9
    world.start_epoch()
    assert refusal(world, never).param == "prompt"
    world.run()
    assert_all_as_expected(world, [good])


def test_a_held_replay_is_recovered_once_it_is_accepted() -> None:
    world = make_world()
    gone, kept = (world.submit([2, 3], max_tokens=3, ignore_eos=True) for _ in range(2))
    world.restart_core(has_epoch=False)
    assert world.scheduler.counters.recovered == 0
    world.end(gone, FinishReason.ABORT)
    world.start_epoch()
    assert world.scheduler.counters.recovered == 1
    world.run()
    assert_all_as_expected(world, [kept])


def test_what_could_never_be_taken_is_refused_before_the_pool_is_known() -> None:
    """Its client need not wait for a load; nor has core all of them to look at once it is over."""
    world = make_world()
    world.start_core()
    assert refusal(world, world.submit([97])).param == "prompt"
    assert refusal(world, world.submit([2] * 64)).param == "prompt"
    assert refusal(world, world.submit([2], top_p=2.0)).param == "top_p"
    submit = world.make_submit([2, 3], grammar="json:")
    world.journal[submit.request_id] = Entry(submit)
    world.scheduler.submit(submit)
    world.flush()
    assert refusal(world, submit.request_id).param == "grammar"
    assert world.scheduler.held_ids == []
    assert world.scheduler.counters.refused == 4


def test_a_frontend_that_dies_takes_its_unanswered_submits_along() -> None:
    world = make_world()
    world.start_core()
    world.submit([2, 3], max_tokens=3)
    world.restart_frontend()
    world.start_epoch()
    assert not world.scheduler.requests
