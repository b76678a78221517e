"""Simulated ranks: they join groups, run steps together, and wait for each other in vain."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from model_check.fake_worker import FakeWorker
from simulation.clock import Process

from nvserve.protocol.control import EpochReady, StartEpoch
from nvserve.protocol.messages import (
    Gap,
    Hello,
    ModelOutput,
    SchedulerOutput,
    StepDone,
    StepFailed,
    unpack_ids,
)
from nvserve.protocol.progress import Phase

if TYPE_CHECKING:
    from simulation.cluster import Cluster

POISON = 98  # a token that kills a worker; the model never says it
MODEL_VOCABULARY = 97
LOAD_S = 0.4
PEER_LOSS_S = 0.03


class Group:
    """The ranks of one epoch: a step runs once all of them have come to it."""

    def __init__(self, cluster: "Cluster", epoch: int, size: int) -> None:
        self.cluster = cluster
        self.epoch = epoch
        self.size = size
        self.members: dict[int, Worker] = {}
        self.arrived: dict[int, SchedulerOutput] = {}
        self.is_broken = False
        limits = cluster.limits
        self.model = FakeWorker(
            num_blocks=cluster.num_blocks,
            block_size=limits.block_size,
            vocab_size=MODEL_VOCABULARY,
        )
        self.model.start_epoch(epoch)

    def join(self, worker: "Worker") -> None:
        self.members[worker.rank] = worker
        if len(self.members) == self.size and all(m.is_alive for m in self.members.values()):
            for member in self.members.values():
                member.later(0.02, member.enter)

    def lose(self, worker: "Worker") -> None:
        """A member has died or left: those inside a collective are freed."""
        if self.is_broken or self.members.get(worker.rank) is not worker:
            return
        self.is_broken = True
        for rank in self.arrived:
            member = self.members[rank]
            if member is not worker:
                member.later(PEER_LOSS_S, member.fail_by_peer)

    def arrive(self, worker: "Worker", step: SchedulerOutput) -> None:
        if self.is_broken:
            worker.later(PEER_LOSS_S, worker.fail_by_peer)
            return
        self.arrived[worker.rank] = step
        if len(self.arrived) < self.size:
            return
        self.arrived = {}
        self._run(step)

    def _run(self, step: SchedulerOutput) -> None:
        """All ranks are there: they run the step, or one of them fails in it."""
        cluster = self.cluster
        tokens = () if step.chunks is None else unpack_ids(step.chunks.tokens)
        victim = self.members[cluster.chance.randrange(self.size)]
        if POISON in tokens:
            self.arrived = {member.rank: step for member in self.members.values()}
            cluster.crash(victim)
            return
        if cluster.step_faults:
            fault = cluster.step_faults.pop()
            if fault == "nan":
                for member in self.members.values():
                    member.later(0.01, lambda m=member: m.fail("not finite"))  # type: ignore[misc]
                return
            if fault == "exception":
                self.arrived = {member.rank: step for member in self.members.values()}
                victim.fail("an exception")
                return
            output = self.model.run(step)
            short = ModelOutput(output.epoch, output.step, output.tokens[:-4], checksum=0)
            self._report(short)
            return
        self._report(self.model.run(step))

    def _report(self, output: ModelOutput) -> None:
        delay_s = self.cluster.chance.uniform(0.004, 0.02)
        for member in self.members.values():
            member.later(delay_s, lambda m=member: m.report(output))  # type: ignore[misc]


@dataclass(eq=False)
class Worker(Process):
    """One worker process; a spare until it gets a rank."""

    cluster: "Cluster" = None  # type: ignore[assignment]  # dataclass fields with defaults precede
    tell: Callable[[Any], None] = print  # to the launcher
    rank: int = -1
    epoch: int = -1
    expected: int = 0
    step: int = -1
    phase: Phase = Phase.STARTING
    group: Group | None = None
    is_loaded: bool = False
    is_over: bool = True
    is_inside: bool = False  # a collective, since silent_since
    silent_since: float = 0.0
    queue: deque[SchedulerOutput] = field(default_factory=deque)

    def start_epoch(self, start: StartEpoch) -> None:
        self.leave()
        self.rank, self.epoch, self.step = start.rank, start.epoch, -1
        self.phase = Phase.REBUILDING if self.is_loaded else Phase.LOADING
        group = self.cluster.group(start.epoch, start.tp_size)
        self.later(0.01 if self.is_loaded else LOAD_S, lambda: self.join(group))

    def join(self, group: Group) -> None:
        if group.epoch != self.epoch:
            return
        self.is_loaded = True
        self.group = group
        group.join(self)

    def enter(self) -> None:
        """The group is complete: serve."""
        if self.group is None or self.group.epoch != self.epoch:
            return
        self.is_over, self.is_inside, self.expected = False, False, 0
        self.queue.clear()
        self.phase = Phase.WAITING
        self.tell(EpochReady(self.epoch, self.cluster.num_blocks))
        self.cluster.pipe("steps", self.epoch, self.rank).bind(self, self.take)
        self.send(Hello(self.epoch, self.rank))

    def leave(self) -> None:
        if self.group is not None:
            self.group.lose(self)
            self.cluster.pipe("steps", self.epoch, self.rank).close()
        self.group, self.is_over, self.is_inside = None, True, False

    def send(self, message: Any) -> None:
        self.cluster.pipe("outputs", self.epoch).send(message)

    def take(self, message: Any) -> None:
        if isinstance(message, Hello) or self.is_over or message.epoch != self.epoch:
            return
        if message.step != self.expected:
            self.give_up()
            self.send(Gap(self.epoch, message.step, self.expected, self.rank))
            return
        self.expected += 1
        self.queue.append(message)
        self.run_next()

    def run_next(self) -> None:
        if self.is_inside or self.is_over or not self.queue or self.group is None:
            return
        step = self.queue.popleft()
        self.step, self.phase = step.step, Phase.FORWARD
        self.is_inside, self.silent_since = True, self.clock.now
        self.group.arrive(self, step)

    def report(self, output: ModelOutput) -> None:
        if self.is_over or output.epoch != self.epoch:
            return
        self.is_inside, self.phase = False, Phase.WAITING
        if self.rank == 0:
            self.send(output)
        else:
            self.send(StepDone(self.epoch, output.step, self.rank, output.checksum))
        self.run_next()

    def fail(self, text: str, *, is_peer_lost: bool = False) -> None:
        if self.is_over:
            return
        self.send(StepFailed(self.epoch, self.step, self.rank, text, is_peer_lost))
        self.give_up()

    def fail_by_peer(self) -> None:
        self.fail("lost a peer", is_peer_lost=True)

    def give_up(self) -> None:
        self.is_over, self.is_inside, self.phase = True, False, Phase.WAITING
        self.queue.clear()
        if self.group is not None:
            self.group.lose(self)

    def die(self) -> None:
        if self.group is not None:
            self.group.lose(self)
