"""A whole launch in virtual time: real policy, scheduler and journal, all else simulated.

`Cluster.run` serves requests while faults strike, and says what became of each request.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simulation.clock import Clock, MessageFaults, Pipe, Process
from simulation.frontend import Client, Frontend
from simulation.workers import Group, Worker

from nvserve.core.limits import Limits
from nvserve.core.replies import Replies
from nvserve.core.scheduler import Scheduler
from nvserve.core.stats import core_stats
from nvserve.protocol.control import (
    Condition,
    Drain,
    EpochBroken,
    EpochReady,
    Exit,
    Held,
    Hold,
    Peers,
    Ready,
    Role,
    Searching,
    StartEpoch,
)
from nvserve.protocol.messages import Abort, FinishReason, Hello, Submit, unpack_ids
from nvserve.protocol.progress import Phase, Snapshot
from nvserve.scripts.actions import Action, End, Kill, Note, Send, Start
from nvserve.scripts.broken_epoch import SETTLE_S
from nvserve.scripts.formation import Stage
from nvserve.scripts.hangs import ChildId, Observation
from nvserve.scripts.limits import Limits as PolicyLimits
from nvserve.scripts.recovery import Recovery

CORE_POISON = 99  # a token that kills core when it plans it
TICK_S = 0.25
STATS_S = 0.5
REAP_S = (0.01, 1.0)  # from a death until its peers' launcher can know what it was
START_S = {Role.FRONTEND: 0.4, Role.CORE: 0.3, Role.WORKER: 3.0}


@dataclass(eq=False)
class Core(Process):
    """One life of core: the real scheduler behind simulated sockets."""

    cluster: "Cluster" = None  # type: ignore[assignment]  # dataclass fields with defaults precede
    tell: Callable[[Any], None] = print  # to the launcher
    life: int = 0
    frontend_life: int = -1
    epoch: int = -1
    step: int = -1
    is_met: bool = False  # the frontend's Hello has come
    absent: frozenset[int] = frozenset({0})
    is_held: bool = False
    owes_held: bool = False
    was_searching: bool = False

    def __post_init__(self) -> None:
        self.replies = Replies(self.life)
        self.scheduler = Scheduler(self.cluster.limits, self.replies, b"a key for tests")
        self.later(STATS_S, self.send_stats)

    def meet(self, peers: Peers) -> None:
        if peers.core_life != self.life or peers.frontend_life <= self.frontend_life:
            return
        self.cluster.pipe("up", self.frontend_life, self.life).close()
        self.scheduler.drop_frontend()
        self.frontend_life, self.is_met = peers.frontend_life, False
        self.replies.restart(self.frontend_life)
        self.cluster.pipe("up", self.frontend_life, self.life).bind(self, self.hear)
        self.cluster.pipe("down", self.frontend_life, self.life).send(Hello(self.life))

    def start_epoch(self, start: StartEpoch) -> None:
        self.cluster.pipe("outputs", self.epoch).close()
        self.epoch, self.step, self.is_held = start.epoch, -1, False
        self.absent = frozenset(range(start.tp_size))
        for rank in range(start.tp_size):
            self.cluster.pipe("steps", self.epoch, rank).send(Hello(self.life))
        self.scheduler.start_epoch(
            epoch=start.epoch,
            tp_size=start.tp_size,
            num_kv_blocks=start.num_kv_blocks,
            is_blamed=start.is_blamed,
        )
        self.cluster.pipe("outputs", self.epoch).bind(self, self.report)
        self.pump()

    def hold(self) -> None:
        self.is_held = self.owes_held = True
        self.pump()

    def hear(self, message: Any) -> None:
        match message:
            case Hello():
                self.is_met = True
            case Submit():
                self.scheduler.submit(message)
            case Abort():
                self.scheduler.end(message.request_ids, FinishReason.ABORT)
        self.pump()

    def report(self, message: Any) -> None:
        if isinstance(message, Hello):
            was_absent, self.absent = self.absent, self.absent - {message.rank}
            if was_absent and not self.absent:
                self.tell(EpochReady(self.epoch))
        else:
            broken = self.scheduler.report(message, self.clock.now)
            if broken is not None:
                self.tell(broken)
        self.pump()

    def pump(self) -> None:
        """What core's loop does after any message."""
        num_suspects = len(self.scheduler.suspects)
        if bool(num_suspects) != self.was_searching:
            self.was_searching = bool(num_suspects)
            self.tell(Searching(num_suspects))
        if not self.absent:
            self.send_steps()
        if self.is_met:
            self.replies.flush(self.emit)
        self.scheduler.check()

    def send_steps(self) -> None:
        if self.is_held:
            if self.owes_held and self.scheduler.is_idle:
                self.owes_held = False
                self.tell(Held())
            return
        while (step := self.scheduler.plan()) is not None:
            if step.chunks is not None and CORE_POISON in unpack_ids(step.chunks.tokens):
                self.cluster.crash(self)
                return
            self.step = step.step
            for rank in range(self.cluster.tp_size):
                self.cluster.pipe("steps", self.epoch, rank).send(step)

    def emit(self, message: Any) -> bool:
        self.cluster.pipe("down", self.frontend_life, self.life).send(message)
        return True

    def send_stats(self) -> None:
        self.later(STATS_S, self.send_stats)
        if self.is_met and not len(self.replies):
            stats = core_stats(
                self.scheduler,
                core_life=self.life,
                frontend_life=self.frontend_life,
                epoch=self.epoch,
                now=self.clock.now,
                num_dropped_frames=0,
            )
            self.emit(stats)

    def die(self) -> None:
        self.is_met = False


