"""Host values on their way to the device, without the host waiting for any copy.

On CUDA the copies start from pinned memory, which must not be written again before they ran: each
step has a buffer of its own in a ring as long as the number of steps in flight.
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
        self.copied = torch.cuda.Event()


class Staging:
    """Uploads of one device. Call `begin` before a step's first upload and `end` after its last."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = [_Buffer() for _ in range(RING)] if device.type == "cuda" else []
        self._turn = 0

    def begin(self) -> None:
        if not self._ring:
            return
        self._turn = (self._turn + 1) % RING
        buffer = self._ring[self._turn]
        # Steps run in order and RING are in flight at most, so the step before is long done.
        assert buffer.copied.query(), f"more than {RING} steps in flight"
        buffer.num_used = 0
        buffer.oversized.clear()

    def end(self) -> None:
        if self._ring:
            self._ring[self._turn].copied.record()

    def upload(self, values: "npt.NDArray[np.generic]") -> torch.Tensor:
        """A host array as a device tensor of the same shape and dtype."""
        # A view of a message's bytes is read-only, which a tensor cannot be.
        host = torch.from_numpy(np.require(values, requirements=["C", "W"]))
        if not self._ring:
            return host
        return self._pinned(host).to(self._device, non_blocking=True)

    def _pinned(self, host: torch.Tensor) -> torch.Tensor:
        buffer = self._ring[self._turn]
        end = buffer.num_used + host.nbytes
        if end > CAPACITY_BYTES:
            pinned = host.pin_memory()
            buffer.oversized.append(pinned)
            return pinned
        pinned = buffer.memory[buffer.num_used : end].view(host.dtype).view(host.shape)
        buffer.num_used = -(-end // 16) * 16  # the next one's alignment
        pinned.copy_(host)
        return pinned
