"""Peer memory whose ranks are processes on a CPU: each maps the files of all."""

from pathlib import Path

import numpy as np
import torch

from nvserve.workers.peer_memory import Layout, PeerMemory

ABORT = "abort"


def open_files(folder: Path, rank: int, layout: Layout) -> PeerMemory:
    """This rank's side. Files are made by whoever comes first."""
    memories = [
        _mapped(folder / f"memory{number}", layout.num_bytes) for number in range(layout.size)
    ]
    addresses = [memory.data_ptr() for memory in memories]
    abort = _mapped(folder / ABORT, torch.int32.itemsize).view(torch.int32)
    return PeerMemory(rank, layout, memories[rank], addresses, abort, owner=memories)


def abort_all(folder: Path) -> None:
    """What the host of each rank does when a peer is dead."""
    _mapped(folder / ABORT, torch.int32.itemsize).fill_(1)


def _mapped(path: Path, num_bytes: int) -> torch.Tensor:
    with path.open("ab") as file:
        file.truncate(num_bytes)  # what is new is zero, what is there stays
    return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="r+"))
