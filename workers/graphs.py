"""CUDA graphs of a decode step: a bucket of rows each, captured largest first, in one memory pool.

Each bucket holds two graphs: the forward pass, and the plain sampling tail with the advance of
the rows. A step with a full tail replays the first and samples eagerly. Rows behind the decode list
point to the scratch slot, so a bucket may be wider than the list.

One bucket is enough to begin with; the others are captured in idle moments and, while there are
none, one between two steps now and then.

Knows rows and replay; what a step computes it is given as functions.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

# Batches up to this size have buckets this far apart; wider ones cost more padding and less memory.
_STEPS: Final = ((4, 1), (16, 4), (256, 8), (1024, 32))

CAPTURE_EVERY_S: Final = 0.5  # between two captures under load: each delays a step

Forward = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Tail = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def bucket_sizes(max_rows: int) -> list[int]:
    """Batch sizes worth a graph, ascending; the last is max_rows, capped at 1024."""
    limit = min(max_rows, _STEPS[-1][0])
    sizes: list[int] = []
    size = 0
    for last, stride in _STEPS:
        while size + stride <= min(last, limit):
            size += stride
            sizes.append(size)
    if sizes and sizes[-1] < limit:
        sizes.append(limit)
    return sizes


@dataclass
class _Captured:
    forward: torch.cuda.CUDAGraph
    tail: torch.cuda.CUDAGraph
    hidden: torch.Tensor  # [bucket, N], written by `forward`
    positions: torch.Tensor  # [bucket] int64, of the new tokens
    ids: torch.Tensor  # [bucket] int64, written by `tail`


class DecodeGraphs:
    """The graphs of one runner. `rows` is the tensor of slots that every graph reads.

    forward(rows [R]) -> (hidden [R, N], positions [R]) and tail(hidden, rows, positions) -> ids [R]
    must do device work only, the same for any content of `rows`.
    """

    def __init__(self, forward: Forward, tail: Tail, rows: torch.Tensor, max_rows: int) -> None:
        self._forward: Final = forward
        self._tail: Final = tail
        self._rows: Final = rows
        self.sizes: Final = bucket_sizes(max_rows)
        self._missing: Final = list(self.sizes)  # captured from the end: largest first
        self._captured: Final[dict[int, _Captured]] = {}
        self._pool: Final = torch.cuda.graph_pool_handle()
        self._last_s = 0.0  # monotonic, of the last capture

    @property
    def is_due(self) -> bool:
        """Should a busy worker capture another bucket before its next step?"""
        return bool(self._missing) and time.monotonic() - self._last_s > CAPTURE_EVERY_S

    def capture_next(self) -> bool:
        """Capture the largest bucket still missing; True while there are more.

        Runs the forward pass once on whatever `rows` holds: it writes the KV that the next step
        will write again, and nothing else.
        """
        if not self._missing:
            return False
        size = self._missing.pop()
        self._captured[size] = self._capture(self._rows[:size])
        self._last_s = time.monotonic()
        return bool(self._missing)

    def _capture(self, rows: torch.Tensor) -> _Captured:
        # One eager run first: kernels compile and libraries allocate outside of the capture.
        self._forward(rows)
        torch.cuda.synchronize(rows.device)
        forward, tail = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=self._pool, capture_error_mode="thread_local"):
            hidden, positions = self._forward(rows)
        with torch.cuda.graph(tail, pool=self._pool, capture_error_mode="thread_local"):
            ids = self._tail(hidden, rows, positions)
        return _Captured(forward, tail, hidden, positions, ids)

    def _find(self, num_rows: int) -> _Captured | None:
        for size in self.sizes:
            if size >= num_rows and size in self._captured:
                return self._captured[size]
        return None

    def forward(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Replay the forward pass of the first num_rows rows; None without a bucket for them.

        The results are the graph's own memory: use them before the next replay of any bucket.
        """
        captured = self._find(num_rows)
        if captured is None:
            return None
        captured.forward.replay()
        return captured.hidden[:num_rows], captured.positions[:num_rows]

    def plain(self, num_rows: int) -> torch.Tensor | None:
        """Replay a whole step with the plain tail: ids [num_rows]; None without a bucket."""
        captured = self._find(num_rows)
        if captured is None:
            return None
        captured.forward.replay()
        captured.tail.replay()
        return captured.ids[:num_rows]
