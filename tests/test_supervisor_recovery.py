"""The launcher's policy under a virtual clock: every death, hang and signal, no process."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvserve.protocol.control import (
    Condition,
    Drain,
    Drained,
    EpochBroken,
    EpochReady,
    Exit,
    Failed,
    FromChild,
    Peers,
    Ready,
    Role,
    StartEpoch,
    State,
)
from nvserve.protocol.progress import Phase, Snapshot
from nvserve.scripts.actions import Action, End, Kill, Member, Note, Send, Start
from nvserve.scripts.exit_codes import ExitCode
from nvserve.scripts.formation import Stage
from nvserve.scripts.hangs import ChildId, Observation
from nvserve.scripts.recovery import Limits, Recovery

FRONTEND, CORE = Role.FRONTEND, Role.CORE


@dataclass
class World:
    """Children that do as they are told at once, unless a test takes them by the hand."""

    limits: Limits
    now: float = 100.0
    alive: list[ChildId] = field(default_factory=list)
    killed: list[ChildId] = field(default_factory=list)
    sent: list[Send] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    end: End | None = None
    mute: set[ChildId] = field(default_factory=set)  # do not answer StartEpoch
    undying: bool = False  # a kill has no effect yet
    pages: dict[ChildId, Snapshot] = field(default_factory=dict)
    stopped: set[ChildId] = field(default_factory=set)
    answers: deque[Callable[[], None]] = field(default_factory=deque)
    is_answering: bool = False

    def __post_init__(self) -> None:
        self.policy = Recovery(self.limits)

    # -- what a test does ------------------------------------------------------------------------

    def start(self) -> "World":
        self.obey(self.policy.start(self.now))
        return self

    def hear(self, child: ChildId, message: FromChild) -> None:
        if child not in self.alive:
            return
        self.obey(self.policy.received(child, message, self.now))

    def die(self, child: ChildId, cause: str = "was killed by SIGKILL") -> None:
        self.alive.remove(child)
        self.obey(self.policy.died(child, self.now, cause))

    def pass_time(self, seconds: float, *, beating: bool = True) -> None:
        """Time goes by in small ticks; all pages beat unless `beating` is off."""
        for _ in range(max(1, round(seconds / 0.25))):
            self.now += min(seconds, 0.25)
            if beating:
                for child in self.alive:
                    self.beat(child)
            self.tick()

    def beat(self, child: ChildId, phase: Phase = Phase.WAITING, entered: int = 0) -> None:
        epoch = -1 if child in self.mute else self.policy.formation.epoch
        self.pages[child] = Snapshot(epoch, 5, phase, entered, entered, self.now)

    def tick(self) -> None:
        seen = [
            Observation(
                child,
                self.member(child).rank,
                self.pages.get(child),
                self.member(child).started_s,
                child in self.stopped,
                is_serving=self.member(child).is_worker
                and self.policy.formation.stage is Stage.SERVING,
            )
            for child in self.alive
        ]
        self.obey(self.policy.tick(self.now, seen, awake_since=0.0))

    def interrupt(self) -> None:
        self.obey(self.policy.interrupt(self.now))

    # -- what the children do --------------------------------------------------------------------

    def obey(self, actions: list[Action]) -> None:
        """Take the actions, then the children's answers to them, one event after another."""
        self.carry_out(actions)
        if self.is_answering:
            return
        self.is_answering = True
        while self.answers:
            self.answers.popleft()()
        self.is_answering = False

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(child):
                    self.alive.append(child)
                    if child not in self.mute:
                        self.answers.append(partial(self.hear, child, Ready()))
                case Kill(child):
                    self.killed.append(child)
                    if not self.undying:
                        self.answers.append(partial(self.die, child))
                case Send():
                    self.sent.append(action)
                    self.answers.append(partial(self.answer, action))
                case Note(text):
                    self.notes.append(text)
                case End():
                    assert self.end is None, "it ended twice"
                    self.end = action

    def answer(self, order: Send) -> None:
        if order.child in self.mute or order.child not in self.alive:
            return
        match order.message:
            case StartEpoch(epoch):
                self.hear(order.child, EpochReady(epoch, 50))
            case Exit():
                self.die(order.child, "exited with status 0")
            case _:
                pass

    # -- what a test asks ------------------------------------------------------------------------

    def member(self, child: ChildId) -> Member:
        return self.policy.members[child]

    def worker(self, rank: int) -> ChildId:
        [child] = [
            c for c in self.alive if self.member(c).is_worker and self.member(c).rank == rank
        ]
        return child

    def one(self, role: Role) -> ChildId:
        [child] = [child for child in self.alive if child.role is role]
        return child

    def spares(self) -> list[ChildId]:
        return [child for child in self.alive if self.member(child).is_spare]

    def orders(self, kind: type) -> list[Any]:
        return [order.message for order in self.sent if isinstance(order.message, kind)]

    def check(self) -> None:
        """What must hold whenever the server says that it is ready."""
        assert set(self.alive) == set(self.policy.members)
        if self.policy.state is not State.READY:
            return
        epoch = self.policy.formation.epoch
        ranks = sorted(m.rank for m in self.policy.members.values() if m.is_worker)
        assert ranks == list(range(self.limits.tp_size))
        assert all(m.joined_epoch == epoch for m in self.policy.members.values() if m.is_worker)
        last = [order for order in self.sent if isinstance(order.message, StartEpoch)][-1]
        assert last.child == self.one(CORE)
        assert self.orders(StartEpoch)[-1].epoch == epoch
        peers = self.orders(Peers)[-1]
        lives = (self.one(FRONTEND).life, self.one(CORE).life)
        assert (peers.frontend_life, peers.core_life) == lives
        assert self.orders(Condition)[-1].state is State.READY


