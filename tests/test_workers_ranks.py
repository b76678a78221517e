"""Worker processes of one group: who is lost, replaced or freed, and whose fault it was."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from step_driver import greedy_reference, make_config, save_model
from worker_process import (
    NUM_BLOCKS,
    PROMPT,
    Core,
    Launch,
    Worker,
    first_step,
    in_phase,
    launching,
    until,
)

from nvserve.protocol.codec import encode
from nvserve.protocol.control import EpochBroken, EpochReady, Ready
from nvserve.protocol.messages import (
    ModelOutput,
    SchedulerOutput,
    StepDone,
    StepFailed,
    unpack_ids,
)
from nvserve.protocol.progress import Phase, read_page


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, "LlamaForCausalLM")
    return folder


@pytest.fixture
def cpu(model: Path) -> Iterator[Launch]:
    with launching(make_config(model)) as launch:
        yield launch


def test_a_rank_waiting_for_the_others_takes_up_a_newer_epoch(cpu: Launch) -> None:
    worker = cpu.worker()
    worker.expect(Ready)
    worker.join(0, rank=0, size=1)
    worker.expect(EpochReady)
    lonely = cpu.worker()
    lonely.expect(Ready)
    lonely.join(0, rank=1, size=2)
    until("the rank waits", lambda: in_phase(lonely, Phase.REBUILDING))
    lonely.join(1, rank=0, size=1)
    assert lonely.expect(EpochReady).epoch == 1


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
    # By which the launcher finds who holds up the others: a newcomer has been in no earlier ones.
    assert _num_entered(workers[0]) == _num_entered(spare)


def _num_entered(worker: Worker) -> int:
    snapshot = read_page(worker.page)
    assert snapshot is not None
    return snapshot.collectives_entered


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
    until("rank 0 waits", lambda: in_phase(worker, Phase.REBUILDING))
    # Rank 1 shows up but is gone before it connects.
    store = dist.FileStore(str(Path(cpu.directory) / "e0.group"), 2)  # type: ignore[attr-defined]
    store.set("here1", "1")
    broken = worker.expect(EpochBroken)
    assert broken.epoch == 0
    newcomer = cpu.worker()
    newcomer.expect(Ready)
    for rank, one in enumerate((worker, newcomer)):
        one.join(1, rank=rank, size=2)
    for one in (worker, newcomer):
        assert one.expect(EpochReady).epoch == 1
