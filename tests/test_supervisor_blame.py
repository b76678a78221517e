"""Whose fault a death is, what of it counts; planned restarts, lost messages, injected faults."""

import signal
from pathlib import Path

import pytest
import zmq
from supervisor_world import started

from nvserve.protocol.channel import Outbox
from nvserve.protocol.codec import BadFrame, decode_to_core, encode
from nvserve.protocol.control import (
    Drain,
    Drained,
    FaultKind,
    Held,
    Hold,
    Inject,
    Peers,
    Role,
    Searching,
    StartEpoch,
    State,
)
from nvserve.protocol.faults import LAUNCH, Faults, InjectedFault, strike
from nvserve.protocol.messages import Finish
from nvserve.protocol.progress import Phase
from nvserve.scripts.actions import Action, Kill
from nvserve.scripts.children import Death
from nvserve.scripts.exit_codes import ExitCode
from nvserve.scripts.hangs import ChildId
from nvserve.scripts.oom import OomWatch

# -- who is to blame


@pytest.mark.parametrize(
    ("number", "has_oom_struck", "is_crash"),
    [
        (0, False, True),  # an exit status: nobody sent anything
        (signal.SIGSEGV, False, True),
        (signal.SIGABRT, False, True),
        (signal.SIGKILL, False, False),
        (signal.SIGTERM, False, False),
        (signal.SIGKILL, True, True),  # the kernel's own doing
        (signal.SIGTERM, True, False),
    ],
)
def test_a_signal_from_outside_is_no_crash(
    number: int, has_oom_struck: bool, is_crash: bool
) -> None:
    assert Death("ended", number).is_crash(has_oom_struck=has_oom_struck) is is_crash


def test_an_out_of_memory_kill_is_seen_once(tmp_path: Path) -> None:
    membership, events = tmp_path / "cgroup", tmp_path / "mount/ours/memory.events"
    membership.write_text("0::/ours\n")
    events.parent.mkdir(parents=True)
    events.write_text("oom 1\noom_kill 1\n")
    watch = OomWatch(tmp_path / "mount", membership)
    assert not watch.has_struck()
    events.write_text("oom 2\noom_kill 2\n")
    assert watch.has_struck()
    assert not watch.has_struck()


@pytest.mark.parametrize("is_crash", [False, True])
def test_a_workers_crash_is_told_to_core_with_the_next_epoch(is_crash: bool) -> None:
    world = started()
    child = world.worker(1)
    world.alive.remove(child)
    world.obey(world.policy.died(child, world.now, "ended", is_crash=is_crash))
    world.check()
    assert world.orders(StartEpoch)[-1].is_blamed is is_crash
    world.die(world.worker(0))
    assert not world.orders(StartEpoch)[-1].is_blamed


@pytest.mark.parametrize("is_survivor", [False, True])
def test_no_request_is_blamed_for_a_worker_that_crashes_before_it_joins(is_survivor: bool) -> None:
    world = started(num_spares=1)
    world.pass_time(0.25)
    [newcomer], survivor = world.spares(), world.worker(0)
    world.mute = {newcomer, survivor}
    world.die(world.worker(1))
    assert world.worker(1) == newcomer
    crashing = survivor if is_survivor else newcomer
    world.mute = {newcomer} - {crashing}
    world.alive.remove(crashing)
    world.obey(world.policy.died(crashing, world.now, "exited with 1", is_crash=True))
    world.mute = set()
    assert not any(order.is_blamed for order in world.orders(StartEpoch))


@pytest.mark.parametrize("is_crash", [False, True])
def test_cores_crash_is_told_to_the_frontend_with_the_next_life(is_crash: bool) -> None:
    world = started()
    child = world.one(Role.CORE)
    world.alive.remove(child)
    world.obey(world.policy.died(child, world.now, "ended", is_crash=is_crash))
    assert world.orders(Peers)[-1].is_blamed is is_crash


def test_crashes_of_a_search_are_not_counted_and_kills_are() -> None:
    world = started(max_restarts=2)
    world.hear(world.one(Role.CORE), Searching(8))
    for _ in range(6):
        child = world.worker(0)
        world.alive.remove(child)
        world.obey(world.policy.died(child, world.now, "crashed", is_crash=True))
        world.check()
    for _ in range(3):
        world.die(world.worker(0))
    world.pass_time(10.0)
    assert world.end is not None
    assert world.end.code is ExitCode.WORKER_LOST


