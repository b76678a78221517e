"""Processes that live and do nothing, under a virtual clock: found, fenced and replaced."""

import pytest
from supervisor_world import make_world, silence, started

from nvserve.protocol.control import (
    EpochReady,
    Role,
    State,
)
from nvserve.protocol.progress import Phase
from nvserve.scripts.exit_codes import ExitCode
from nvserve.scripts.hangs import ChildId


def test_survivors_wait_until_the_fenced_are_gone() -> None:
    world = started()
    hung = world.worker(1)
    world.undying = True
    world.pass_time(1.0)
    world.stopped = {hung}
    for _ in range(26):
        world.now += 0.25
        for child in world.alive:
            if child != hung:
                world.beat(child)
        world.tick()
    assert world.killed == [hung]
    assert world.policy.formation.epoch == 0, "a new epoch began beside a half-dead worker"
    world.undying = False
    world.die(hung)
    world.check()
    assert world.policy.formation.epoch == 1


def test_a_process_that_does_not_die_ends_the_launch() -> None:
    world = started()
    hung = world.worker(1)
    world.undying = True
    world.beat(hung)
    for _ in range(80):
        world.now += 0.25
        for child in world.alive:
            if child != hung:
                world.beat(child)
        world.tick()
    assert "worker 1 did not die" in world.policy.reason
    assert world.policy.state is State.FAILED


def test_of_two_silent_ranks_the_one_behind_in_collectives_is_at_fault() -> None:
    world = started()
    first, second = world.worker(0), world.worker(1)
    silence(world, {first: (Phase.FORWARD, 9), second: (Phase.FORWARD, 8)}, 6.0)
    assert world.killed == [second]
    assert world.worker(0) == first
    world.check()


@pytest.mark.parametrize("idle", [Phase.WAITING, Phase.PREPARING_AHEAD])
def test_of_two_silent_ranks_level_in_collectives_the_busy_one_is_at_fault(idle: Phase) -> None:
    world = started()
    first, second = world.worker(0), world.worker(1)
    silence(world, {first: (Phase.SAMPLING, 9), second: (idle, 9)}, 6.0)
    assert world.killed == [first]


def test_without_a_single_culprit_all_workers_are_replaced() -> None:
    world = started(tp_size=3)
    both = {world.worker(rank): (Phase.FORWARD, 9) for rank in (0, 1)}
    third = world.worker(2)
    silence(world, both, 6.0)
    assert set(world.killed) == {*both, third}
    assert any("no single culprit" in note for note in world.notes)
    world.check()


def test_a_survivor_freed_by_the_fence_is_not_taken_for_hung() -> None:
    world = started()
    first, second = world.worker(0), world.worker(1)
    world.mute = {first}
    silence(world, {first: (Phase.FORWARD, 9), second: (Phase.FORWARD, 8)}, 5.75)
    world.mute = set()
    world.hear(first, EpochReady(1, 50))
    world.pass_time(3.0)
    assert world.killed == [second]
    world.check()


def test_a_worker_that_stops_while_it_still_shows_the_rebuild_is_found_in_time() -> None:
    world = started()
    hung = world.worker(1)
    silence(world, {hung: (Phase.REBUILDING, 0)}, 6.0)
    assert world.killed == [hung]


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.LOADING])
def test_loading_may_be_silent_for_long_but_not_for_ever(phase: Phase) -> None:
    world = make_world()
    loading = ChildId(Role.WORKER, 1)
    world.mute = {loading}
    world.start()
    silence(world, {loading: (phase, 0)}, 60.0)
    assert world.policy.state is State.LOADING
    for _ in range(2400):
        world.now += 0.25
        for child in world.alive:
            if child != loading:
                world.beat(child)
        world.tick()
    assert world.end is not None
    assert world.end.code is ExitCode.START_FAILED


def test_a_survivor_that_does_not_answer_in_time_is_fenced_as_well() -> None:
    world = started()
    deaf = world.worker(1)
    world.mute = {deaf}
    world.die(world.worker(0))
    world.pass_time(1.75)
    assert world.killed == []
    world.pass_time(0.75)
    assert world.killed == [deaf]
    world.check()


def test_a_recovery_that_takes_too_long_goes_a_rung_down() -> None:
    world = started()
    kept = world.worker(1)
    world.mute = {ChildId(Role.WORKER, 2)}
    world.die(world.worker(0))
    world.pass_time(13.0)
    assert kept in world.killed
    world.check()
    assert world.policy.state is State.READY
