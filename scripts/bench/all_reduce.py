"""Microseconds of a sum over ranks in a CUDA graph, by rows and way: needs a GPU for each rank.

    python -m nvserve.scripts.bench.all_reduce --tp 2 --width 8192 --output FILE

One-shot and two-shot through peer memory and NCCL, alone and with the residual add and norm behind
it (in the same kernel, or for NCCL in one of its own). The slowest rank's figures.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from nvserve.kernels.norm import add_rms_norm
from nvserve.scripts import python_child
from nvserve.scripts.bench.output_file import why_unusable
from nvserve.workers.crossover import SIZES, time_call
from nvserve.workers.models.decoder import NUM_PLACES
from nvserve.workers.parallel import TensorParallel
from nvserve.workers.peer_memory import MAX_ROWS, Crossover, Layout, PeerMemory

MODULE: Final = "nvserve.scripts.bench.all_reduce"
EPS: Final = 1e-6
LIMIT_S: Final = 120.0
KILL_LIMIT_S: Final = 10.0


def measure(memory: PeerMemory, rows: int) -> dict[str, float]:
    """Microseconds by way, on this rank; "+ norm" with the residual add and norm."""
    width, device = memory.width, torch.device("cuda", torch.cuda.current_device())
    residual = torch.zeros(rows, width, dtype=torch.bfloat16, device=device)
    weight = torch.ones(width, dtype=torch.bfloat16, device=device)
    addends = [torch.zeros_like(residual) for _ in range(2)]

    def peer(is_normed: bool, number: int) -> None:
        place = memory.take(number, rows)
        assert place is not None
        if is_normed:
            memory.sum_add_rms_norm(place, residual, weight, EPS)
        else:
            memory.sum(place)

    def nccl(is_normed: bool, number: int) -> None:
        dist.all_reduce(addends[number])
        if is_normed:
            add_rms_norm(addends[number], residual, weight, EPS)

    ways: dict[str, tuple[Crossover, Callable[[bool, int], None]]] = {
        "one-shot": (Crossover(MAX_ROWS, MAX_ROWS), peer),
        "two-shot": (Crossover(0, MAX_ROWS), peer),
        "nccl": (Crossover(0, 0), nccl),
    }
    found = {}
    if rows > memory.inbox_rows:
        del ways["one-shot"]
    for name, (memory.crossover, call) in ways.items():
        for suffix, is_normed in (("", False), (" + norm", True)):
            found[name + suffix] = 1e3 * time_call(partial(call, is_normed), time.sleep)
    return found


def run_rank(rank: int, size: int, width: int, folder: str) -> dict[int, dict[str, float]]:
    if torch.cuda.device_count() < size:
        sys.exit(f"--tp {size} needs {size} GPUs, this machine has {torch.cuda.device_count()}")
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    layout = Layout(size, NUM_PLACES, width, torch.bfloat16)
    group = TensorParallel(rank, size, layout=layout)
    group.join(folder, 0, device, time.sleep)
    if group.peers is None:
        sys.exit("the GPUs do not reach each other's memory")
    print(f"rank {rank}: {group.peers.crossover}", flush=True)
    return {rows: measure(group.peers, rows) for rows in SIZES}


def run_ranks(size: int, width: int) -> dict[int, dict[str, float]]:
    """The slowest rank's figures, by rows."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{rank}.json" for rank in range(size)]
        flags = ["-m", MODULE, "--tp", str(size), "--width", str(width), "--folder", folder]
        ranks = [
            subprocess.Popen(
                python_child.command(*flags, "--rank", str(rank), "--output", str(file)),
                env=python_child.environment(),
            )
            for rank, file in enumerate(files)
        ]
        try:
            deadline = time.monotonic() + LIMIT_S
            for rank in ranks:
                if rank.wait(max(0.0, deadline - time.monotonic())) != 0:
                    sys.exit(f"a rank exited with {rank.returncode}")
        except subprocess.TimeoutExpired:
            sys.exit(f"the ranks have not ended within {LIMIT_S:g} s")
        finally:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):  # a device may hold it longer
                    rank.wait(KILL_LIMIT_S)
        everyone = [json.loads(file.read_text())["rows"] for file in files]
    return {
        int(rows): {way: max(one[rows][way] for one in everyone) for way in everyone[0][rows]}
        for rows in everyone[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    reason = "" if flags.output is None else why_unusable(flags.output)
    if reason:
        parser.error(f"--output: {reason}")
    if flags.rank >= 0:
        rows = run_rank(flags.rank, flags.tp, flags.width, flags.folder)
    else:
        rows = run_ranks(flags.tp, flags.width)
        for number, times in rows.items():
            print(f"{number:4d} rows  " + "  ".join(f"{k} {v:.1f}" for k, v in times.items()))
    if flags.output is not None:
        flags.output.write_text(json.dumps({"width": flags.width, "tp": flags.tp, "rows": rows}))


if __name__ == "__main__":
    main()
