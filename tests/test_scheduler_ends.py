"""Requests that end from outside: aborts, stop strings, deadlines, a frontend that died."""

import pytest
from model_check.answer import reference
from model_check.cases import assert_all_as_expected, assert_empty, make_world, refusal
from model_check.world import Entry

from nvserve.protocol.messages import (
    FinishReason,
)

# -- the end from outside


def test_an_abort_while_a_step_is_in_flight_drops_its_token_and_frees_the_blocks() -> None:
    world = make_world()
    request_id = world.submit([2] * 5, max_tokens=9, ignore_eos=True)
    world.send()
    world.send()
    world.end(request_id, FinishReason.ABORT)
    assert world.outcome(request_id) == ([], FinishReason.ABORT)
    assert_empty(world)
    while world.work():
        world.deliver()  # nothing may be emitted after the final emit
    world.scheduler.check()


def test_slot_and_blocks_of_an_aborted_request_are_given_out_in_the_next_step() -> None:
    """Safe because steps run in order on one stream: the fake worker would read foreign KV."""
    world = make_world(num_blocks=5, max_model_len=16, has_prefix_cache=False)
    first = world.submit([2] * 11, max_tokens=4, ignore_eos=True)
    world.send()
    second = world.submit([3] * 11, max_tokens=4, ignore_eos=True)
    world.end(first, FinishReason.ABORT)
    world.send()
    assert world.request(second).slot == 0
    world.run()
    assert_all_as_expected(world, [second])


def test_a_stop_string_ends_a_request_as_stop() -> None:
    world = make_world()
    request_id = world.submit([2, 3], max_tokens=30, ignore_eos=True)
    for _ in range(4):
        world.step()
    world.end(request_id, FinishReason.STOP)
    tokens, finish = world.outcome(request_id)
    assert (len(tokens), finish) == (4, FinishReason.STOP)


def test_late_doubled_and_unknown_aborts_are_counted_and_harmless() -> None:
    world = make_world()
    request_id = world.submit([2, 3], max_tokens=1)
    world.run()
    world.scheduler.end([request_id, request_id, 999], FinishReason.ABORT)
    assert world.scheduler.counters.dropped == 3


def test_an_abort_before_its_submit_does_not_prevent_the_request() -> None:
    world = make_world()
    world.scheduler.end([1], FinishReason.ABORT)
    request_id = world.submit([2, 3], max_tokens=3, ignore_eos=True)
    world.run()
    assert_all_as_expected(world, [request_id])


def test_a_waiting_request_can_be_aborted() -> None:
    world = make_world(max_num_seqs=1)
    world.submit([2, 3], max_tokens=3, ignore_eos=True)
    waiting = world.submit([2, 3], max_tokens=3)
    world.step()
    world.end(waiting, FinishReason.ABORT)
    assert world.outcome(waiting) == ([], FinishReason.ABORT)
    assert world.entry(waiting).cached == 0
    world.run()
    assert_empty(world)


def test_a_deadline_ends_running_and_waiting_requests() -> None:
    world = make_world(max_num_seqs=1)
    deadline = world.now + 5
    ids = [world.submit([2, 3], max_tokens=40, ignore_eos=True, deadline=deadline) for _ in "ab"]
    patient = world.submit([2, 3], max_tokens=3, ignore_eos=True)
    world.step()
    world.expire(4.0)
    assert not world.closed
    world.expire(2.0)
    assert [world.outcome(k)[1] for k in ids] == [FinishReason.DEADLINE] * 2
    world.run()
    assert_all_as_expected(world, [patient])


def test_a_deadline_does_not_wait_for_the_pool() -> None:
    """Before the first epoch of a core: one that is new, and one that follows another."""
    world = make_world()
    deadline = world.now + 5
    begun = world.submit([4, 3], max_tokens=40, ignore_eos=True, deadline=deadline)
    for _ in range(3):
        world.step()
    world.start_core()
    replay = world.replay(world.entry(begun))
    world.entry(begun).answer = None
    world.scheduler.submit(replay)
    late = world.submit([2, 3], max_tokens=40, ignore_eos=True, deadline=deadline)
    patient = world.submit([2, 3], max_tokens=3, ignore_eos=True)
    world.expire(4.0)
    assert not world.closed
    world.expire(2.0)
    assert world.outcome(begun) == (world.expected(begun)[0][:3], FinishReason.DEADLINE)
    assert world.outcome(late) == ([], FinishReason.DEADLINE)
    assert world.entry(patient).answer is None
    world.start_epoch()
    world.run()
    assert_all_as_expected(world, [patient])
    assert_empty(world)


@pytest.mark.parametrize("has_pool", [True, False])
def test_a_deadline_does_not_wait_for_a_grammar(has_pool: bool) -> None:
    """Nor is it refused for load meanwhile: see that the queue is full."""
    world = make_world(max_queued_requests=1, max_num_seqs=1)
    if not has_pool:
        world.start_core()
    others = [world.submit([2, 3], max_tokens=3, ignore_eos=True) for _ in range(2)]
    late = world.make_submit([4, 3], max_tokens=9, grammar="every third", deadline=world.now + 5)
    bad = world.make_submit([97], grammar="every third", deadline=world.now + 5)
    begun = world.make_submit([4, 3], max_tokens=9, grammar="every third", deadline=world.now + 5)
    emitted = reference(begun, world.limits)[0][:2]
    for submit in (late, bad, begun):
        world.journal[submit.request_id] = Entry(submit)
    world.journal[begun.request_id].emitted = emitted
    replay = world.replay(world.journal[begun.request_id])
    world.now += 5
    world.scheduler.expire(world.now, [late, bad, replay])
    world.flush()
    assert world.outcome(late.request_id) == ([], FinishReason.DEADLINE)
    assert world.outcome(begun.request_id) == (emitted, FinishReason.DEADLINE)
    assert refusal(world, bad.request_id).param == "prompt"
    assert world.scheduler.counters.finished[FinishReason.DEADLINE] == 2
    if not has_pool:
        world.start_epoch()
    world.run()
    assert_all_as_expected(world, others)
    assert_empty(world)


def test_a_new_frontend_frees_what_the_old_one_left() -> None:
    world = make_world()
    for _ in range(6):
        world.submit([2] * 9, max_tokens=30, ignore_eos=True)
    world.send()
    world.send()
    world.restart_frontend()
    assert_empty(world)
    request_id = world.submit([2] * 9, max_tokens=5, ignore_eos=True)
    world.run()
    assert_all_as_expected(world, [request_id])
