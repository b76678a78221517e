"""The worker process: its place in an epoch, its answers to core, and how it takes faults."""

import os
import shutil
import signal
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
import pytest
import torch.distributed as dist
import zmq
from step_driver import greedy_reference, make_config, save_model

from nvserve.protocol.channel import (
    ControlChannel,
    Inbox,
    Outbox,
    core_to_worker,
    worker_to_core,
)
from nvserve.protocol.codec import decode_from_child, decode_from_worker, encode
from nvserve.protocol.config import Config
from nvserve.protocol.control import (
    EpochBroken,
    EpochReady,
    Exit,
    Failed,
    Progress,
    Ready,
    Role,
    Setup,
    StartEpoch,
)
from nvserve.protocol.messages import (
    Chunks,
    Gap,
    Hello,
    ModelOutput,
    NewRows,
    SchedulerOutput,
    StepDone,
    StepFailed,
    TableChanges,
    pack_ids,
    unpack_ids,
)
from nvserve.protocol.progress import BEAT_S, Phase, Snapshot, page_path, read_page
from nvserve.protocol.sampling import SamplingParams
from nvserve.workers.main import calm_ms

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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, "LlamaForCausalLM")
    return folder


@pytest.fixture
def cpu(model: Path) -> Iterator[Launch]:
    with launching(make_config(model)) as launch:
        yield launch


@pytest.fixture
def sim(model: Path) -> Iterator[Launch]:
    with launching(make_config(model, device="sim")) as launch:
        yield launch


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


def test_a_cpu_worker_keeps_its_weights_for_the_next_epoch(tmp_path: Path) -> None:
    reference = greedy_reference(save_model(tmp_path / "m", "LlamaForCausalLM"), PROMPT, 7)
    with launching(make_config(tmp_path / "m")) as launch:
        worker, core = ready_worker(launch)
        assert core.hellos == [Hello(0, 0)]
        assert generate(core, 0, 7) == reference
        assert {p.phase for p in worker.progress} >= {"import", "weights", "warm-up"}
        shutil.rmtree(tmp_path / "m")
        worker.join(1)
        ready = worker.expect(EpochReady)
        assert (ready.epoch, ready.num_kv_blocks) == (1, NUM_BLOCKS)
        assert ready.attention_backend == "torch"
        again = launch.core(1)
        assert again.hellos == [Hello(1, 0)]
        assert generate(again, 1, 7) == reference
        worker.tell(Exit())
        assert worker.process.wait(timeout=5) == 0


def test_a_gap_changes_nothing_and_ends_the_epoch(sim: Launch) -> None:
    worker, core = ready_worker(sim)
    core.send(first_step())
    core.expect(ModelOutput)
    core.send(SchedulerOutput(0, 2, joins=[3]))
    assert core.expect(Gap) == Gap(0, 2, 1, 0)
    core.send(SchedulerOutput(0, 1, joins=[3]))
    worker.join(1)
    worker.expect(EpochReady)
    assert core.inbox.receive(100) is None  # step 1 was not run after the gap
    assert len(generate(sim.core(1), 1, 3)) == 3


def test_a_doubled_step_is_a_gap(sim: Launch) -> None:
    _, core = ready_worker(sim)
    core.send(first_step())
    core.send(first_step())
    core.expect(ModelOutput)
    assert core.expect(Gap) == Gap(0, 0, 1, 0)


def test_garbage_and_steps_of_another_epoch_are_dropped(sim: Launch) -> None:
    _, core = ready_worker(sim, epoch=4)
    for frame in (b"", b"\xc1", b"garbage", encode(Gap(4, 0, 0, 0)), encode(StepDone(4, 0, 1, 2))):
        assert core.outboxes[0].send(frame)
    core.send(first_step(epoch=3))
    core.send(first_step(epoch=5))
    assert len(generate(core, 4, 2)) == 2


def test_an_impossible_step_fails_and_the_next_epoch_works(cpu: Launch) -> None:
    worker, core = ready_worker(cpu)
    core.send(first_step(blocks=(1, 2, NUM_BLOCKS)))
    core.send(SchedulerOutput(0, 1))
    failed = core.expect(StepFailed)
    assert (failed.epoch, failed.step, failed.rank) == (0, 0, 0)
    assert "BadStep" in failed.message
    assert f"of {NUM_BLOCKS}" in failed.message
    worker.join(1)
    worker.expect(EpochReady)
    assert len(generate(cpu.core(1), 1, 2)) == 2


def test_nothing_is_prepared_right_after_a_step() -> None:
    assert calm_ms(0.0, 1000.0) == 0  # no step yet
    assert calm_ms(1000.0, 1000.003) == 47
    assert calm_ms(1000.0, 1000.05) == 0


def test_an_idle_worker_beats_and_shows_where_it_is(sim: Launch) -> None:
    worker, core = ready_worker(sim, epoch=2)
    generate(core, 2, 3)
    seen_s = 0.0
    for _ in range(3):
        page = next_beat(worker, seen_s)
        assert (page.epoch, page.step) == (2, 3)
        seen_s = page.time_s


def test_a_step_that_does_not_end_is_silence(model: Path) -> None:
    with launching(make_config(model, device="sim", sim_step_ms=3_600_000.0)) as launch:
        worker, core = ready_worker(launch)
        core.send(first_step())

        def probe() -> Snapshot | None:
            page = read_page(worker.page)
            is_silent = page is not None and time.monotonic() - page.time_s > 4 * BEAT_S
            return page if is_silent else None

        page = until("silence", probe)
        assert (page.step, page.phase) == (0, Phase.FORWARD)
        worker.join(1)  # the loop itself goes on
        worker.expect(EpochReady)


