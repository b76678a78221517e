"""Process entry of a worker: one tensor-parallel rank, or a spare that may become one.

    Setup -> (import) Ready -> StartEpoch -> weights, group, pool, warm-up -> EpochReady -> steps
      ... -> StartEpoch of the next epoch -> group, warm-up -> EpochReady -> steps

Does all I/O of the process: the control channel, the epoch's two sockets, the progress page. A step
that fails ends the epoch for this rank: it leaves the group, tells core, and waits for the next.
"""

import logging
import math
import os
import sys
import time
import zlib
from collections import deque
from dataclasses import dataclass
from typing import Final

import msgspec
import zmq

from nvserve.protocol.channel import Inbox, Outbox, core_to_worker, worker_to_core
from nvserve.protocol.child import Child, bootstrap, freeze_start
from nvserve.protocol.codec import BadFrame, decode_to_worker, encode
from nvserve.protocol.control import (
    EpochBroken,
    Exit,
    Failed,
    Progress,
    Ready,
    StartEpoch,
    shorten,
)
from nvserve.protocol.messages import (
    Gap,
    Hello,
    ModelOutput,
    SchedulerOutput,
    StepDone,
    StepFailed,
)
from nvserve.protocol.progress import BEAT_S, Phase
from nvserve.workers.lifeline import hold_lifeline
from nvserve.workers.step_result import Engine, ModelRefused, PeerLost, Pending, StepResult

logger = logging.getLogger(__name__)

IDLE_MS: Final = int(BEAT_S * 1000) // 2  # between two beats of an idle worker
CALM_S: Final = 0.05  # without a step, before what is prepared ahead may delay the next one
PROGRESS_S: Final = 0.1  # between two reports of one phase
STEP_BEATS_S: Final = 1.0  # a step that runs for longer is silent from then on


class Superseded(Exception):
    """The launcher began another epoch while this one was still being joined."""

    def __init__(self, start: StartEpoch) -> None:
        super().__init__(f"epoch {start.epoch} begins")
        self.start: Final = start


@dataclass(frozen=True)
class Launched:
    """A step on its way."""

    step: int
    pending: Pending


def calm_ms(last_step_s: float, now_s: float) -> int:
    """Milliseconds until a worker whose last step ended then may prepare ahead.

    A client that asks again at once shall not wait: a graph takes as long as a small prefill.
    """
    return max(0, math.ceil(1000 * (last_step_s + CALM_S - now_s)))


