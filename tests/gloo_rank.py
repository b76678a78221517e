"""One of two ranks of a real gloo group, in which something goes wrong; run as a program.

Told its rank, the launch directory and the case; prints what came of each all_gather of its.
"""

import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from nvserve.protocol.progress import ProgressPage, page_path, read_page
from nvserve.workers.parallel import TensorParallel

SILENCE_S = 2.0  # after which a silent peer is lost
LIMIT_S = 30.0  # of every other wait: a busy machine must not make a silent peer of another one
POLL_S = 0.005
NUM_BYTES = 50_000_000


def attempt(parallel: TensorParallel, x: torch.Tensor) -> list[str]:
    """The types of the exception, or nothing."""
    try:
        parallel.all_gather(x)
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__]
    return []


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < give_up, f"never came: {what}"
        time.sleep(POLL_S)


def threads_asleep(pid: int) -> dict[str, str] | None:
    """How often each thread of the process has switched so far; None unless all of them sleep."""
    switches = {}
    try:
        for status in Path(f"/proc/{pid}/task").glob("*/status"):
            text = status.read_text()
            if "\nState:\tS" not in text:
                return None
            switches[status.parent.name] = text[text.index("\nvoluntary_ctxt_switches") :]
    except OSError:  # a thread has just ended, and so did not sleep
        return None
    return switches


def waits_inside(folder: Path, pid: int) -> bool:
    """Rank 0 has entered its second collective, has done what it can there, and waits.

    Two looks in which nothing has run between them: gloo's threads hand work to each other.
    """
    page = read_page(page_path(str(folder), "worker", 0))
    if page is None or page.collectives_entered != 2:
        return False
    before = threads_asleep(pid)
    return before is not None and threads_asleep(pid) == before


def wait_for_death(pid: int) -> None:
    """Until the process and its sockets are gone; its parent need not have reaped it."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    assert poller.poll(LIMIT_S * 1000), "the peer lives on"
    os.close(pidfd)


def go_wrong(parallel: TensorParallel, case: str, folder: Path, peer: int) -> None:
    """What rank 1 does, before or while rank 0 is in a collective."""
    if case == "killed before":
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until(lambda: waits_inside(folder, peer), "rank 0 in a collective")
    if case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case == "leaves":
        parallel.leave()
    wait_until((folder / "done").exists, "the end")  # this process lives on


def starve(num_bytes: int) -> None:
    """Let this process have so much more memory, and not more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + num_bytes, -1))


def run(rank: int, folder: Path, case: str) -> list[list[str]]:
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    page = ProgressPage(page_path(str(folder), "worker", rank))
    limit_s = SILENCE_S if case == "silent" else LIMIT_S
    parallel = TensorParallel(rank, 2, page, limit_s)
    parallel.join(str(folder), 0, torch.device("cpu"), time.sleep)
    assert sys.excepthook is sys.__excepthook__, "one more is put around it with every epoch"
    peer = int((folder / f"pid{1 - rank}").read_text())
    assert attempt(parallel, torch.ones(3)) == []
    if case == "no memory":
        x = torch.empty(NUM_BYTES, dtype=torch.uint8)
        if rank == 0:
            starve(3 * NUM_BYTES)  # for the result, which is twice as large, but not for gloo's
        results = [attempt(parallel, x)]
        parallel.leave()
        return results
    if rank == 1:
        go_wrong(parallel, case, folder, peer)
        return []
    if case == "killed before":
        wait_for_death(peer)
    results = [attempt(parallel, torch.ones(3)) for _ in range(2)]
    (folder / "done").touch()
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(run(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])))
