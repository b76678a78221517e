"""Core's loop around real workers, in the benchmark's own process, with a clock between its parts.

The scheduler, the messages and the workers are those of a server; there is no frontend. Runs
batches of decodes and times every step. Every wait has a limit.
"""

import time
from dataclasses import dataclass
from typing import Final

import zmq

from nvserve.core.limits import Limits
from nvserve.core.links import WorkerLinks
from nvserve.core.replies import Replies, Reply
from nvserve.core.scheduler import Scheduler
from nvserve.protocol.codec import BadFrame, encode
from nvserve.protocol.config import Config
from nvserve.protocol.control import (
    EpochReady,
    Exit,
    Failed,
    FromChild,
    Ready,
    Role,
    Setup,
    StartEpoch,
)
from nvserve.protocol.messages import ModelOutput, StepDone, Submit, pack_ids
from nvserve.protocol.sampling import SamplingParams
from nvserve.scripts.bench.workloads import Prompts
from nvserve.scripts.children import PROGRAMS, Child
from nvserve.scripts.hangs import ChildId
from nvserve.scripts.launch_dir import LaunchDir

START_LIMIT_S: Final = 1800.0
STEP_LIMIT_S: Final = 120.0
EXIT_LIMIT_S: Final = 5.0
POLL_MS: Final = 250


class RigFailed(RuntimeError):
    """The workers did not start, or failed a step; the message is for the user."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step as core sees it, in milliseconds; all its rows decode."""

    plan_ms: float
    send_ms: float  # encoding and queueing the message for every rank
    answer_ms: float  # from there until every rank's answer is in and decoded
    commit_ms: float
    emit_ms: float  # encoding what the frontend gets
    device_ms: float  # on the device, sampling included; as rank 0 measured it, like ...
    launch_ms: float  # ... what the host took to launch it; 0 on a CPU
    interval_ms: float  # since the step before was committed


@dataclass(slots=True)
class _Open:
    """A step in flight."""

    plan_ms: float
    send_ms: float
    sent_s: float
    is_pure: bool  # no chunk in it
    num_left: int  # ranks that have not answered
    device_ms: float = 0.0
    launch_ms: float = 0.0


