"""Worker processes with the test as their launcher and as their core."""

import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from nvserve.protocol.channel import (
    ControlChannel,
    Inbox,
    Outbox,
    core_to_worker,
    worker_to_core,
)
from nvserve.protocol.codec import decode_from_child, decode_from_worker, encode
from nvserve.protocol.config import Config
from nvserve.protocol.control import EpochReady, Progress, Ready, Role, Setup, StartEpoch
from nvserve.protocol.messages import (
    Chunks,
    Hello,
    ModelOutput,
    NewRows,
    SchedulerOutput,
    TableChanges,
    pack_ids,
    unpack_ids,
)
from nvserve.protocol.progress import Phase, page_path, read_page
from nvserve.protocol.sampling import SamplingParams

SOURCES = Path(__file__).parents[1] / ".src"
LIMIT_S = 60.0
NUM_BLOCKS = 64
PROMPT = [3, 14, 15, 92, 65]

T = TypeVar("T")
M = TypeVar("M", bound=msgspec.Struct)


def until(what: str, probe: Callable[[], T | None], limit_s: float = LIMIT_S) -> T:
    """The first value of `probe` that is not None."""
    deadline = time.monotonic() + limit_s
    while True:
        value = probe()
        if value is not None:
            return value
        assert time.monotonic() < deadline, f"{what}: not within {limit_s:g} s"
        time.sleep(0.002)


class Worker:
    """A worker process with the test as its launcher."""

    def __init__(self, config: Config, launch_dir: str, life: int) -> None:
        self.control, theirs = ControlChannel.pair()
        self.page = page_path(launch_dir, "worker", life)
        self.progress: list[Progress] = []
        command = [sys.executable, "-m", "nvserve.workers.main", str(theirs.fileno())]
        variables = {"PYTHONPATH": str(SOURCES), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*command, str(os.getpid())], pass_fds=[theirs.fileno()], env=os.environ | variables
        )
        theirs.close()
        self.tell(Setup(config, Role.WORKER, life, launch_dir))

    def tell(self, message: msgspec.Struct) -> None:
        assert self.control.send(encode(message))

    def expect(self, kind: type[M]) -> M:
        """The next message that is no Progress; it must be of this kind."""
        while True:
            frame = until(kind.__name__, self.control.receive)
            message = decode_from_child(frame)
            if isinstance(message, Progress):
                self.progress.append(message)
                continue
            assert isinstance(message, kind), message
            return message

    def join(self, epoch: int, *, rank: int = 0, size: int = 1) -> None:
        self.tell(StartEpoch(epoch, size, rank, NUM_BLOCKS))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.control.close()


class Core:
    """The test as core: the sockets of one epoch."""

    def __init__(self, launch_dir: str, epoch: int, size: int = 1) -> None:
        self.context = zmq.Context[zmq.Socket[bytes]]()
        self.inbox = Inbox(self.context, worker_to_core(launch_dir, epoch))
        self.outboxes = [
            Outbox(self.context, core_to_worker(launch_dir, epoch, rank)) for rank in range(size)
        ]
        self.hellos = [self.expect(Hello) for _ in range(size)]
        self.send(Hello(0))

    def send(self, message: msgspec.Struct) -> None:
        for outbox in self.outboxes:
            assert outbox.send(encode(message))

    def receive(self) -> msgspec.Struct:
        return decode_from_worker(until("a message to core", self.inbox.receive))

    def expect(self, kind: type[M]) -> M:
        message = self.receive()
        assert isinstance(message, kind), message
        return message

    def close(self) -> None:
        self.inbox.close()
        for outbox in self.outboxes:
            outbox.close()
        self.context.term()


class Launch:
    """Workers and cores of one test, all gone at its end."""

    def __init__(self, config: Config, launch_dir: str, stack: ExitStack) -> None:
        self.config = config
        self.directory = launch_dir
        self._stack = stack
        self._num_workers = 0

    def worker(self) -> Worker:
        worker = Worker(self.config, self.directory, self._num_workers)
        self._num_workers += 1
        self._stack.callback(worker.stop)
        return worker

    def core(self, epoch: int, size: int = 1) -> Core:
        core = Core(self.directory, epoch, size)
        self._stack.callback(core.close)
        return core


@contextmanager
def launching(config: Config) -> Iterator[Launch]:
    with tempfile.TemporaryDirectory(prefix="nt") as directory, ExitStack() as stack:
        yield Launch(config, directory, stack)


def first_step(epoch: int = 0, blocks: tuple[int, ...] = (5, 2, 9)) -> SchedulerOutput:
    """Slot 3 takes a prompt and samples once."""
    return SchedulerOutput(
        epoch,
        0,
        new=NewRows([3], [SamplingParams(0.0)], [0], [b""], [b""]),
        tables=TableChanges([3], [0], [len(blocks)], pack_ids(list(blocks))),
        chunks=Chunks([3], [0], [len(PROMPT)], pack_ids(PROMPT), [True]),
    )


def generate(core: Core, epoch: int, num_new: int) -> list[int]:
    """Greedy tokens behind PROMPT, with every step sent one ahead."""
    core.send(first_step(epoch))
    output = list[int]()
    for step in range(1, num_new + 1):
        core.send(SchedulerOutput(epoch, step, joins=[3] if step == 1 else None))
        answer = core.expect(ModelOutput)
        assert (answer.epoch, answer.step) == (epoch, step - 1)
        assert answer.checksum == zlib.crc32(answer.tokens)
        output += unpack_ids(answer.tokens)
    core.expect(ModelOutput)
    return output


def ready_worker(launch: Launch, epoch: int = 0) -> tuple[Worker, Core]:
    worker = launch.worker()
    worker.expect(Ready)
    worker.join(epoch)
    assert worker.expect(EpochReady).num_kv_blocks == NUM_BLOCKS
    return worker, launch.core(epoch)


def in_phase(worker: Worker, phase: Phase) -> bool | None:
    snapshot = read_page(worker.page)
    return True if snapshot is not None and snapshot.phase is phase else None
