"""How launches end, under a virtual clock: failures, signals, drains, and every history."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from supervisor_world import broken, make_world, silence, started

from nvserve.protocol.control import (
    Condition,
    Drain,
    Drained,
    EpochBroken,
    Exit,
    Failed,
    Held,
    Ready,
    Role,
    State,
)
from nvserve.protocol.progress import Phase
from nvserve.scripts.actions import End
from nvserve.scripts.exit_codes import ExitCode
from nvserve.scripts.hangs import ChildId

FRONTEND, CORE = Role.FRONTEND, Role.CORE
EVENTS = ["die", "time", "break", "hang", "mute", "slow", "restart", "quiet", "interrupt"]


@pytest.mark.parametrize("role", list(Role))
def test_a_death_before_the_first_readiness_ends_the_launch(role: Role) -> None:
    world = make_world()
    world.mute = {ChildId(Role.WORKER, 0)}
    world.start()
    world.die(next(child for child in world.alive if child.role is role))
    world.pass_time(10.0)
    assert world.end is not None
    assert world.end.code is ExitCode.START_FAILED
    assert world.alive == []


def test_a_failure_told_by_a_child_is_the_reason_of_the_end() -> None:
    world = make_world()
    world.mute = {ChildId(Role.WORKER, 0)}
    world.start()
    world.hear(ChildId(Role.WORKER, 0), Failed("no such tensor"))
    world.pass_time(10.0)
    assert world.end == End(ExitCode.START_FAILED, "no such tensor")


def test_one_broken_epoch_after_another_ends_the_launch() -> None:
    world = started(max_restarts=5)
    for _ in range(6):
        broken(world, 0, named=-1)
        world.pass_time(0.5)
    world.pass_time(5.0)
    assert world.end is not None
    assert world.end.code is ExitCode.WORKER_LOST


def test_the_ladder_goes_from_one_rank_to_all_workers_to_core_to_the_end() -> None:
    world = started(max_restarts=1000)
    core = world.one(CORE)
    world.mute = {ChildId(Role.WORKER, life) for life in range(2, 40)}
    world.die(world.worker(0))
    first_try = world.worker(0)
    world.die(first_try)  # rung 1 again
    assert world.worker(1) == ChildId(Role.WORKER, 1)
    world.die(world.worker(0))  # rung 2: all workers
    assert ChildId(Role.WORKER, 1) in world.killed
    assert world.one(CORE) == core
    world.die(world.worker(0))
    world.die(world.worker(0))  # rung 3: core as well
    assert core in world.killed
    world.die(world.worker(0))
    world.die(world.worker(0))  # rung 4
    world.pass_time(10.0)
    assert world.end is not None
    assert world.end.code is ExitCode.RECOVERY_FAILED


def test_deaths_outside_the_window_do_not_add_up() -> None:
    world = started(max_restarts=1, restart_window_s=60.0)
    for _ in range(5):
        world.die(world.worker(0))
        world.check()
        world.pass_time(61.0)
    assert world.policy.state is State.READY


@pytest.mark.parametrize(
    ("role", "code"),
    [
        (FRONTEND, ExitCode.FRONTEND_LOST),
        (CORE, ExitCode.CORE_LOST),
        (Role.WORKER, ExitCode.WORKER_LOST),
    ],
)
def test_too_many_deaths_exit_with_the_code_of_the_last_role(role: Role, code: ExitCode) -> None:
    world = started(max_restarts=0)
    world.die(next(child for child in world.alive if child.role is role))
    world.pass_time(10.0)
    assert world.end is not None
    assert world.end.code is code
    assert world.alive == []


def test_the_frontend_may_answer_everybody_before_a_failed_server_goes() -> None:
    world = started(max_restarts=0)
    world.die(world.one(CORE))
    assert world.alive == [world.one(FRONTEND)]
    assert world.orders(Condition)[-1].state is State.FAILED
    assert world.orders(Drain)
    world.hear(world.one(FRONTEND), Drained())
    assert world.end is not None


def test_a_first_interrupt_drains_and_ends_with_zero() -> None:
    world = started()
    world.interrupt()
    assert world.policy.state is State.DRAINING
    assert world.orders(Drain) == [Drain(30.0)]
    world.pass_time(20.0)
    assert world.end is None
    world.hear(world.one(FRONTEND), Drained())
    assert world.end is not None
    assert world.end.code is ExitCode.OK


def test_a_drain_has_a_limit() -> None:
    world = started(shutdown_timeout_s=3.0)
    world.interrupt()
    world.pass_time(5.5)
    assert world.end is not None
    assert world.end.code is ExitCode.OK


def test_a_worker_that_dies_while_draining_is_still_replaced() -> None:
    world = started()
    world.interrupt()
    world.die(world.worker(0))
    assert world.policy.formation.epoch == 1
    assert world.policy.state is State.DRAINING
    world.hear(world.one(FRONTEND), Drained())
    assert world.end is not None
    assert world.end.code is ExitCode.OK


def test_a_second_interrupt_kills_all_but_the_frontend_which_answers_everybody_first() -> None:
    world = started()
    world.interrupt()
    frontend = world.one(FRONTEND)
    world.interrupt()
    assert frontend in [order.child for order in world.sent if isinstance(order.message, Exit)]
    assert frontend not in world.killed
    assert len(world.killed) == 3
    assert {condition.state for condition in world.orders(Condition)[-2:]} == {State.DRAINING}
    assert world.end is not None
    assert world.end.code is ExitCode.INTERRUPTED


@pytest.mark.parametrize("is_impatient", [False, True])
def test_a_frontend_that_does_not_leave_is_killed_soon_or_by_a_third_interrupt(
    is_impatient: bool,
) -> None:
    world = started()
    frontend = world.one(FRONTEND)
    world.mute = {frontend}
    world.interrupt()
    world.interrupt()
    assert world.alive == [frontend]
    if is_impatient:
        world.interrupt()
    else:
        world.pass_time(2.25)
    assert world.killed[-1] == frontend
    assert world.end is not None
    assert world.end.code is ExitCode.INTERRUPTED


def test_a_second_interrupt_after_a_drain_keeps_the_frontend_too() -> None:
    """It has been told to leave, and may be answering."""
    world = started()
    stubborn, frontend = world.worker(0), world.one(FRONTEND)
    world.mute = {stubborn, frontend}
    world.interrupt()
    world.hear(frontend, Drained())
    world.interrupt()
    assert stubborn in world.killed
    assert world.alive == [frontend]


def test_a_child_that_does_not_leave_is_killed_after_two_seconds() -> None:
    world = started()
    stubborn = world.worker(0)
    world.mute = {stubborn}
    world.interrupt()
    world.hear(world.one(FRONTEND), Drained())
    world.pass_time(1.75)
    assert world.killed == []
    world.pass_time(0.5)
    assert world.killed == [stubborn]
    assert world.end is not None


@pytest.mark.parametrize("is_loading", [False, True])
def test_an_interrupt_while_starting_stops_at_once_with_zero(is_loading: bool) -> None:
    """Before a worker says Ready as well as before it joins."""
    world = make_world()
    slow = ChildId(Role.WORKER, 0)
    world.mute = {slow}
    world.start()
    if is_loading:
        world.hear(slow, Ready())
    world.interrupt()
    assert world.killed == [slow]
    assert world.end is not None
    assert world.end.code is ExitCode.OK


@settings(max_examples=200, deadline=None)
@given(
    events=st.lists(
        st.tuples(st.sampled_from(EVENTS), st.integers(0, 6)),
        max_size=25,
    ),
    num_spares=st.integers(0, 1),
)
def test_any_history_ends_ready_or_ended(events: list[tuple[str, int]], num_spares: int) -> None:
    world = started(tp_size=3, num_spares=num_spares, max_restarts=8)
    for kind, number in events:
        if world.end is not None or not world.alive:
            break
        child = world.alive[number % len(world.alive)]
        match kind:
            case "die":
                world.die(child)
            case "time":
                world.pass_time(number / 2)
            case "break":
                world.hear(child, EpochBroken(world.policy.formation.epoch, number - 1, 1, "x"))
            case "hang":
                silence(world, {child: (Phase.FORWARD, number)}, 6.0)
            case "slow":  # the dead are not reaped for a while, and survivors complain
                world.undying, world.exiting = True, {child}
                others = [other for other in world.alive if other != child]
                for other in others[: number % 3]:
                    epoch = world.policy.formation.epoch
                    world.hear(other, EpochBroken(epoch, number - 1, 1, "x"))
                world.pass_time(number / 2)
                world.bury()
            case "restart":
                name = world.member(child).name
                world.obey(world.policy.restart(name, world.now)[1])
            case "quiet":
                world.hear(child, Drained() if child.role is FRONTEND else Held())
            case "interrupt":
                if number == 0:
                    world.interrupt()
            case _:
                world.mute.add(child)
        world.check()
    world.mute.clear()
    world.pass_time(200.0)
    world.check()
    assert world.policy.state is State.READY or world.end is not None