class EpochServer:
    """The sockets and the step counter of one epoch on one rank."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        child: Child,
        engine: Engine,
        start: StartEpoch,
    ) -> None:
        launch_dir = child.setup.launch_dir
        self._child = child
        self._engine = engine
        self._epoch: Final = start.epoch
        self._rank: Final = start.rank
        self._expected = 0  # the step to come
        self._launched: deque[Launched] = deque()
        # Monotonic: when the oldest launched step had the device to itself, or the last one ended.
        self._moved_s = 0.0
        self._unsent: deque[bytes] = deque()
        self._is_over = False  # a gap or a failed step: nothing more runs in this epoch
        self._may_prepare = True
        self._num_dropped = 0
        self._inbox = Inbox(context, core_to_worker(launch_dir, start.epoch, start.rank))
        self._outbox = Outbox(context, worker_to_core(launch_dir, start.epoch))
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.socket, zmq.POLLIN)
        self._poller.register(child.control.fileno(), zmq.POLLIN)
        self._send(Hello(start.epoch, start.rank))

    def close(self) -> None:
        self._inbox.close()
        self._outbox.close()

    def serve(self) -> StartEpoch:
        """Run steps until the launcher begins the next epoch, which is returned."""
        while True:
            self._beat()
            if not self._poller.poll(self._poll_ms()) and not self._launched:
                self._prepare_ahead()
            start = receive_start(self._child)
            if start is not None:
                return start
            frame = self._inbox.receive()
            if frame is not None:
                self._take(frame)
            while self._launched and self._launched[0].pending.is_done():
                self._finish(self._launched.popleft())
            self._flush()

    def _beat(self) -> None:
        """This loop goes on while the device hangs, which the launcher must see as well."""
        if not self._launched:
            self._child.page.beat(Phase.PREPARING_AHEAD if self._may_prepare else Phase.WAITING)
        elif time.monotonic() - self._moved_s < STEP_BEATS_S:
            self._child.page.beat(Phase.FORWARD)

    def _poll_ms(self) -> int:
        if self._launched:
            return min(IDLE_MS, self._launched[0].pending.poll_ms())
        return calm_ms(self._moved_s, time.monotonic()) if self._may_prepare else IDLE_MS

    def _prepare_ahead(self) -> None:
        """Nothing to do: get ready for later steps, piece by piece, between two looks around."""
        if not self._may_prepare:
            return
        try:
            self._may_prepare = self._engine.prepare_ahead()
        except Exception as error:
            self._fail(self._expected, error)

    # -- steps ---------------------------------------------------------------------------------

    def _take(self, frame: bytes) -> None:
        try:
            message = decode_to_worker(frame)
        except BadFrame as error:
            self._drop(str(error))
            return
        match message:
            case Hello():
                logger.debug("core of life %d is connected", message.life)
            case SchedulerOutput() if message.epoch != self._epoch:
                self._drop(f"a step of epoch {message.epoch} in epoch {self._epoch}")
            case SchedulerOutput() if not self._is_over:
                self._run(message)

    def _drop(self, why: str) -> None:
        self._num_dropped += 1
        logger.warning("dropped message %d: %s", self._num_dropped, why)

    def _run(self, step: SchedulerOutput) -> None:
        if step.step != self._expected:
            self._give_up()
            self._send(Gap(self._epoch, step.step, self._expected, self._rank))
            return
        self._expected += 1
        page = self._child.page
        page.step = step.step
        page.beat(Phase.PREPARING)
        try:
            self._launched.append(Launched(step.step, self._engine.launch(step)))
        except Exception as error:
            self._fail(step.step, error)
        if len(self._launched) == 1:
            self._moved_s = time.monotonic()

    def _finish(self, launched: Launched) -> None:
        """Report a step that is done, unless it is for want of a peer."""
        try:
            if self._engine.is_aborted:  # which ends what the device waits for, with any result
                raise PeerLost(f"rank {self._rank}: the group was aborted")
            result = launched.pending.result()
        except Exception as error:
            self._fail(launched.step, error)
            return
        self._moved_s = time.monotonic()
        self._child.page.beat(Phase.SENDING)
        self._send(answer(result, epoch=self._epoch, step=launched.step, rank=self._rank))

    def _fail(self, step: int, error: Exception) -> None:
        """The epoch is over on this rank. The process edge: any exception ends up here."""
        is_peer_lost = isinstance(error, PeerLost) or self._engine.is_aborted
        message = shorten(f"{type(error).__name__}: {error}")
        failed = StepFailed(self._epoch, step, self._rank, message, is_peer_lost)
        if is_peer_lost:
            self._give_up()
            logger.error("step %d: %s", step, error)
            self._send(failed)
        else:  # told before the peers are freed, who would tell of a loss that nobody is blamed for
            self._send(failed)
            logger.error("step %d failed", step, exc_info=error)
            self._give_up()

    def _give_up(self) -> None:
        """Run nothing more in this epoch, and free the peers that wait for this rank."""
        self._is_over, self._may_prepare = True, False
        self._launched.clear()
        self._engine.end()

    # -- sending -------------------------------------------------------------------------------

    def _send(self, message: msgspec.Struct) -> None:
        self._unsent.append(encode(message))
        self._flush()

    def _flush(self) -> None:
        """Send what the socket takes; the rest waits for the next turn of the loop."""
        while self._unsent and self._outbox.send(self._unsent[0]):
            self._unsent.popleft()


def answer(result: StepResult, *, epoch: int, step: int, rank: int) -> ModelOutput | StepDone:
    """What core gets of a step: rank 0's tokens, a checksum of theirs from the others."""
    checksum = zlib.crc32(result.tokens)
    if rank != 0:
        return StepDone(epoch, step, rank, checksum)
    return ModelOutput(
        epoch,
        step,
        result.tokens,
        checksum=checksum,
        logprobs=result.logprobs,
        prompt_logprobs=result.prompt_logprobs,
        forward_ms=result.forward_ms,
        launch_ms=result.launch_ms,
    )


