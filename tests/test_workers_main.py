"""The worker process: its place in an epoch, its answers to core, and how it takes faults."""

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq
from step_driver import greedy_reference, make_config, save_model
from worker_process import (
    LIMIT_S,
    NUM_BLOCKS,
    PROMPT,
    Launch,
    Worker,
    first_step,
    generate,
    launching,
    ready_worker,
    until,
)

from nvserve.protocol.channel import ControlChannel, Inbox, Outbox, core_to_worker, worker_to_core
from nvserve.protocol.child import Child
from nvserve.protocol.codec import decode_from_worker, encode
from nvserve.protocol.control import EpochReady, Exit, Failed, Ready, Role, Setup, StartEpoch
from nvserve.protocol.messages import (
    Gap,
    Hello,
    ModelOutput,
    SchedulerOutput,
    StepDone,
    StepFailed,
)
from nvserve.protocol.progress import (
    BEAT_S,
    Phase,
    ProgressPage,
    Snapshot,
    page_path,
    read_page,
)
from nvserve.workers.main import EpochServer, calm_ms
from nvserve.workers.step_result import Pending, Report, Wait

TOLD_LIMIT_MS = 10_000  # for what has been sent
MOST_BEATS = 20  # of which some may be late: a machine stands still now and then


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
        assert worker.process.wait(LIMIT_S) == 0


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


class Failing:
    """An engine that fails at its first step; `end`, which frees peers, looks what core has."""

    def __init__(self, inbox: Inbox, launcher: ControlChannel) -> None:
        self.is_aborted = False
        self.told: list[object] = []
        self._inbox = inbox
        self._launcher = launcher

    def launch(self, step: SchedulerOutput) -> Pending:
        raise RuntimeError(f"CUDA error at step {step.step}")

    def end(self) -> None:
        while len(self.told) < 2:
            frame = self._inbox.receive(TOLD_LIMIT_MS)
            if frame is None:
                break
            self.told.append(decode_from_worker(frame))
        assert self._launcher.send(encode(StartEpoch(1, 2, 0, NUM_BLOCKS)))

    def begin(self, start: StartEpoch, launch_dir: str, wait: Wait, report: Report) -> EpochReady:
        raise AssertionError

    def prepare_ahead(self) -> bool:
        return False

    def abort(self) -> None:
        raise AssertionError


class Preparing(Failing):
    """An engine with three things to prepare ahead; notes what its page shows at each."""

    def __init__(self, inbox: Inbox, launcher: ControlChannel, page: str) -> None:
        super().__init__(inbox, launcher)
        self.shown: list[Phase] = []
        self._page = page

    def prepare_ahead(self) -> bool:
        page = read_page(self._page)
        assert page is not None
        self.shown.append(page.phase)
        return len(self.shown) < 3


@contextmanager
def epoch_server(
    model: Path, launch_dir: Path, make_engine: Callable[[Inbox, ControlChannel, str], Failing]
) -> Iterator[tuple[EpochServer, Failing, Outbox, ControlChannel]]:
    """A rank's server without a process, its engine, and what core and the launcher tell it."""
    launcher, theirs = ControlChannel.pair()
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context[zmq.Socket[bytes]]())
        control = ControlChannel(theirs)
        page = page_path(str(launch_dir), "worker", 0)
        setup = Setup(make_config(model), Role.WORKER, 0, str(launch_dir))
        child = Child(setup, control, ProgressPage(page))
        inbox = Inbox(context, worker_to_core(str(launch_dir), 0))
        outbox = Outbox(context, core_to_worker(str(launch_dir), 0, 0))
        engine = make_engine(inbox, launcher, page)
        server = EpochServer(context, child, engine, StartEpoch(0, 2, 0, NUM_BLOCKS))
        for one in (launcher, control, inbox, outbox, server):
            stack.callback(one.close)
        yield server, engine, outbox, launcher


def test_a_rank_at_fault_says_so_before_it_frees_its_peers(model: Path, tmp_path: Path) -> None:
    """Else they may tell first that it is lost, as if it had been killed."""
    with epoch_server(model, tmp_path, lambda inbox, launcher, _: Failing(inbox, launcher)) as made:
        server, engine, outbox, _ = made
        assert outbox.send(encode(first_step()))
        assert server.serve().epoch == 1
    failed = StepFailed(0, 0, 0, "RuntimeError: CUDA error at step 0")
    assert engine.told == [Hello(0, 0), failed]


def test_a_worker_shows_whether_it_has_something_to_prepare(model: Path, tmp_path: Path) -> None:
    """Whoever measures it waits until it has not."""
    with epoch_server(model, tmp_path, Preparing) as (server, engine, _, launcher):
        page = page_path(str(tmp_path), "worker", 0)
        pool = ThreadPoolExecutor(1)
        served = pool.submit(server.serve)

        def probe() -> Snapshot | None:
            found = read_page(page)
            return found if found is not None and found.phase is Phase.WAITING else None

        until("nothing to prepare", probe)
        assert launcher.send(encode(StartEpoch(1, 2, 0, NUM_BLOCKS)))
        assert served.result(LIMIT_S).epoch == 1
        pool.shutdown()
    assert isinstance(engine, Preparing)
    assert engine.shown == [Phase.PREPARING_AHEAD] * 3


def test_nothing_is_prepared_right_after_a_step() -> None:
    assert calm_ms(0.0, 1000.0) == 0  # no step yet
    assert calm_ms(1000.0, 1000.003) == 47
    assert calm_ms(1000.0, 1000.05) == 0


def test_an_idle_worker_beats_and_shows_where_it_is(sim: Launch) -> None:
    worker, core = ready_worker(sim, epoch=2)
    generate(core, 2, 3)
    page = next_beat(worker, 0.0)
    gaps_s: list[float] = []
    while sum(gap_s <= 2 * BEAT_S for gap_s in gaps_s) < 3:
        assert len(gaps_s) < MOST_BEATS, f"seldom within {2 * BEAT_S} s: {gaps_s}"
        assert (page.epoch, page.step) == (2, 3)
        before, page = page, next_beat(worker, page.time_s)
        gaps_s.append(page.time_s - before.time_s)


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
    """The first reading of an idle worker's page that is newer."""

    def probe() -> Snapshot | None:
        page = read_page(worker.page)
        is_new = page is not None and page.phase is Phase.WAITING and page.time_s > seen_s
        return page if is_new else None

    return until("the next beat", probe)


def test_a_worker_without_launcher_ends(sim: Launch) -> None:
    worker, _ = ready_worker(sim)
    worker.control.close()
    assert worker.process.wait(LIMIT_S) != 0


def test_a_model_that_cannot_be_cut_is_a_clear_failure(cpu: Launch) -> None:
    worker = cpu.worker()
    worker.expect(Ready)
    worker.join(0, rank=1, size=3)
    assert worker.expect(Failed).message == "--tp 3 cannot split 4 KV heads / 8 query heads"
    assert worker.process.wait(LIMIT_S) != 0
