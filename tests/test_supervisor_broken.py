"""Epochs that somebody says are broken, under a virtual clock: one event is one death."""

import pytest
from supervisor_world import World, broken, started

from nvserve.protocol.control import EpochBroken, Held, Role, StartEpoch, State
from nvserve.scripts.hangs import ChildId


def find_hung(world: World, hung: ChildId) -> None:
    """Time passes until the launcher has found it and killed it in vain."""
    world.undying = True
    world.pass_time(1.0)
    world.stopped = {hung}
    while hung not in world.killed:
        pass_time_without(world, hung)


def pass_time_without(world: World, silent: ChildId) -> None:
    world.now += 0.25
    for child in world.alive:
        if child != silent:
            world.beat(child)
    world.tick()


@pytest.mark.parametrize("named", [-1, 0])
@pytest.mark.parametrize("role", [Role.CORE, Role.WORKER])
def test_what_survivors_say_while_a_hung_one_is_fenced_is_no_second_death(
    role: Role, named: int
) -> None:
    world = started(max_restarts=1)
    hung, kept = world.worker(1), world.worker(0)
    find_hung(world, hung)
    told_by = world.one(Role.CORE) if role is Role.CORE else kept
    world.hear(told_by, EpochBroken(0, named, 7, "lost a peer", [1, 2]))
    for _ in range(4):
        pass_time_without(world, hung)
    world.undying = False
    world.die(hung)
    world.check()
    assert world.policy.state is State.READY
    assert world.policy.formation.epoch == 1
    assert world.killed == [hung]


@pytest.mark.parametrize("is_core_first", [False, True])
def test_the_rank_that_core_names_is_replaced_whoever_tells_first(is_core_first: bool) -> None:
    world = started()
    guilty = world.worker(1)
    reports = [
        (world.worker(0), EpochBroken(0, -1, 7, "lost a peer", [])),
        (world.one(Role.CORE), EpochBroken(0, 1, 7, "out of memory", [4])),
    ]
    for child, message in reports[::-1] if is_core_first else reports:
        world.hear(child, message)
    world.pass_time(0.5)
    world.check()
    assert world.killed == [guilty]
    assert world.policy.state is State.READY


def test_what_survivors_say_after_a_planned_kill_is_no_death() -> None:
    world = started(max_restarts=0)
    world.undying = True
    victim = world.worker(1)
    _, actions = world.policy.restart("worker 1", world.now)
    world.obey(actions)
    world.hear(world.one(Role.CORE), Held())
    assert world.killed == [victim]
    broken(world, 0, named=-1)
    world.pass_time(1.0)
    world.undying = False
    world.die(victim)
    world.check()
    assert world.policy.state is State.READY


@pytest.mark.parametrize("role", [Role.CORE, Role.WORKER])
def test_a_dead_one_that_is_not_reaped_yet_is_waited_for_and_counted_once(role: Role) -> None:
    world = started(max_restarts=1)
    dead = world.one(Role.CORE) if role is Role.CORE else world.worker(1)
    world.exiting = {dead}
    broken(world, 0, named=-1)
    for _ in range(8):
        world.pass_time(0.25)
        assert world.policy.formation.epoch == 0, "a new epoch began beside a half-dead process"
        assert world.policy.state is State.RECOVERING
    world.die(dead)
    world.check()
    assert world.policy.state is State.READY
    assert world.policy.formation.epoch == 1
    assert world.killed == []


@pytest.mark.parametrize("hang_timeout_s", [5.0, 600.0])
def test_a_dead_one_that_is_never_reaped_holds_nobody_up_and_is_no_crash(
    hang_timeout_s: float,
) -> None:
    world = started(max_restarts=1, hang_timeout_s=hang_timeout_s)
    stuck = world.worker(1)
    world.beat(stuck)
    world.exiting = world.mute = {stuck}
    broken(world, 0, named=-1)
    begun = world.now
    while not world.killed:
        pass_time_without(world, stuck)
        assert world.now - begun < 25.0
    assert stuck in world.killed
    assert not world.orders(StartEpoch)[-1].is_blamed
    world.check()


def test_a_dying_spare_explains_no_broken_epoch() -> None:
    world = started(num_spares=1)
    world.pass_time(0.5)
    world.exiting = set(world.spares())
    broken(world, 0, named=-1)
    world.pass_time(0.5)
    assert world.policy.formation.epoch == 1
