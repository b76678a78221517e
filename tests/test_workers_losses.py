"""A collective that fails: for want of a peer, or by a fault of this rank's own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nvserve.workers.parallel import TensorParallel
from nvserve.workers.peer_memory import Layout, PeerMemory
from nvserve.workers.step_result import PeerLost

TESTS = Path(__file__).parent
LIMIT_S = 60.0


def run_two(folder: Path, case: str) -> list[list[list[str]]]:
    """What each rank got of its collectives: the types of the exception, or nothing."""
    paths = os.pathsep.join([str(TESTS.parent / ".src"), str(TESTS)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(TESTS / "gloo_rank.py")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder), case], env=environment, stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads(output or "[]") for output in outputs]


@pytest.mark.parametrize("case", ["killed", "killed before", "leaves", "silent"])
def test_a_peer_out_of_reach_is_a_lost_one(tmp_path: Path, case: str) -> None:
    first, again = run_two(tmp_path, case)[0]
    assert "PeerLost" in first
    assert "PeerLost" in again


def test_a_rank_without_memory_for_a_collective_blames_no_peer(tmp_path: Path) -> None:
    """It is the one at fault; its peer loses it when it leaves the group."""
    [[own], [others]] = run_two(tmp_path, "no memory")
    assert "RuntimeError" in own
    assert "PeerLost" not in own
    assert "PeerLost" in others


class Failing(PeerMemory):
    """Sums of it fail on this rank."""

    def __init__(self, error: Exception) -> None:
        layout = Layout(2, 1, 64, torch.float32)
        mine = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        super().__init__(0, layout, mine, [0, 0], torch.zeros(1, dtype=torch.int32))
        self._error = error

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        raise self._error


def failure(error: Exception) -> Exception:
    """What comes of a collective in which this is raised."""
    parallel = TensorParallel(0, 2)
    parallel.peers = Failing(error)
    place = parallel.place(0, 3)
    assert place is not None
    with pytest.raises(RuntimeError) as caught:
        parallel.all_reduce(place)
    return caught.value


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("all in use"), RuntimeError("a kernel")])
def test_a_sum_through_peer_memory_that_cannot_run_is_this_ranks_fault(error: Exception) -> None:
    assert failure(error) is error


def test_nccl_tells_of_a_peer_that_is_gone_and_of_memory_that_is_missing_here() -> None:
    gone = dist.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error\n"
        "ncclRemoteError: A call failed possibly due to a remote process exiting prematurely.\n"
        "Last error:\nsocketProgress: Connection closed by remote peer localhost<51159>"
    )
    assert isinstance(failure(gone), PeerLost)
    left_over = dist.DistBackendError(f"{gone}\nLast error:\nCuda failure 2 'out of memory'")
    assert isinstance(failure(left_over), PeerLost)
    full = dist.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 2 'out of memory'"
    )
    assert failure(full) is full


def test_whatever_fails_after_an_abort_is_a_lost_peer() -> None:
    class Aborting(Failing):
        def sum(self, x: torch.Tensor) -> torch.Tensor:
            parallel.abort()
            raise RuntimeError("the stream was given up")

    parallel = TensorParallel(0, 2)
    parallel.peers = Aborting(RuntimeError())
    place = parallel.place(0, 3)
    assert place is not None
    with pytest.raises(PeerLost, match="was given up"):
        parallel.all_reduce(place)
    with pytest.raises(PeerLost, match="aborted"):
        parallel.all_reduce(place)


def test_a_collective_without_a_group_is_one_without_peers() -> None:
    with pytest.raises(PeerLost):
        TensorParallel(0, 2).all_gather(torch.ones(3))
