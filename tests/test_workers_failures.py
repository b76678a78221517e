"""What a worker tells of its failures: always something that can be sent."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from process.fake_launch import FACTS

from nvserve.protocol.channel import ControlChannel, Inbox, Outbox, core_to_worker, worker_to_core
from nvserve.protocol.child import Child
from nvserve.protocol.codec import decode_from_child, decode_from_worker, encode
from nvserve.protocol.config import Config
from nvserve.protocol.control import (
    MAX_REASON_BYTES,
    EpochBroken,
    EpochReady,
    Role,
    Setup,
    StartEpoch,
    shorten,
)
from nvserve.protocol.messages import Hello, SchedulerOutput, StepFailed
from nvserve.protocol.progress import ProgressPage, page_path
from nvserve.workers.main import run_epoch
from nvserve.workers.step_result import PeerLost, Pending, Report, StepResult, Wait

LIMIT_MS = 60_000
LONG = "a trace, " * 50_000 + "\udcff"


class FailingEngine:
    """A device of which nothing works from a point on; the launcher then begins an epoch."""

    is_aborted = False

    def __init__(self, launcher: ControlChannel, *, begins: bool) -> None:
        self.launcher = launcher
        self.begins = begins

    def begin(self, start: StartEpoch, launch_dir: str, wait: Wait, report: Report) -> EpochReady:
        if not self.begins:
            raise PeerLost(LONG)
        return EpochReady(start.epoch, 10)

    def launch(self, step: SchedulerOutput) -> Pending:
        raise RuntimeError(LONG)

    def prepare_ahead(self) -> bool:
        return False

    def end(self) -> None:
        assert self.launcher.send(encode(StartEpoch(1, 1)))

    def abort(self) -> None:
        pass


class Launch:
    """The test as launcher and core of a worker that lives in it."""

    def __init__(self, launch_dir: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.control, theirs = ControlChannel.pair()
        config = Config(model="fake", facts=FACTS, served_model_names=["fake"])
        page = ProgressPage(page_path(launch_dir, "worker", 0))
        channel = ControlChannel(theirs)
        self.child = Child(Setup(config, Role.WORKER, 0, launch_dir), channel, page)
        self.reports = Inbox(self.context, worker_to_core(launch_dir, 0))
        self.steps = Outbox(self.context, core_to_worker(launch_dir, 0, 0))

    def close(self) -> None:
        self.reports.close()
        self.steps.close()
        self.child.control.close()
        self.control.close()
        self.context.term()

    def run(self, *, begins: bool) -> None:
        """One epoch, to its end."""
        engine = FailingEngine(self.control, begins=begins)
        start = run_epoch(self.context, self.child, engine, StartEpoch(0, 1, 0, 10))
        assert start.epoch == 1


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(str(tmp_path))
    yield launch
    launch.close()


def test_a_failed_steps_reason_is_short_and_can_be_read(launch: Launch) -> None:
    launch.steps.send(encode(SchedulerOutput(0, 0)))
    launch.run(begins=True)
    frames = [launch.reports.receive(LIMIT_MS) for _ in range(2)]
    hello, failed = [decode_from_worker(frame) for frame in frames if frame is not None]
    assert isinstance(hello, Hello)
    assert isinstance(failed, StepFailed)
    assert failed.message == shorten(f"RuntimeError: {LONG}")


class Finished(Pending):
    """A step that is over on the device."""

    def is_done(self) -> bool:
        return True

    def poll_ms(self) -> int:
        return 0

    def result(self) -> StepResult:
        return StepResult(b"garb")


class AbortedEngine(FailingEngine):
    """Its device is freed from waiting for a peer: the step ends, with whatever was there."""

    def launch(self, step: SchedulerOutput) -> Pending:
        self.is_aborted = True
        assert self.launcher.send(encode(StartEpoch(1, 1)))
        return Finished()

    def end(self) -> None:
        pass


def test_what_an_aborted_step_leaves_is_no_result(launch: Launch) -> None:
    launch.steps.send(encode(SchedulerOutput(0, 0)))
    engine = AbortedEngine(launch.control, begins=True)
    run_epoch(launch.context, launch.child, engine, StartEpoch(0, 1, 0, 10))
    frames = [launch.reports.receive(LIMIT_MS) for _ in range(2)]
    _, failed = [decode_from_worker(frame) for frame in frames if frame is not None]
    assert isinstance(failed, StepFailed)
    assert failed.is_peer_lost


def test_the_reason_why_no_group_formed_is_short_and_can_be_read(launch: Launch) -> None:
    launch.run(begins=False)
    frame = launch.control.receive()
    assert frame is not None
    assert decode_from_child(frame) == EpochBroken(0, -1, -1, shorten(LONG))


@pytest.mark.parametrize("text", ["", "short", "é" * 3000, "x" + "é" * 3000, LONG, "\udcff" * 9000])
def test_any_text_becomes_one_that_can_be_sent(text: str) -> None:
    reason = shorten(text)
    assert len(reason.encode()) <= MAX_REASON_BYTES
    assert decode_from_child(encode(EpochBroken(0, -1, -1, reason)))
    if len(text) < 10:
        assert reason == text
    else:
        assert len(reason) >= MAX_REASON_BYTES // 2 - 1
