"""CUDA graphs of small mixed steps: otherwise launching a kernel takes longer than running it.

A bucket has room for so many decode rows and so many tokens of a few chunks; what is missing is a
chunk of the scratch slot. It is captured when the first step needs it, or before, in idle moments;
like those of graphs.py after a rehearsal that is all padding.

Knows rows, columns and replay; what a step computes it is given as functions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np
import torch

from nvserve.protocol.messages import Chunks
from nvserve.workers.batch import Batch, ChunkArrays, ChunkColumns
from nvserve.workers.graphs import GraphPool
from nvserve.workers.staging import Staging

ROW_SIZES: Final = (0, 16, 64, 128, 256)  # decode rows
TOKEN_SIZES: Final = (64, 128, 256, 512)  # tokens of chunks; above, the GPU is slow enough
MAX_CHUNKS: Final = 16  # the padding is one

Step = Callable[[torch.Tensor, ChunkColumns], torch.Tensor]


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    ids: torch.Tensor  # [decode rows + MAX_CHUNKS] int32, written by `graph`


class MixedGraphs:
    """The graphs of one runner.

    step(rows [R], columns) -> ids [R + C] must do device work only, the same for any content of its
    arguments.
    """

    def __init__(self, pool: GraphPool, step: Step, batch: Batch, staging: Staging) -> None:
        self._pool: Final = pool
        self._step: Final = step
        self._batch: Final = batch
        self._staging: Final = staging
        limit = batch.max_blocks * batch.block_size
        self._token_sizes: Final = [size for size in TOKEN_SIZES if size <= limit]
        max_rows = batch.num_slots - 1
        self._row_sizes: Final = sorted({min(size, max_rows) for size in ROW_SIZES})
        self._captured: Final[dict[tuple[int, int], _Captured]] = {}
        self._tried: Final[set[tuple[int, int]]] = set()  # what failed would fail again
        # What each bucket reads, by its number of tokens.
        self._columns: Final = {size: self._make_columns(size) for size in self._token_sizes}

    def _make_columns(self, num_tokens: int) -> tuple[torch.Tensor, ChunkColumns]:
        arrays = self._padding(num_tokens)
        packed = torch.from_numpy(arrays.packed()).to(self._batch.rows.device)
        limit = self._batch.max_blocks * self._batch.block_size
        return packed, arrays.on_device(packed, num_tokens, limit)

    def _padding(self, num_tokens: int) -> ChunkArrays:
        """Columns without any request."""
        nothing = np.zeros(0, dtype=np.int64)
        none = ChunkArrays(*[nothing] * len(ChunkArrays._fields))
        empty = none._replace(cu_seqlens=np.zeros(1, dtype=np.int64))
        return empty.padded(num_tokens, MAX_CHUNKS, self._batch.scratch)

    def capture_next(self) -> bool:
        """Capture a bucket still missing, while no step is in flight; True while there are more."""
        missing = [
            bucket
            for bucket in product(self._row_sizes, self._token_sizes)
            if bucket not in self._tried
        ]
        if not missing:
            return False
        self._capture(*missing[0])
        return len(missing) > 1

    def capture_for(self, chunks: Chunks, num_rows: int) -> None:
        """Ahead of such a step: capture its bucket, if it is missed and the time has come."""
        bucket = self._bucket_of(chunks, num_rows)
        if bucket is not None and bucket not in self._tried and self._pool.is_due:
            self._capture(*bucket)

    def _bucket_of(self, chunks: Chunks, num_rows: int) -> tuple[int, int] | None:
        num_tokens = sum(chunks.counts)
        tokens = next((size for size in self._token_sizes if size >= num_tokens), None)
        width = next((size for size in self._row_sizes if size >= num_rows), None)
        if tokens is None or width is None or len(chunks.slots) >= MAX_CHUNKS:
            return None
        return width, tokens

    def _capture(self, num_rows: int, num_tokens: int) -> None:
        """Leaves padding in the columns."""
        self._tried.add((num_rows, num_tokens))
        rows, (packed, columns) = self._batch.rows[:num_rows], self._columns[num_tokens]
        packed.copy_(torch.from_numpy(self._padding(num_tokens).packed()))
        self._pool.rehearse(lambda: self._step(self._batch.padding[:num_rows], columns))
        captured = _Captured(*self._pool.capture(lambda: self._step(rows, columns)))
        self._captured[num_rows, num_tokens] = captured

    def step(self, chunks: Chunks, num_rows: int) -> torch.Tensor | None:
        """Replay a step of the first num_rows decode rows and these chunks, with the plain tail.

        Returns the ids of the rows, then of the chunks that sample, [R] int32; None if the step has
        no bucket, or one that is not captured.
        """
        bucket = self._bucket_of(chunks, num_rows)
        captured = self._captured.get(bucket) if bucket is not None else None
        if bucket is None or captured is None:
            return None
        width, tokens = bucket
        arrays = ChunkArrays.of(chunks).padded(tokens, MAX_CHUNKS, self._batch.scratch)
        self._staging.upload_into(self._columns[tokens][0], arrays.packed())
        captured.graph.replay()
        sampled = captured.ids[width : width + sum(chunks.samples)]
        return torch.cat((captured.ids[:num_rows], sampled))