def next_beat(worker: Worker, seen_s: float) -> Snapshot:
    """The first reading of an idle worker's page that is newer; in twice the time allowed."""

    def probe() -> Snapshot | None:
        page = read_page(worker.page)
        is_new = page is not None and page.phase is Phase.WAITING and page.time_s > seen_s
        return page if is_new else None

    return until("the next beat", probe, 2 * BEAT_S)


def test_a_worker_without_launcher_ends(sim: Launch) -> None:
    worker, _ = ready_worker(sim)
    worker.control.close()
    assert worker.process.wait(timeout=3) != 0


def test_a_model_that_cannot_be_cut_is_a_clear_failure(cpu: Launch) -> None:
    worker = cpu.worker()
    worker.expect(Ready)
    worker.join(0, rank=1, size=3)
    assert worker.expect(Failed).message == "--tp 3 does not divide 8 query heads"
    assert worker.process.wait(timeout=10) != 0


def test_a_rank_waiting_for_the_others_takes_up_a_newer_epoch(cpu: Launch) -> None:
    worker = cpu.worker()
    worker.expect(Ready)
    worker.join(0, rank=0, size=1)
    worker.expect(EpochReady)
    lonely = cpu.worker()
    lonely.expect(Ready)
    lonely.join(0, rank=1, size=2)
    until("the rank waits", lambda: _in_phase(lonely, Phase.REBUILDING))
    lonely.join(1, rank=0, size=1)
    assert lonely.expect(EpochReady).epoch == 1


def _in_phase(worker: Worker, phase: Phase) -> bool | None:
    snapshot = read_page(worker.page)
    return True if snapshot is not None and snapshot.phase is phase else None


def two_ranks(launch: Launch) -> tuple[list[Worker], Core]:
    workers = [launch.worker(), launch.worker()]
    for worker in workers:
        worker.expect(Ready)
    for rank, worker in enumerate(workers):
        worker.join(0, rank=rank, size=2)
    for worker in workers:
        worker.expect(EpochReady)
    return workers, launch.core(0, 2)


def both_answers(core: Core, step: int) -> list[int]:
    """Tokens of rank 0, once rank 1 has reported the same checksum."""
    messages = [core.receive(), core.receive()]
    (output,) = (m for m in messages if isinstance(m, ModelOutput))
    (done,) = (m for m in messages if isinstance(m, StepDone))
    assert (output.step, done.step, done.rank) == (step, step, 1)
    assert output.checksum == done.checksum
    return unpack_ids(output.tokens)


@pytest.mark.parametrize("is_hung", [False, True], ids=["killed", "stopped"])
def test_a_spare_takes_the_rank_of_a_lost_worker(cpu: Launch, model: Path, is_hung: bool) -> None:
    reference = greedy_reference(save_model(model, "LlamaForCausalLM"), PROMPT, 4)
    workers, core = two_ranks(cpu)
    spare = cpu.worker()
    spare.expect(Ready)
    core.send(first_step())
    assert both_answers(core, 0) == reference[:1]
    os.kill(workers[1].process.pid, signal.SIGSTOP if is_hung else signal.SIGKILL)
    core.send(SchedulerOutput(0, 1, joins=[3]))
    if is_hung:
        until("rank 0 waits in a collective", lambda: _is_inside(workers[0]))
    workers[1].process.kill()  # the fence
    failed = core.expect(StepFailed)
    assert (failed.step, failed.rank) == (1, 0)
    assert "PeerLost" in failed.message
    workers[0].join(1, rank=0, size=2)
    spare.join(1, rank=1, size=2)
    for worker in (workers[0], spare):
        worker.expect(EpochReady)
    again = cpu.core(1, 2)
    again.send(first_step(1))
    output = both_answers(again, 0)
    for step in range(1, 4):
        again.send(SchedulerOutput(1, step, joins=[3] if step == 1 else None))
        output += both_answers(again, step)
    assert output == reference


def _is_inside(worker: Worker) -> bool | None:
    snapshot = read_page(worker.page)
    assert snapshot is not None
    return True if snapshot.collectives_entered == snapshot.collectives_left + 1 else None


def test_a_step_that_fails_on_one_rank_frees_the_other(cpu: Launch) -> None:
    workers, core = two_ranks(cpu)
    core.outboxes[0].send(encode(first_step(blocks=(1, 2, NUM_BLOCKS))))
    core.outboxes[1].send(encode(first_step()))
    failures = {m.rank: m for m in (core.expect(StepFailed), core.expect(StepFailed))}
    assert "BadStep" in failures[0].message
    assert "PeerLost" in failures[1].message
    for rank, worker in enumerate(workers):
        worker.join(1, rank=rank, size=2)
    for worker in workers:
        worker.expect(EpochReady)


def test_a_rank_lost_while_the_group_forms_breaks_only_that_epoch(cpu: Launch) -> None:
    worker = cpu.worker()
    worker.expect(Ready)
    worker.join(0, rank=0, size=2)
    until("rank 0 waits", lambda: _in_phase(worker, Phase.REBUILDING))
    # Rank 1 shows up but is gone before it connects.
    store = dist.FileStore(str(Path(cpu.directory) / "e0.group"), 2)  # type: ignore[attr-defined]
    store.set("here1", "1")
    broken = worker.expect(EpochBroken)
    assert broken.epoch == 0
    worker.join(1, rank=0, size=1)
    assert worker.expect(EpochReady).epoch == 1
