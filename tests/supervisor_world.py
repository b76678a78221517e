"""The launcher's policy and children that obey it, under a virtual clock: no process, no socket."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nvserve.protocol.control import (
    Condition,
    EpochBroken,
    EpochReady,
    Exit,
    FromChild,
    Peers,
    Ready,
    Role,
    StartEpoch,
    State,
)
from nvserve.protocol.progress import Phase, Snapshot
from nvserve.scripts.actions import Action, End, Kill, Member, Note, Send, Start
from nvserve.scripts.formation import Stage
from nvserve.scripts.hangs import ChildId, Observation
from nvserve.scripts.limits import Limits
from nvserve.scripts.recovery import Recovery


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
    exiting: set[ChildId] = field(default_factory=set)  # dead, but not reaped yet
    awake_since: float = 0.0
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

    def bury(self) -> None:
        """Those that were killed or are dead are reaped at last."""
        self.undying = False
        gone, self.exiting = self.exiting | set(self.killed), set()
        for child in sorted(gone):
            if child in self.alive:  # an end or a fence may have been faster
                self.die(child)

    def pass_time(self, seconds: float, *, beating: bool = True) -> None:
        """Time goes by in small ticks; all pages beat unless `beating` is off."""
        for _ in range(max(1, round(seconds / 0.25))):
            self.now += min(seconds, 0.25)
            if beating:
                for child in self.alive:
                    if child not in self.exiting:
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
                child in self.exiting,
                is_serving=self.member(child).is_worker
                and self.policy.formation.stage is Stage.SERVING,
            )
            for child in self.alive
        ]
        self.obey(self.policy.tick(self.now, seen, awake_since=self.awake_since))
        assert self.policy.next_deadline() >= self.now, "the loop would turn without a pause"

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
                    assert child in self.alive, "there is nothing left to kill"
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
        assert last.child == self.one(Role.CORE)
        assert self.orders(StartEpoch)[-1].epoch == epoch
        peers = self.orders(Peers)[-1]
        lives = (self.one(Role.FRONTEND).life, self.one(Role.CORE).life)
        assert (peers.frontend_life, peers.core_life) == lives
        assert self.orders(Condition)[-1].state is State.READY


def make_world(**limits: Any) -> World:
    return World(Limits(**({"tp_size": 2} | limits)))


def started(**limits: Any) -> World:
    world = make_world(**limits).start()
    world.check()
    assert world.policy.state is State.READY
    return world


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


def broken(world: World, rank: int, *, named: int) -> None:
    epoch = world.policy.formation.epoch
    world.hear(world.worker(rank), EpochBroken(epoch, named, 7, "connection closed by peer"))
