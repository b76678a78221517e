"""Ranks that sum through peer memory, each a process of its own; run as a program it is one.

On a CPU, kernels are interpreted, which TRITON_INTERPRET=1 must ask for, and memory is the host's.
What they add up follows from a seed, so that whoever starts them can work out the sums.
"""

import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import msgspec
import torch
from memfd_memory import use_memfds
from torch._C._distributed_c10d import FileStore

from nvserve.workers import crossover
from nvserve.workers.engine import DTYPES
from nvserve.workers.peer_memory import Crossover, Layout, PeerMemory, open_for_all
from nvserve.workers.roll_call import RollCall

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
    """[R, N] that a rank puts in; zeros of both signs among them."""
    generator = torch.Generator().manual_seed(1000 * call.seed + rank)
    drawn = torch.randn(call.num_rows, job.width, generator=generator)
    drawn[:, 1::5] = 0.0
    drawn[:, 2::5] = -0.0
    drawn[:, 3 + rank :: 5] = 0.0  # where another rank may have something
    return drawn.to(DTYPES[job.dtype])


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


def _open(job: Job) -> PeerMemory:
    if job.device == "cpu":
        use_memfds()
    else:
        torch.cuda.set_device(job.rank % torch.cuda.device_count())
    folder = Path(job.folder)
    store = FileStore(str(folder / "store"), job.size)
    roll = RollCall(store, job.rank, job.size, lambda: time.sleep(0.001))
    memory = open_for_all(job.layout, roll, folder / "memory")
    assert memory is not None
    return memory


def _run(job: Job) -> list[list[torch.Tensor]]:
    memory = _open(job)
    if job.rank == job.late_rank:
        return []
    memory.meeting.calls.fill_(job.first_call)
    if job.late_rank < 0:
        _check(memory, job)
    elif job.device == "cpu":
        Thread(target=_abort_once_left, args=(memory, job)).start()
    # Copies from the host would wait for kernels that wait for peers.
    inputs = [
        [x.to(job.device) for x in (addend(job, call, job.rank), *residual_and_weight(job, call))]
        for call in job.calls
    ]
    if job.device != "cpu":  # nor is a kernel loaded while one waits for peers
        from nvserve.kernels.compilation import compiling_only

        with compiling_only():
            for call, tensors in zip(job.calls[:4], inputs, strict=False):
                _sum(memory, call, *tensors)
    pauses, found = random.Random(job.rank), []
    for call, tensors in zip(job.calls, inputs, strict=True):
        time.sleep(pauses.uniform(0.0, job.max_pause_ms) / 1000)
        found.append(_sum(memory, call, *tensors))
    if job.late_rank >= 0 and job.device != "cpu":
        _abort_once_left(memory, job)
    return [[tensor.cpu() for tensor in result] for result in found]


def _sum(
    memory: PeerMemory,
    call: Call,
    mine: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
) -> list[torch.Tensor]:
    memory.crossover = Crossover(0 if call.is_two_shot else call.num_rows, call.num_rows)
    place = memory.take(call.place, call.num_rows)
    assert place is not None
    place.copy_(mine)
    if call.has_norm:
        return list(memory.sum_add_rms_norm(place, residual, weight, EPS))
    return [memory.sum(place)]


def _check(memory: PeerMemory, job: Job) -> None:
    """What every epoch begins with; in place of NCCL, the sum of what all ranks put in there."""
    if job.device == "cpu":
        crossover.finish = lambda *_: None
        crossover.CHECKED_ROWS = (3, 7)  # type: ignore[misc]  # more than there are programs

    def all_reduce(x: torch.Tensor) -> None:
        ranks = job.size * (job.size - 1) // 2
        x.sub_(job.rank).mul_(job.size).add_(ranks)

    crossover.check(memory, all_reduce, time.sleep)


def _abort_once_left(memory: PeerMemory, job: Job) -> None:
    """Abort when the late rank is gone: nothing may end before, and everything must soon after."""
    left = Path(job.folder) / f"results{job.late_rank}"
    give_up = time.monotonic() + 60.0
    while not left.exists():
        assert time.monotonic() < give_up, "the late rank has not left"
        time.sleep(0.01)
    if job.device == "cpu":  # whose kernels keep the main thread
        memory.abort()
        return
    all_ended = torch.cuda.Event()
    all_ended.record()
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
