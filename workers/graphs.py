"""CUDA graphs of a decode step: a bucket of rows each, captured largest first, in one memory pool.

A bucket's graph is a whole step with the plain sampling tail. The first step with a full tail adds
one of the forward pass alone, behind which it samples eagerly. Rows behind the decode list point to
the scratch slot, so a bucket may be wider than the list.

Before a bucket's first capture its step is rehearsed, in short and on rows that all are the scratch
slot: what its graphs need is then compiled, loaded and allocated, and no request's blocks are
touched. Rows of the list may be those of requests that ended, whose blocks are others' by now.

One bucket is enough to begin with; the others are captured in idle moments and, while there are
none, now and then the one that a step lacks most, behind that step: the device goes on meanwhile
with what it was given. Ranks of a group capture in step, since each enters the collectives of the
rehearsal: never in idle moments, and by the count of steps.

Knows rows and replay; what a step computes it is given as functions.
"""

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, TypeVar

import torch

# Batches up to this size have buckets this far apart; wider ones cost more padding and less memory.
_STEPS: Final = ((4, 1), (16, 4), (256, 8), (1024, 32))

# Between two captures under load, each of which delays a step.
CAPTURE_EVERY_S: Final = 0.5
CAPTURE_EVERY_STEPS: Final = 32
# Under load a bucket is worth its capture where the one at hand is wider by so much.
WORTH_WIDTH: Final = 1.125

Forward = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Step = Callable[[torch.Tensor], torch.Tensor]
_Result = TypeVar("_Result")


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
    step: torch.cuda.CUDAGraph
    ids: torch.Tensor  # [bucket] int32, written by `step`
    is_forward_tried: bool = False
    forward: torch.cuda.CUDAGraph | None = None
    hidden: torch.Tensor | None = None  # [bucket, N], written by `forward`, like
    positions: torch.Tensor | None = None  # [bucket] int64, of the new tokens


class Pace:
    """When another capture is due: after some time, or after some steps of all ranks."""

    def __init__(self, *, is_in_step: bool) -> None:
        self.is_in_step: Final = is_in_step
        self._num_steps = 0
        self._last_s = 0.0  # monotonic, of the last capture, ...
        self._last_step = -CAPTURE_EVERY_STEPS  # ... and its step

    def begin_step(self) -> None:
        self._num_steps += 1

    def note_capture(self) -> None:
        self._last_s, self._last_step = time.monotonic(), self._num_steps

    @property
    def is_due(self) -> bool:
        if self.is_in_step:
            return self._num_steps - self._last_step >= CAPTURE_EVERY_STEPS
        return time.monotonic() - self._last_s > CAPTURE_EVERY_S


class GraphPool:
    """Captures graphs of one runner, which share their memory: one replays at a time.

    Inside in_short() a step launches all kinds of its kernels, but not all of its kernels.
    """

    def __init__(
        self,
        device: torch.device,
        pace: Pace,
        in_short: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._device: Final = device
        self._pace: Final = pace
        self._in_short: Final = in_short
        self._pool: Final = torch.cuda.graph_pool_handle()
        self._graphs: Final[list[torch.cuda.CUDAGraph]] = []
        self._stream: Final = torch.cuda.Stream(device)

    @property
    def is_due(self) -> bool:
        """Was the last capture long enough ago for another one under load?"""
        return self._pace.is_due

    def rehearse(self, function: Callable[[], object]) -> None:
        """Run a step in short, for what it compiles, loads and allocates."""
        with self._in_short():
            function()

    def capture(self, function: Callable[[], _Result]) -> tuple[torch.cuda.CUDAGraph, _Result]:
        """A graph of function(), and what it returned: memory that each replay writes.

        The function was rehearsed before on like arguments.
        """
        if self._pace.is_in_step:  # the group's collectives have ended, and none is waited for
            torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # A collection may free what must not be freed during a capture, and takes long.
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = function()
                finally:
                    graph.capture_end()
        except BaseException:
            graph.reset()  # whoever holds the exception must not hold what was captured
            raise
        finally:
            if was_collecting:
                gc.enable()
        self._pace.note_capture()
        self._graphs.append(graph)
        return graph, result

    def reset(self) -> None:
        """Have all graphs let go of what they hold, whoever holds them; none is replayed again."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


class DecodeGraphs:
    """The graphs of one runner. `rows` is the tensor of slots that every graph reads.

    `padding` is like it, and all scratch.

    step(rows [R]) -> ids [R] and forward(rows) -> (hidden [R, N], positions [R]) must do device
    work only, the same for any content of `rows`.
    """

    def __init__(
        self,
        pool: GraphPool,
        step: Step,
        forward: Forward,
        rows: torch.Tensor,
        padding: torch.Tensor,
        max_rows: int,
    ) -> None:
        self._pool: Final = pool
        self._step: Final = step
        self._forward: Final = forward
        self._rows: Final = rows
        self._padding: Final = padding
        self.sizes: Final = bucket_sizes(max_rows)
        self._missing: Final = list(self.sizes)  # captured from the end: largest first
        self._captured: Final[dict[int, _Captured]] = {}

    @property
    def num_captured(self) -> int:
        """Buckets that have their graph."""
        return len(self._captured)

    def capture_for(self, num_rows: int) -> None:
        """Behind a step of num_rows: capture its bucket, if it is missed and the time has come."""
        fitting = next((size for size in self.sizes if size >= num_rows), None)
        if fitting not in self._missing or not self._pool.is_due:
            return
        found = self._find(num_rows)
        if found is None or found[0] >= fitting * WORTH_WIDTH:
            self._missing.remove(fitting)  # also if it fails, as it then would again
            self._capture(fitting)

    def capture_forward_for(self, num_rows: int) -> None:
        """Ahead of a full tail: capture its forward pass, if it is missed and the time has come."""
        found = self._find(num_rows)
        if found is None or found[1].is_forward_tried or not self._pool.is_due:
            return
        size, captured = found
        captured.is_forward_tried = True
        rows = self._rows[:size]
        captured.forward, results = self._pool.capture(lambda: self._forward(rows))
        captured.hidden, captured.positions = results

    def capture_next(self) -> bool:
        """Capture the largest bucket still missing; True while there are more."""
        if not self._missing:
            return False
        self._capture(self._missing.pop())
        return bool(self._missing)

    def _capture(self, size: int) -> None:
        rows = self._rows[:size]
        self._pool.rehearse(lambda: self._step(self._padding[:size]))
        graph, ids = self._pool.capture(lambda: self._step(rows))
        self._captured[size] = _Captured(graph, ids)

    def _find(self, num_rows: int, *, has_forward: bool = False) -> tuple[int, _Captured] | None:
        for size in self.sizes:
            captured = self._captured.get(size) if size >= num_rows else None
            if captured is not None and (captured.forward is not None or not has_forward):
                return size, captured
        return None

    def forward(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Replay the forward pass of the first num_rows rows; None without a bucket for them.

        The results are the graph's own memory: use them before the next replay of any bucket.
        """
        found = self._find(num_rows, has_forward=True)
        if found is None:
            return None
        captured = found[1]
        assert captured.forward is not None
        assert captured.hidden is not None
        assert captured.positions is not None
        captured.forward.replay()
        return captured.hidden[:num_rows], captured.positions[:num_rows]

    def step(self, num_rows: int) -> torch.Tensor | None:
        """Replay a whole step with the plain tail: ids [num_rows]; None without a bucket."""
        found = self._find(num_rows)
        if found is None:
            return None
        found[1].step.replay()
        return found[1].ids[:num_rows]