def make_world(**limits: Any) -> World:
    return World(Limits(**({"tp_size": 2} | limits)))


def started(**limits: Any) -> World:
    world = make_world(**limits).start()
    world.check()
    assert world.policy.state is State.READY
    return world


def test_core_gets_the_smallest_pool_and_later_epochs_the_same_one() -> None:
    world = make_world()
    world.mute = {ChildId(Role.WORKER, 0), ChildId(Role.WORKER, 1)}
    world.start()
    for rank, num_blocks in ((0, 70), (1, 60)):
        child = world.worker(rank)
        world.hear(child, Ready())
        world.hear(child, EpochReady(0, num_blocks))
    assert world.orders(StartEpoch)[-1] == StartEpoch(0, 2, num_kv_blocks=60)
    world.die(world.worker(0))
    assert {order.num_kv_blocks for order in world.orders(StartEpoch) if order.epoch == 1} == {60}


def test_a_rank_without_room_for_the_pool_is_replaced() -> None:
    world = started()
    world.mute = {ChildId(Role.WORKER, 2)}
    world.die(world.worker(0))
    newcomer = world.worker(0)
    world.hear(newcomer, Ready())
    world.hear(newcomer, EpochReady(1, 49))
    assert newcomer in world.killed
    world.check()


def test_core_is_told_only_when_every_rank_has_joined() -> None:
    world = make_world()
    world.mute = {ChildId(Role.WORKER, 1)}
    world.start()
    assert not [o for o in world.sent if o.child.role is CORE and isinstance(o.message, StartEpoch)]
    assert world.policy.state is State.LOADING


def test_the_server_is_not_ready_before_its_frontend() -> None:
    world = make_world()
    world.mute = {ChildId(FRONTEND, 0)}
    world.start()
    assert world.orders(Condition)[-1].state is State.LOADING
    assert world.orders(Peers) == []
    world.hear(ChildId(FRONTEND, 0), Ready())
    world.check()
    assert world.orders(Condition)[-1].state is State.READY


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


def test_a_worker_death_fences_nobody_and_keeps_the_survivors() -> None:
    world = started(tp_size=4)
    kept = [world.worker(rank) for rank in (0, 1, 3)]
    world.die(world.worker(2))
    world.check()
    assert world.killed == []
    assert [world.worker(rank) for rank in (0, 1, 3)] == kept
    assert world.policy.formation.epoch == 1
    assert world.policy.restarts == {FRONTEND: 0, CORE: 0, Role.WORKER: 1}


def test_the_spare_takes_the_rank_and_another_one_is_started_after_the_recovery() -> None:
    world = started(num_spares=1)
    world.pass_time(0.5)
    [spare] = world.spares()
    world.die(world.worker(0))
    assert world.worker(0) == spare
    assert world.spares() == []
    world.pass_time(0.5)
    assert len(world.spares()) == 1


def test_no_spare_is_started_before_the_server_is_ready() -> None:
    world = make_world(num_spares=1)
    world.mute = {ChildId(Role.WORKER, 0)}
    world.start()
    world.pass_time(5.0)
    assert world.spares() == []


def test_a_spare_that_keeps_dying_is_tried_less_and_less_often() -> None:
    world = started(num_spares=1)
    world.mute = {ChildId(Role.WORKER, life) for life in range(2, 100)}
    num_started = 0
    for _ in range(400):
        world.pass_time(0.25)
        for spare in world.spares():
            num_started += 1
            world.die(spare)
    assert 3 <= num_started <= 8  # at 0, 2, 6, 14, 30, 62 s
    assert world.policy.state is State.READY


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


