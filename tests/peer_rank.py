"""Ranks that sum through peer memory, each a process of its own; run as a program it is one.

On a CPU, which needs TRITON_INTERPRET=1, the ranks map each other's files; on GPUs, each other's
memory. What they add up follows from a seed, so that whoever starts them can work out the sums.
"""

import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
from peer_memory_on_files import open_files

from nvserve.workers import crossover
from nvserve.workers.engine import DTYPES
from nvserve.workers.parallel import TensorParallel
from nvserve.workers.peer_memory import Crossover, Layout, PeerMemory, open_peer_memory

TESTS = Path(__file__).parent
RANK_LIMIT_S = 200.0
NUM_PLACES = 3
EPS = 1e-5


class Call(msgspec.Struct):
    """One sum. Calls that follow each other use different places."""

    place: int
    num_rows: int
    is_two_shot: bool
    has_norm: bool
    seed: int


class Job(msgspec.Struct):
    folder: str
    rank: int
    size: int
    width: int
    dtype: str
    calls: list[Call]
    device: str = "cpu"
    first_call: int = 0  # what the programs have counted to before
    max_pause_ms: float = 0.0  # before a call, so that ranks come to it at different times
    late_rank: int = -1  # makes no call at all: on a GPU, the others then abort

    @property
    def layout(self) -> Layout:
        return Layout(self.size, NUM_PLACES, self.width, DTYPES[self.dtype])


def addend(job: Job, call: Call, rank: int) -> torch.Tensor:
    """[R, N] that a rank puts in."""
    generator = torch.Generator().manual_seed(1000 * call.seed + rank)
    return torch.randn(call.num_rows, job.width, generator=generator).to(DTYPES[job.dtype])


def residual_and_weight(job: Job, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * call.seed + 999)
    residual = torch.randn(call.num_rows, job.width, generator=generator)
    weight = torch.randn(job.width, generator=generator)
    return residual.to(DTYPES[job.dtype]), weight.to(DTYPES[job.dtype])


def run_ranks(job: Job) -> list[list[list[torch.Tensor]]]:
    """What each rank got of each call: the sum, or the normalized sum and the residual."""
    folder = Path(job.folder)
    jobs = [msgspec.structs.replace(job, rank=rank) for rank in range(job.size)]
    command = [sys.executable, "-W", "error", __file__]
    paths = os.pathsep.join([str(TESTS.parent / ".src"), str(TESTS)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    if job.device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    elif torch.cuda.device_count() < job.size:
        environment["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    ranks = [subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) for _ in jobs]
    try:
        with ThreadPoolExecutor(job.size) as pool:
            list(pool.map(_communicate, ranks, jobs))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [torch.load(folder / f"results{rank}") for rank in range(job.size)]


def _communicate(process: "subprocess.Popen[bytes]", job: Job) -> None:
    process.communicate(msgspec.json.encode(job), timeout=RANK_LIMIT_S)
    assert process.returncode == 0, f"rank {job.rank} exited with {process.returncode}"


# -- the rank ------------------------------------------------------------------------------------


def _on_gpus(job: Job) -> PeerMemory:
    device = torch.device("cuda", job.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    group = TensorParallel(job.rank, job.size, wants_gloo=True)
    group.join(job.folder, 0, device, time.sleep)
    return open_peer_memory(job.rank, job.layout, "test", job.folder)


def _run(job: Job) -> list[list[torch.Tensor]]:
    if job.device == "cpu":
        memory = open_files(Path(job.folder), job.rank, job.layout)
    else:
        memory = _on_gpus(job)
    memory.meeting.calls.fill_(job.first_call)
    if job.late_rank < 0:
        _check(memory, job)
    if job.rank == job.late_rank:
        return []
    # Copies from the host would wait for kernels that wait for peers.
    inputs = [
        [x.to(job.device) for x in (addend(job, call, job.rank), *residual_and_weight(job, call))]
        for call in job.calls
    ]
    pauses, found = random.Random(job.rank), []
    for call, (mine, residual, weight) in zip(job.calls, inputs, strict=True):
        time.sleep(pauses.uniform(0.0, job.max_pause_ms) / 1000)
        memory.crossover = Crossover(0 if call.is_two_shot else call.num_rows, call.num_rows)
        place = memory.take(call.place, call.num_rows)
        assert place is not None
        place.copy_(mine)
        if call.has_norm:
            result = list(memory.sum_add_rms_norm(place, residual, weight, EPS))
        else:
            result = [memory.sum(place)]
        found.append(result)
    if job.late_rank >= 0 and job.device != "cpu":
        _abort_once_all_wait(memory, Path(job.folder) / f"results{job.late_rank}")
    return [[tensor.cpu() for tensor in result] for result in found]


def _check(memory: PeerMemory, job: Job) -> None:
    """What every epoch begins with; in place of NCCL, the sum of what all ranks put in there."""
    if job.device == "cpu":
        crossover.finish = lambda _: None  # type: ignore[assignment,return-value]

    def all_reduce(x: torch.Tensor) -> None:
        ranks = job.size * (job.size - 1) // 2
        x.sub_(job.rank).mul_(job.size).add_(ranks)

    crossover.check(memory, all_reduce, time.sleep)


def _abort_once_all_wait(memory: PeerMemory, left: Path) -> None:
    """Nothing must have ended before, and everything must end soon after."""
    all_ended = torch.cuda.Event()
    all_ended.record()
    give_up = time.monotonic() + 60.0
    while not left.exists():
        assert time.monotonic() < give_up, "the late rank has not left"
        time.sleep(0.01)
    assert not all_ended.query()
    memory.abort()
    give_up = time.monotonic() + 10.0
    while not all_ended.query():
        assert time.monotonic() < give_up, "abort has not freed the device"
        time.sleep(0.01)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        import triton_interpreter

        triton_interpreter.mend(checks_overflow=False)
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    torch.save(_run(job), Path(job.folder) / f"results{job.rank}")
