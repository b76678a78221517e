"""Values on their way between host and device, without the host waiting for any copy.

On CUDA the copies start from and end in pinned memory, which must not be written again before they
ran and were read: each step has a buffer of its own in a ring as long as the number of steps in
flight.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

RING: Final = 2  # steps in flight at most
CAPACITY_BYTES: Final = 1 << 20


class _Buffer:
    """The pinned memory of one step, and what its copies must keep alive."""

    def __init__(self) -> None:
        self.memory = torch.empty(CAPACITY_BYTES, dtype=torch.uint8, pin_memory=True)
        self.num_used = 0
        self.oversized: list[torch.Tensor] = []
        self.copied: torch.cuda.Event | None = None  # of the uploads, where there were any


class Staging:
    """Copies of one device. Call `begin` before a step's first one and `end` after its last.

    Downloads are there when the step is done, and to be read before RING more steps begin.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = [_Buffer() for _ in range(RING)] if device.type == "cuda" else []
        self._turn = 0
        self._has_uploads = False  # since `begin`

    def begin(self) -> None:
        if not self._ring:
            return
        self._turn = (self._turn + 1) % RING
        buffer = self._ring[self._turn]
        # Steps run in order and RING are in flight at most, so the step before is long done.
        is_over = buffer.copied is None or buffer.copied.query()
        assert is_over, f"more than {RING} steps in flight"
        buffer.copied = None
        buffer.num_used = 0
        buffer.oversized.clear()

    def end(self) -> None:
        if self._has_uploads:
            buffer = self._ring[self._turn]
            buffer.copied = torch.cuda.Event()
            buffer.copied.record()
            self._has_uploads = False

    def upload(self, values: "npt.NDArray[np.generic]") -> torch.Tensor:
        """A host array as a device tensor of the same shape and dtype."""
        # A view of a message's bytes is read-only, which a tensor cannot be.
        host = torch.from_numpy(np.require(values, requirements=["C", "W"]))
        if not self._ring:
            return host
        self._has_uploads = True
        return self._pinned(host).copy_(host).to(self._device, non_blocking=True)

    def upload_into(self, target: torch.Tensor, values: "npt.NDArray[np.generic]") -> None:
        """A host array to a device tensor of the same shape and dtype."""
        host = torch.from_numpy(np.require(values, requirements=["C", "W"]))
        if self._ring:
            self._has_uploads = True
            host = self._pinned(host).copy_(host)
        target.copy_(host, non_blocking=True)

    def download(self, values: torch.Tensor) -> torch.Tensor:
        """A device tensor as it will be in host memory once the step is done."""
        if values.device.type == "cpu":
            return values
        return self._pinned(values).copy_(values, non_blocking=True)

    def _pinned(self, like: torch.Tensor) -> torch.Tensor:
        """Pinned memory of the step under way, of the shape and dtype of `like`."""
        buffer = self._ring[self._turn]
        end = buffer.num_used + like.nbytes
        if end > CAPACITY_BYTES:
            pinned = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
            buffer.oversized.append(pinned)
            return pinned
        pinned = buffer.memory[buffer.num_used : end].view(like.dtype).view(like.shape)
        buffer.num_used = -(-end // 16) * 16  # the next one's alignment
        return pinned