def test_a_search_that_never_ends_is_given_up() -> None:
    world = started(max_restarts=2)
    world.hear(world.one(Role.CORE), Searching(8))
    for _ in range(60):
        if world.end is not None:
            break
        child = world.worker(0)
        world.alive.remove(child)
        world.obey(world.policy.died(child, world.now, "crashed", is_crash=True))
        world.pass_time(0.5)
        if world.policy.state is State.FAILED:
            world.pass_time(10.0)
    assert world.end is not None


# -- planned restarts


@pytest.mark.parametrize("name", ["worker 1", "core"])
def test_a_planned_restart_waits_for_core_to_hold_and_is_not_counted(name: str) -> None:
    world = started(max_restarts=0)
    number, actions = world.policy.restart(name, world.now)
    world.obey(actions)
    assert world.orders(Hold)
    assert not world.killed
    world.hear(world.one(Role.CORE), Held())
    assert len(world.killed) == 1
    world.check()
    assert world.policy.state is State.READY
    last = world.policy.planned.last
    assert last is not None
    assert (last.number, last.name) == (number, name)


def test_a_planned_restart_of_the_frontend_drains_it_first() -> None:
    world = started(max_restarts=0)
    _, actions = world.policy.restart("frontend", world.now)
    world.obey(actions)
    assert world.orders(Drain) == [Drain(30.0, is_restart=True)]
    old = world.one(Role.FRONTEND)
    world.hear(old, Drained())
    assert world.killed == [old]
    world.check()
    assert world.policy.state is State.READY


def test_a_core_that_does_not_hold_is_not_waited_for() -> None:
    world = started()
    _, actions = world.policy.restart("worker 0", world.now)
    world.obey(actions)
    world.pass_time(11.0)
    world.check()
    assert len(world.killed) == 1
    assert world.policy.planned.last is not None


