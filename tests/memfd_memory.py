"""Memory of the host in place of workers/mapped_memory.py: for ranks on a CPU."""

import mmap
import os

import numpy as np
import torch

from nvserve.workers import peer_memory


class MemfdMemory:
    """Shared like a GPU's: by a descriptor that peers get, and for as long as anybody maps it."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._descriptor = descriptor
        try:
            self._mapping = mmap.mmap(descriptor, num_bytes)
        except (OSError, ValueError) as error:
            raise RuntimeError("not to be mapped") from error
        self._bytes = torch.from_numpy(np.frombuffer(self._mapping, dtype=np.uint8))

    @staticmethod
    def allocate(num_bytes: int, device: int) -> "MemfdMemory":
        descriptor = os.memfd_create("memory")
        os.truncate(descriptor, num_bytes)
        return MemfdMemory(descriptor, num_bytes)

    @staticmethod
    def of_descriptor(descriptor: int, num_bytes: int, device: int) -> "MemfdMemory":
        return MemfdMemory(os.dup(descriptor), num_bytes)

    def export(self) -> int:
        return os.dup(self._descriptor)

    @property
    def address(self) -> int:
        return self._bytes.data_ptr()

    def tensor(self) -> torch.Tensor:
        return self._bytes

    def close(self) -> None:
        os.close(self._descriptor)


def use_memfds() -> None:
    """In this process, from now on."""
    peer_memory.MappedMemory = MemfdMemory  # type: ignore
    peer_memory.pinned_word = lambda: torch.zeros(1, dtype=torch.int32)
    peer_memory.num_multiprocessors = lambda device: 3  # programs take several rows
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
