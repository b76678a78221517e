"""The search for a poison request: it alone fails, whatever company it comes in."""

import random

import pytest
from model_check.cases import make_world
from model_check.world import World

from nvserve.core.request import Phase
from nvserve.core.step_ledger import Step
from nvserve.protocol.control import EpochBroken
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


# -- who leaves, and faults that are seen late


def on_trial(world: World, count: int) -> list[int]:
    """Ids of the first half of so many suspects, whose first step is in flight."""
    ids = [world.submit([k] * 5, max_tokens=12, ignore_eos=True) for k in range(count)]
    world.send()
    world.fail_step()
    world.send()
    return ids[: (count + 1) // 2]


def test_who_was_in_the_crashing_step_with_one_that_left_was_not_alone() -> None:
    world = make_world(max_num_seqs=8, num_blocks=200, max_num_batched_tokens=64)
    innocent, guilty = on_trial(world, 4)
    world.end(guilty, FinishReason.ABORT)
    world.fail_step()
    world.run()
    assert world.outcome(innocent) == world.expected(innocent)


@pytest.mark.parametrize("is_told_first", [False, True], ids=["a death", "a lost peer, a death"])
def test_nor_is_one_whose_company_leaves_during_the_recovery(is_told_first: bool) -> None:
    world = make_world(max_num_seqs=8, num_blocks=200, max_num_batched_tokens=64)
    innocent, guilty = on_trial(world, 4)
    if is_told_first:
        world.break_epoch(0, is_peer_lost=True)
    world.end(guilty, FinishReason.ABORT)
    world.start_epoch(is_blamed=True)
    world.run()
    assert world.outcome(innocent) == world.expected(innocent)


def test_the_one_condemned_may_have_left_as_well() -> None:
    world = make_world(max_num_seqs=8, num_blocks=200, max_num_batched_tokens=64)
    [alone] = on_trial(world, 1)
    world.break_epoch(0, is_peer_lost=True)
    world.end(alone, FinishReason.ABORT)
    world.start_epoch(is_blamed=True)
    world.scheduler.check()
    assert world.outcome(alone) == ([], FinishReason.ABORT)
    assert len(world.scheduler.suspects) == 0


def test_a_peer_that_is_quicker_to_report_covers_nobody() -> None:
    """The rank at fault frees the others by leaving: their words may come before its own."""
    world = make_world(max_num_seqs=8, tp_size=2)
    ids = [world.submit([k] * 5, max_tokens=12, ignore_eos=True) for k in range(2)]
    world.send()
    world.break_epoch(0, rank=1, is_peer_lost=True)
    assert len(world.scheduler.suspects) == 0
    late = StepFailed(world.epoch, 0, 0, "CUDA error")
    at_fault = EpochBroken(world.epoch, 0, 0, "CUDA error", ids)
    for told in (at_fault, None):  # a copy changes nothing
        assert world.scheduler.report(late, world.now) == told
        world.flush()
        assert [world.entry(k).strikes for k in ids] == [1, 1]
    world.start_epoch(is_blamed=True)  # and it died of it: the same crash
    assert [world.entry(k).strikes for k in ids] == [1, 1]
    world.scheduler.report(late, world.now)
    assert [world.entry(k).strikes for k in ids] == [1, 1]


def test_of_several_ranks_that_fail_of_one_request_the_first_is_named() -> None:
    world = make_world(max_num_seqs=8, tp_size=2)
    world.submit([2] * 5, max_tokens=12, ignore_eos=True)
    world.send()
    assert world.break_epoch(0, rank=1).rank == 1
    also = StepFailed(world.epoch, 0, 0, "not finite")
    assert world.scheduler.report(also, world.now) is None


def holds(step: Step, request_ids: set[int]) -> bool:
    everybody = step.rows + [request for request, _, _ in step.chunks]
    return any(request.request_id in request_ids for request in everybody)


def test_a_fault_seen_only_at_the_next_step_is_found_all_the_same() -> None:
    """A request of one step; the device tells when the next one is launched."""
    world = make_world(max_num_seqs=8, num_blocks=200, max_num_batched_tokens=64)
    others = [world.submit([k] * 5, max_tokens=40, ignore_eos=True) for k in range(3)]
    world.step()
    poison = world.submit([9] * 5, max_tokens=1, ignore_eos=True)
    while world.scheduler.requests:
        world.send()
        world.send()
        ledger = world.scheduler.ledger
        assert ledger is not None
        first = ledger.find(ledger.num_committed)
        assert first is not None
        if holds(first, {poison}):
            world.break_epoch(ledger.num_opened - 1)
            world.start_epoch()
        else:
            world.work()
            world.deliver()
        assert len(world.broken) <= 4
    assert world.outcome(poison)[1] is FinishReason.ENGINE_FAULT
    assert all(world.outcome(k) == world.expected(k) for k in others)


@pytest.mark.parametrize("seed", range(40))
def test_whoever_leaves_and_whenever_a_fault_is_seen_nobody_else_is_condemned(seed: int) -> None:
    chance = random.Random(seed)
    world = make_world(max_num_seqs=16, num_blocks=200, max_num_batched_tokens=64)
    ids = [
        world.submit([k] * 5, max_tokens=chance.randrange(1, 16), ignore_eos=True)
        for k in range(16)
    ]
    poison = set(chance.sample(ids, 2))

    def hang_up() -> None:
        if world.scheduler.requests and chance.random() < 0.4:
            wanted = chance.choice([poison & world.scheduler.requests.keys(), ids])
            if wanted:
                world.end(chance.choice(sorted(wanted)), FinishReason.ABORT)

    while world.scheduler.requests:
        world.send()
        if chance.random() < 0.7:
            world.send()
        ledger = world.scheduler.ledger
        assert ledger is not None
        first = ledger.find(ledger.num_committed)
        if first is None or not holds(first, poison):
            world.work()
            world.deliver()
        elif chance.random() < 0.5:
            hang_up()
            world.break_epoch(chance.randrange(first.number, ledger.num_opened))
            hang_up()
            world.start_epoch()
        else:
            hang_up()
            world.break_epoch(first.number, is_peer_lost=True)
            hang_up()
            world.start_epoch(is_blamed=True)
        world.scheduler.check()
        assert len(world.broken) < 40
    for request_id in set(ids) - poison:
        assert world.outcome(request_id)[1] is not FinishReason.ENGINE_FAULT
    assert all(
        world.outcome(k)[1] in (FinishReason.ENGINE_FAULT, FinishReason.ABORT) for k in poison
    )