def silence(world: World, children: dict[ChildId, tuple[Phase, int]], seconds: float) -> None:
    """All but `children` beat; these show a phase and a count of collectives, once."""
    for child, (phase, entered) in children.items():
        world.beat(child, phase, entered)
    for _ in range(round(seconds / 0.25)):
        world.now += 0.25
        for child in world.alive:
            if child not in children:
                world.beat(child)
        world.tick()


def test_of_two_silent_ranks_the_one_behind_in_collectives_is_at_fault() -> None:
    world = started()
    first, second = world.worker(0), world.worker(1)
    silence(world, {first: (Phase.FORWARD, 9), second: (Phase.FORWARD, 8)}, 6.0)
    assert world.killed == [second]
    assert world.worker(0) == first
    world.check()


def test_of_two_silent_ranks_level_in_collectives_the_busy_one_is_at_fault() -> None:
    world = started()
    first, second = world.worker(0), world.worker(1)
    silence(world, {first: (Phase.SAMPLING, 9), second: (Phase.WAITING, 9)}, 6.0)
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


def test_a_core_death_keeps_every_worker_and_makes_a_new_epoch() -> None:
    world = started()
    workers = [world.worker(0), world.worker(1)]
    world.die(world.one(CORE))
    world.check()
    assert [world.worker(0), world.worker(1)] == workers
    assert world.one(CORE) == ChildId(CORE, 1)
    assert world.policy.formation.epoch == 1


def test_a_core_that_does_not_take_up_the_epoch_is_replaced() -> None:
    world = started()
    world.mute = {ChildId(CORE, 1)}
    world.die(world.one(CORE))
    world.hear(ChildId(CORE, 1), Ready())
    world.pass_time(11.0)
    assert world.killed == [ChildId(CORE, 1)]
    world.check()


def test_a_frontend_death_makes_no_epoch() -> None:
    world = started()
    world.die(world.one(FRONTEND))
    world.check()
    assert world.policy.formation.epoch == 0
    assert world.orders(Peers)[-1] == Peers(1, 0)
    assert world.orders(Condition)[-1].frontend_restarts_total == 1


def test_a_frontend_and_a_worker_die_at_once() -> None:
    world = started()
    world.die(world.one(FRONTEND))
    world.die(world.worker(0))
    world.check()
    assert world.policy.state is State.READY


def broken(world: World, rank: int, *, named: int) -> None:
    epoch = world.policy.formation.epoch
    world.hear(world.worker(rank), EpochBroken(epoch, named, 7, "connection closed by peer"))


def test_a_lost_peer_is_not_blamed_on_the_one_who_noticed() -> None:
    world = started()
    noticed, dead = world.worker(0), world.worker(1)
    broken(world, 0, named=0)
    world.now += 0.01
    world.die(dead)
    world.pass_time(1.0)
    assert world.killed == []
    assert world.worker(0) == noticed
    assert world.policy.formation.epoch == 1
    world.check()


def test_a_broken_epoch_that_names_a_rank_replaces_that_rank() -> None:
    world = started()
    named = world.worker(1)
    broken(world, 0, named=1)
    world.pass_time(0.5)
    assert world.killed == [named]
    world.check()


def test_news_of_an_older_epoch_is_ignored() -> None:
    world = started()
    world.die(world.worker(0))
    world.hear(world.worker(1), EpochBroken(0, -1, 7, "late"))
    world.pass_time(1.0)
    assert world.policy.formation.epoch == 1


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


def test_a_recovery_that_takes_too_long_goes_a_rung_down() -> None:
    world = started()
    kept = world.worker(1)
    world.mute = {ChildId(Role.WORKER, 2)}
    world.die(world.worker(0))
    world.pass_time(13.0)
    assert kept in world.killed
    world.check()
    assert world.policy.state is State.READY


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


def test_a_second_interrupt_kills_everything() -> None:
    world = started()
    world.interrupt()
    world.interrupt()
    assert world.end is not None
    assert world.end.code is ExitCode.INTERRUPTED
    assert len(world.killed) == 4


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


def test_an_interrupt_while_starting_stops_at_once_with_zero() -> None:
    world = make_world()
    world.mute = {ChildId(Role.WORKER, 0)}
    world.start()
    world.interrupt()
    world.pass_time(3.0)
    assert world.end is not None
    assert world.end.code is ExitCode.OK


@settings(max_examples=200, deadline=None)
@given(
    events=st.lists(
        st.tuples(st.sampled_from(["die", "time", "break", "hang", "mute"]), st.integers(0, 6)),
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
            case _:
                world.mute.add(child)
        world.check()
    world.mute.clear()
    world.pass_time(200.0)
    world.check()
    assert world.policy.state is State.READY or world.end is not None
