"""One of two ranks of a real gloo group, in which something goes wrong; run as a program.

Told its rank, the launch directory and the case; prints what came of each all_gather of its.
"""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch

from nvserve.workers.parallel import TensorParallel

LIMIT_S = 2.0  # of a collective
NUM_BYTES = 50_000_000


def attempt(parallel: TensorParallel, x: torch.Tensor) -> list[str]:
    """The types of the exception, or nothing."""
    try:
        parallel.all_gather(x)
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__]
    return []


def wait_for(path: Path) -> None:
    give_up = time.monotonic() + 30.0
    while not path.exists():
        assert time.monotonic() < give_up, f"{path} never came"
        time.sleep(0.005)


def go_wrong(parallel: TensorParallel, case: str, folder: Path) -> None:
    """What rank 1 does, before or while rank 0 is in a collective."""
    if case == "killed before":
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for(folder / "inside")
    time.sleep(0.1)  # in which it has entered
    if case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case == "leaves":
        parallel.leave()
    wait_for(folder / "done")  # this process lives on


def starve(num_bytes: int) -> None:
    """Let this process have so much more memory, and not more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + num_bytes, -1))


def run(rank: int, folder: Path, case: str) -> list[list[str]]:
    parallel = TensorParallel(rank, 2, limit_s=LIMIT_S)
    parallel.join(str(folder), 0, torch.device("cpu"), time.sleep)
    assert attempt(parallel, torch.ones(3)) == []
    if case == "no memory":
        x = torch.empty(NUM_BYTES, dtype=torch.uint8)
        if rank == 0:
            starve(3 * NUM_BYTES)  # for the result, which is twice as large, but not for gloo's
        results = [attempt(parallel, x)]
        parallel.leave()
        return results
    if rank == 1:
        go_wrong(parallel, case, folder)
        return []
    if case == "killed before":
        time.sleep(0.3)
    (folder / "inside").touch()
    results = [attempt(parallel, torch.ones(3)) for _ in range(2)]
    (folder / "done").touch()
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(run(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])))