@pytest.mark.parametrize("name", ["worker 0", "core", "frontend"])
@pytest.mark.parametrize("is_quiet", [True, False])
def test_only_what_does_not_become_quiet_shows_its_stacks(
    name: str, is_quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = started()
    kills: list[Kill] = []
    carry_out = world.carry_out

    def noting(actions: list[Action]) -> None:
        kills.extend(one for one in actions if isinstance(one, Kill))
        carry_out(actions)

    monkeypatch.setattr(world, "carry_out", noting)
    _, actions = world.policy.restart(name, world.now)
    world.obey(actions)
    if not is_quiet:
        world.pass_time(41.0)
    elif name == "frontend":
        world.hear(world.one(Role.FRONTEND), Drained())
    else:
        world.hear(world.one(Role.CORE), Held())
    assert [one.wants_stacks for one in kills] == [not is_quiet]


def test_only_one_restart_at_a_time_and_only_of_what_is_there() -> None:
    world = started()
    assert world.policy.restart("worker 7", world.now)[0] is None
    assert world.policy.restart("core", world.now)[0] is not None
    assert world.policy.restart("worker 0", world.now)[0] is None


@pytest.mark.parametrize("name", ["worker 1", "core"])
@pytest.mark.parametrize("has_held", [True, False])
def test_what_dies_by_itself_before_its_planned_restart_is_not_killed_again(
    name: str, has_held: bool
) -> None:
    world = started()
    world.mute = {ChildId(Role.WORKER, 2), ChildId(Role.CORE, 1)}  # late to the next epoch
    victim = world.worker(1) if name == "worker 1" else world.one(Role.CORE)
    _, actions = world.policy.restart(name, world.now)
    world.obey(actions)
    world.die(victim)
    if has_held:
        world.hear(world.one(Role.CORE), Held())
    world.pass_time(12.0)  # beyond the limit of a hold
    assert victim not in world.killed


def test_what_hangs_before_its_planned_restart_is_killed_once() -> None:
    world = started()
    hung = world.worker(1)
    _, actions = world.policy.restart("worker 1", world.now)
    world.obey(actions)
    world.undying = True
    for _ in range(56):  # it is found, and the limit of a hold passes before it is gone
        world.now += 0.25
        for child in world.alive:
            if child != hung:
                world.beat(child)
        world.tick()
    assert world.killed == [hung]
    world.undying = False
    world.die(hung)
    world.check()
    assert world.policy.state is State.READY


def test_a_last_drain_has_its_time_whatever_a_planned_one_had() -> None:
    world = started(shutdown_timeout_s=30.0)
    _, actions = world.policy.restart("frontend", world.now)
    world.obey(actions)
    world.pass_time(20.0)
    world.interrupt()
    world.pass_time(29.0)
    assert world.killed == []
    assert world.end is None
    world.pass_time(6.0)
    assert world.end is not None
    assert world.end.code is ExitCode.OK


@pytest.mark.parametrize("name", ["worker 1", "core"])
def test_a_hold_ends_although_the_server_drains(name: str) -> None:
    """Core would plan no step any more, were the restart forgotten."""
    world = started(max_restarts=0)
    _, actions = world.policy.restart(name, world.now)
    world.obey(actions)
    world.interrupt()
    world.hear(world.one(Role.CORE), Held())
    assert world.policy.formation.epoch == 1
    assert world.policy.state is State.DRAINING
    world.hear(world.one(Role.FRONTEND), Drained())
    assert world.end is not None
    assert world.end.code is ExitCode.OK


# -- lost messages


@pytest.mark.parametrize("idle", [Phase.WAITING, Phase.PREPARING_AHEAD])
@pytest.mark.parametrize("core_phase", [Phase.WAITING, Phase.SERVING])
def test_an_epoch_in_which_nothing_moves_is_renewed_when_core_has_requests(
    core_phase: Phase, idle: Phase
) -> None:
    world = started()
    for _ in range(30):
        world.now += 0.25
        for child in world.alive:
            world.beat(child, core_phase if child.role is Role.CORE else idle)
        world.tick()
    assert (world.policy.formation.epoch > 0) is (core_phase is Phase.SERVING)
    assert not world.killed


def test_an_epoch_that_did_not_move_while_all_were_frozen_goes_on() -> None:
    world = started(max_restarts=0)
    for seconds in (0.25, 60.0, *[0.25] * 20):
        world.now += seconds
        if seconds > 1.0:
            world.awake_since = world.now
        for child in world.alive:
            world.beat(child, Phase.SERVING if child.role is Role.CORE else Phase.WAITING)
        world.tick()
    assert not world.notes
    for _ in range(4):  # and is found when it still does not
        world.now += 0.25
        for child in world.alive:
            world.beat(child, Phase.SERVING if child.role is Role.CORE else Phase.WAITING)
        world.tick()
    assert world.policy.state is State.FAILED


# -- injected faults


def test_a_fault_strikes_from_its_step_on_and_as_often_as_told() -> None:
    faults = Faults()
    fault = Inject(FaultKind.EXCEPTION, step=5, phase=LAUNCH, count=2)
    faults.arm(fault)
    found = [faults.find(LAUNCH, step=step) for step in range(4, 9)]
    assert found == [None, fault, fault, None, None]
    with pytest.raises(InjectedFault):
        strike(fault)


def test_a_poisonous_token_is_the_only_trigger() -> None:
    faults = Faults()
    faults.arm(Inject(FaultKind.CRASH, phase=LAUNCH, token=77))
    assert faults.find(LAUNCH, step=1, tokens=(1, 2)) is None
    assert faults.find(LAUNCH, step=2, tokens=(1, 77)) is not None


@pytest.mark.parametrize(
    ("kind", "num_sent"),
    [
        (FaultKind.DROP, 0),
        (FaultKind.DUPLICATE, 2),
        (FaultKind.CORRUPT, 1),
        (FaultKind.DELAY, 0),
    ],
)
def test_messages_are_dropped_doubled_broken_and_delayed(
    kind: FaultKind, num_sent: int, tmp_path: Path
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outbox = Outbox(context, f"ipc://{tmp_path}/nobody")
    sent: list[bytes] = []
    faults = Faults()
    frame = encode(Finish(0, 0, [1]))
    faults.arm(Inject(kind, message="Finish", seed=3))

    def send(_: Outbox, frame: bytes) -> bool:
        sent.append(frame)
        return True

    try:
        assert faults.send(outbox, frame, send)
        assert len(sent) == num_sent
        if kind is FaultKind.CORRUPT:
            with pytest.raises(BadFrame):
                decode_to_core(sent[0])
        faults.send_late(send)
        if kind is FaultKind.DELAY:
            assert sent[-1] == frame
    finally:
        outbox.close()
        context.term()