Child = Worker | Core | Frontend


class Cluster:
    """One launch; `faults` arm and strike, `run` lets time pass."""

    def __init__(
        self,
        seed: int,
        limits: Limits,
        *,
        tp_size: int,
        num_blocks: int = 40,
        max_restarts: int = 1000,
    ) -> None:
        self.chance = random.Random(seed)
        self._reaping = random.Random(seed)
        self.limits, self.tp_size, self.num_blocks = limits, tp_size, num_blocks
        self.clock = Clock()
        self.message_faults = MessageFaults()
        self.step_faults: list[str] = []
        self.policy = Recovery(
            PolicyLimits(
                tp_size=tp_size, num_spares=1, max_restarts=max_restarts, hang_timeout_s=5.0
            )
        )
        self.children: dict[ChildId, Child] = {}
        self.end: End | None = None
        self.clients: list[Client] = []
        self.notes: list[str] = []
        self._pipes: dict[tuple[object, ...], Pipe] = {}
        self._groups: dict[int, Group] = {}

    # -- what the processes use

    def pipe(self, *name: object) -> Pipe:
        if name not in self._pipes:
            self._pipes[name] = Pipe(self.clock, self.chance, self.message_faults)
        return self._pipes[name]

    def group(self, epoch: int, size: int) -> Group:
        return self._groups.setdefault(epoch, Group(self, epoch, size))

    def crash(self, process: Child) -> None:
        """It dies of its own doing."""
        self.kill(process, is_crash=True)

    def kill(self, process: Child, *, is_crash: bool = False) -> None:
        if not process.is_alive:
            return
        process.is_alive = False
        process.die()
        [child] = [child for child, one in self.children.items() if one is process]
        reap_s = math.exp(self._reaping.uniform(*map(math.log, REAP_S)))
        self.clock.after(reap_s, lambda: self._reap(child, is_crash))

    # -- the launcher

    def start(self) -> None:
        self.obey(self.policy.start(self.clock.now))
        self._tick()

    def obey(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(child):
                    self._spawn(child)
                case Send(child, message):
                    process = self.children[child]
                    process.later(0.001, lambda p=process, m=message: self._order(p, m))  # type: ignore[misc]
                case Kill(child):
                    self.kill(self.children[child])
                case Note(text):
                    self.notes.append(f"{self.clock.now:.2f} {text}")
                case End():
                    self.end = action

    def _spawn(self, child: ChildId) -> None:
        def tell(message: Any) -> None:
            self.clock.after(0.001, lambda: self._hear(child, message))

        process: Child
        match child.role:
            case Role.WORKER:
                process = Worker(self.clock, cluster=self, tell=tell)
            case Role.CORE:
                process = Core(self.clock, cluster=self, tell=tell, life=child.life)
            case Role.FRONTEND:
                process = Frontend(self.clock, cluster=self, tell=tell, life=child.life)
        self.children[child] = process
        start_s = START_S[child.role] * self.chance.uniform(0.5, 1.5)
        process.stopped_at = self.clock.now  # it reads nothing before it is up
        self.clock.after(start_s, lambda: self._get_up(process, tell))

    def _get_up(self, process: Child, tell: Callable[[Any], None]) -> None:
        if process.is_alive:
            if isinstance(process, Worker) and process.phase is Phase.STARTING:
                process.phase = Phase.WAITING
            tell(Ready())
            process.go_on()

    def _hear(self, child: ChildId, message: Any) -> None:
        if child in self.children and self.end is None:
            self.obey(self.policy.received(child, message, self.clock.now))
            if isinstance(message, EpochBroken):  # as the loop wakes at the policy's deadline
                self.clock.after(SETTLE_S, self._look)

    def _reap(self, child: ChildId, is_crash: bool) -> None:
        del self.children[child]
        cause = "crashed" if is_crash else "was killed by SIGKILL"
        self.obey(self.policy.died(child, self.clock.now, cause, is_crash=is_crash))

    def _order(self, process: Child, message: Any) -> None:
        match process, message:
            case Worker(), StartEpoch():
                process.start_epoch(message)
            case Core(), StartEpoch():
                process.start_epoch(message)
            case Core(), Peers():
                process.meet(message)
            case Frontend(), Peers():
                process.meet(message)
            case Core(), Hold():
                process.hold()
            case _, Exit():
                self.kill(process)
            case _, Condition() | Drain():
                pass

    def _tick(self) -> None:
        self.clock.after(TICK_S, self._tick)
        self._look()

    def _look(self) -> None:
        seen = [self._observe(child, process) for child, process in self.children.items()]
        self.obey(self.policy.tick(self.clock.now, seen, awake_since=0.0))
        assert self.policy.next_deadline() >= self.clock.now, "the loop would turn without a pause"

    def _observe(self, child: ChildId, process: Child) -> Observation:
        member = self.policy.members[child]
        beat = self.clock.now if process.stopped_at is None else process.stopped_at
        phase, epoch, step = Phase.SERVING, -1, -1
        if isinstance(process, Worker):
            phase, epoch, step = process.phase, process.epoch, process.step
            if process.is_inside and process.stopped_at is None:
                beat = process.silent_since
        elif isinstance(process, Core):
            epoch, step = process.epoch, process.step
            phase = Phase.SERVING if process.scheduler.requests else Phase.WAITING
        is_starting = phase is Phase.STARTING
        return Observation(
            child=child,
            rank=member.rank,
            page=None if is_starting else Snapshot(epoch, step, phase, 0, 0, beat),
            started_s=member.started_s,
            is_stopped=process.stopped_at is not None and not is_starting,
            is_exiting=not process.is_alive,
            is_serving=member.is_worker and self.policy.formation.stage is Stage.SERVING,
        )

    # -- what a test asks

    def find(self, role: Role, rank: int = -1) -> Child | None:
        """A living process."""
        for child, process in self.children.items():
            if child.role is role and process.is_alive and self.policy.members[child].rank == rank:
                return process
        return None

    def submit(self, client: Client) -> None:
        """A client comes; the listening socket keeps it waiting until a frontend serves."""
        if client not in self.clients:
            self.clients.append(client)
        frontend = self.find(Role.FRONTEND)
        if isinstance(frontend, Frontend) and frontend.stopped_at is None:
            frontend.submit(client)
        else:
            self.clock.after(TICK_S, lambda: self.submit(client))

    def run(self, until: float) -> None:
        """Let time pass until every request has ended, or the launch has, or `until`."""
        self.clock.run(
            until, lambda: self.end is not None or not any(c.is_open for c in self.clients)
        )