class Rig:
    """The workers of one epoch under a scheduler."""

    def __init__(self, config: Config) -> None:
        self._config: Final = config
        self._directory: Final = LaunchDir()
        self._context: Final[zmq.Context[zmq.Socket[bytes]]] = zmq.Context()
        self._links: Final = WorkerLinks(self._context, str(self._directory.path), core_life=0)
        self._replies: Final = Replies(core_life=0)
        self._replies.restart(0)
        self._scheduler: Final = Scheduler(Limits.of(config), self._replies, hash_key=b"rig")
        self._children: Final[list[Child]] = []
        self._poller: Final = zmq.Poller()
        self._open: Final[dict[int, _Open]] = {}  # by step
        self._num_requests = 0
        self._committed_s = 0.0
        self.attention_backend = ""

    def __enter__(self) -> "Rig":
        """Start the workers and connect to them; RigFailed with their own words."""
        try:
            self._start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    # -- start and end ---------------------------------------------------------------------------

    def _start(self) -> None:
        tp_size, directory = self._config.tp_size, str(self._directory.path)
        for rank in range(tp_size):
            setup = Setup(self._config, Role.WORKER, rank, directory, name=f"worker {rank}")
            child = Child(ChildId(Role.WORKER, rank), setup.name, setup, PROGRAMS)
            self._children.append(child)
            for fd in (child.control.fileno(), child.output, child.pidfd):
                self._poller.register(fd, zmq.POLLIN)
        for child in self._children:
            self._wait_for(child, Ready)
        for rank, child in enumerate(self._children):
            child.send(StartEpoch(0, tp_size, rank, self._config.num_kv_blocks))
        answers = [self._wait_for(child, EpochReady) for child in self._children]
        ready = [answer for answer in answers if isinstance(answer, EpochReady)]
        self.attention_backend = ready[0].attention_backend
        self._links.connect(0, tp_size)
        assert self._links.inbox is not None, "just connected"
        self._poller.register(self._links.inbox.socket, zmq.POLLIN)
        deadline_s = time.monotonic() + STEP_LIMIT_S
        while not self._links.is_connected:
            self._wait(deadline_s)
            for report in self._links.receive():
                raise RigFailed(f"a worker sent {type(report).__name__} before the first step")
        num_kv_blocks = min(answer.num_kv_blocks for answer in ready)
        self._scheduler.start_epoch(epoch=0, tp_size=tp_size, num_kv_blocks=num_kv_blocks)

    def _close(self) -> None:
        for child in self._children:
            child.send(Exit())
        for child in self._children:
            if not child.wait(EXIT_LIMIT_S):
                child.kill()
                child.wait(EXIT_LIMIT_S)
            child.reap()
            child.close()
        self._links.close()
        self._context.destroy(linger=0)
        self._directory.remove()

    def _wait_for(self, child: Child, kind: type[Ready] | type[EpochReady]) -> FromChild:
        """The child's next message of this kind; what comes before it is progress."""
        deadline_s = time.monotonic() + START_LIMIT_S
        while True:
            message = child.receive()
            match message:
                case None:
                    self._wait(deadline_s)
                case Failed(text):
                    raise RigFailed(text)
                case BadFrame():
                    raise RigFailed(f"{child.name} sent a malformed message: {message}")
                case _ if isinstance(message, kind):
                    return message
                case _:
                    pass

    def _wait(self, deadline_s: float) -> None:
        """Until something arrives; RigFailed when a worker ended or the deadline has passed."""
        if time.monotonic() > deadline_s:
            raise RigFailed("the workers are silent")
        ready = dict(self._poller.poll(POLL_MS))
        for child in self._children:
            if child.output in ready and not child.has_closed_output:
                child.read_lines()
            if child.pidfd in ready:
                child.read_lines()
                raise RigFailed(f"{child.name} ended\n" + "\n".join(child.tail))

    # -- steps -----------------------------------------------------------------------------------

    def run(
        self, prompts: Prompts, output_len: int, *, temperature: float, is_overlapped: bool
    ) -> list[StepTimes]:
        """Answer the prompts; the times of the steps in which all of them decode.

        Overlapped as in a server, or each step planned only once the one before is complete.
        """
        for prompt in prompts:
            self._submit(prompt, output_len, temperature)
        self._replies.flush(_encode)
        steps: list[StepTimes] = []
        deadline_s = time.monotonic() + STEP_LIMIT_S
        while self._scheduler.requests:
            self._plan(1 if not is_overlapped else 2, len(prompts))
            self._wait(deadline_s)
            committed = self._commit()
            if committed:
                deadline_s = time.monotonic() + STEP_LIMIT_S
            steps += committed
        return steps

    def _submit(self, prompt: list[int], output_len: int, temperature: float) -> None:
        self._num_requests += 1
        submit = Submit(
            frontend_life=0,
            core_life=0,
            request_id=self._num_requests,
            prompt=pack_ids(prompt),
            emitted=b"",
            sampling=SamplingParams(
                max_tokens=output_len, ignore_eos=True, temperature=temperature
            ),
            seed=self._num_requests,
            arrival=float(self._num_requests),
        )
        self._scheduler.submit(submit)
        if self._num_requests not in self._scheduler.requests:
            raise RigFailed(f"a prompt of {len(prompt)} tokens and {output_len} more is refused")

    def _plan(self, max_in_flight: int, batch: int) -> None:
        while len(self._open) < max_in_flight:
            begun_s = time.perf_counter()
            step = self._scheduler.plan()
            planned_s = time.perf_counter()
            if step is None:
                return
            if self._links.send(step) is not None:
                raise RigFailed("a worker takes no steps")
            sent_s = time.perf_counter()
            assert self._scheduler.ledger is not None, "there is an epoch"
            opened = self._scheduler.ledger.find(step.step)
            self._open[step.step] = _Open(
                plan_ms=(planned_s - begun_s) * 1000,
                send_ms=(sent_s - planned_s) * 1000,
                sent_s=sent_s,
                is_pure=step.chunks is None and opened is not None and len(opened.rows) == batch,
                num_left=self._config.tp_size,
            )

    def _commit(self) -> list[StepTimes]:
        """Take the answers that are there; the pure decode steps they complete."""
        steps = []
        for report in self._links.receive():
            received_s = time.perf_counter()
            broken = self._scheduler.report(report, time.time())
            committed_s = time.perf_counter()
            if broken is not None:
                raise RigFailed(broken.reason)
            if not isinstance(report, ModelOutput | StepDone):
                continue
            step = self._open[report.step]
            step.num_left -= 1
            if isinstance(report, ModelOutput):
                step.device_ms, step.launch_ms = report.forward_ms, report.launch_ms
            if step.num_left:
                continue
            self._replies.flush(_encode)
            emitted_s = time.perf_counter()
            del self._open[report.step]
            interval_ms = (committed_s - self._committed_s) * 1000
            self._committed_s = committed_s
            if step.is_pure:
                steps.append(
                    StepTimes(
                        plan_ms=step.plan_ms,
                        send_ms=step.send_ms,
                        answer_ms=(received_s - step.sent_s) * 1000,
                        commit_ms=(committed_s - received_s) * 1000,
                        emit_ms=(emitted_s - committed_s) * 1000,
                        device_ms=step.device_ms,
                        launch_ms=step.launch_ms,
                        interval_ms=interval_ms,
                    )
                )
        return steps


def _encode(reply: Reply) -> bool:
    return len(encode(reply)) > 0