def receive_start(child: Child, timeout_s: float = 0.0) -> StartEpoch | None:
    """The next epoch if the launcher begins one; ends the process when it is told to."""
    match child.receive(timeout_s):
        case StartEpoch() as start:
            return start
        case Exit():
            os._exit(0)  # nothing to save, and the group's threads may never join
        case None:
            return None
        case message:
            logger.warning("a worker has no use for %s", type(message).__name__)
            return None


class Reporter:
    """Progress of starting, to the launcher: every new phase, and a phase's parts now and then."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._phase = ""
        self._told_s = 0.0

    def __call__(self, phase: str, done: float) -> None:
        now = time.monotonic()
        if phase == self._phase and now - self._told_s < PROGRESS_S and done < 1.0:
            return
        self._phase, self._told_s = phase, now
        self._child.send(Progress(phase, done))


def make_engine(child: Child) -> Engine:
    """The device this launch asks for, around it the faults of a launch that allows them."""
    engine = _make_device(child)
    if child.faults is None:
        return engine
    from nvserve.workers.faulty_engine import FaultyEngine  # a launch without faults has no such

    return FaultyEngine(engine, child.faults)


def _make_device(child: Child) -> Engine:
    """torch costs seconds, so only real devices import it."""
    config, page = child.setup.config, child.page
    if config.device == "sim":
        from nvserve.workers.sim import SimEngine

        return SimEngine(config, page)
    from nvserve.kernels.dispatch import HAS_TRITON
    from nvserve.workers.engine import TorchEngine

    if config.device == "cuda" and HAS_TRITON:
        # Triton is absent from CPU-only installs.
        from nvserve.kernels.compilation import prepare
        from nvserve.workers.compile_server import start_server

        start_server()
        prepare()  # goes on beside the loading of weights
    return TorchEngine(config, page)


def wait_for_epoch(child: Child) -> StartEpoch:
    """Idle until the launcher begins an epoch."""
    while True:
        child.page.beat(Phase.WAITING)
        start = receive_start(child, BEAT_S / 2)
        if start is not None:
            return start


def run_epoch(
    context: "zmq.Context[zmq.Socket[bytes]]", child: Child, engine: Engine, start: StartEpoch
) -> StartEpoch:
    """Join an epoch and serve it; returns the one that ends it."""
    page = child.page
    page.epoch, page.step = start.epoch, -1
    # Ranks are compared by these when they hang: a newcomer must not seem behind the survivors.
    page.collectives_entered = page.collectives_left = 0

    def wait(seconds: float) -> None:
        page.beat(Phase.REBUILDING)
        newer = receive_start(child, seconds)
        if newer is not None:
            raise Superseded(newer)

    try:
        ready = engine.begin(start, child.setup.launch_dir, wait, Reporter(child))
    except Superseded as superseded:
        return superseded.start
    except PeerLost as error:
        engine.end()
        child.send(EpochBroken(start.epoch, -1, -1, shorten(str(error))))
        return wait_for_epoch(child)
    server = EpochServer(context, child, engine, start)
    try:
        child.send(ready)
        return server.serve()
    finally:
        server.close()


def main(argv: list[str]) -> int:
    child = bootstrap(argv)
    child.page.beat(Phase.LOADING)
    child.send(Progress("import"))
    engine = make_engine(child)
    hold_lifeline(child, engine.abort)
    freeze_start()  # what an epoch brings, on the other hand, has to go with it
    child.send(Ready())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    start = wait_for_epoch(child)
    try:
        while True:
            start = run_epoch(context, child, engine, start)
    except ModelRefused as error:
        child.send(Failed(shorten(str(error))))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
