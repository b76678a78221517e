"""Which buckets are captured when, with a stand-in for CUDA that replays by calling."""

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, cast

import pytest
import torch

from nvserve.kernels.attention import FUSED_ROWS
from nvserve.kernels.matmul import gated_cut, skinny_cut
from nvserve.kernels.room import tile_tokens
from nvserve.scripts.bench.model_shapes import SHAPES
from nvserve.workers.graphs import (
    CAPTURE_EVERY_STEPS,
    DecodeGraphs,
    GraphPool,
    Pace,
    bucket_sizes,
)
from nvserve.workers.runner import COMPILED_MIXED, COMPILED_ROWS


class Recorded:
    """Like a CUDA graph of `function`."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


class Pool:
    """Captures by calling; `is_due` is for the test to say."""

    def __init__(self) -> None:
        self.is_due = True
        self.is_full = False

    def rehearse(self, function: Callable[[], object]) -> None:
        function()

    def capture(self, function: Callable[[], Any]) -> tuple[Recorded, Any]:
        if self.is_full:
            raise torch.OutOfMemoryError
        return Recorded(function), function()


SCRATCH = -1


def make_graphs(max_rows: int) -> tuple[DecodeGraphs, Pool, list[int]]:
    """Graphs whose step answers its own width; the widths that were captured, as they come."""
    pool, widths = Pool(), list[int]()
    warm = list[int]()

    def step(rows: torch.Tensor) -> torch.Tensor:
        """Captures by calling, as Pool does, come after a call with nothing but scratch."""
        if SCRATCH in rows:
            assert (rows == SCRATCH).all()
            warm.append(len(rows))
        else:
            assert warm.pop() == len(rows)
            widths.append(len(rows))
        return torch.full((len(rows),), len(rows))

    def forward(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((len(rows), 2), float(len(rows))), rows

    rows = torch.arange(max_rows + 1)
    padding = torch.full_like(rows, SCRATCH)
    graphs = DecodeGraphs(cast(GraphPool, pool), step, forward, rows, padding, max_rows)
    return graphs, pool, widths


def width_used(graphs: DecodeGraphs, num_rows: int) -> int:
    ids = graphs.step(num_rows)
    assert ids is not None
    assert len(ids) == num_rows
    return int(ids[0])


def test_buckets_are_dense_for_small_batches_and_end_at_the_limit() -> None:
    assert bucket_sizes(30) == [1, 2, 3, 4, 8, 12, 16, 24, 30]
    assert bucket_sizes(1) == [1]
    assert max(bucket_sizes(5000)) == 1024


def test_idle_moments_capture_all_buckets_largest_first() -> None:
    graphs, _, widths = make_graphs(16)
    while graphs.capture_next():
        pass
    assert widths == [16, 12, 8, 4, 3, 2, 1]
    assert [width_used(graphs, n) for n in (1, 3, 5, 12, 13)] == [1, 3, 8, 12, 16]


def test_a_busy_worker_captures_the_bucket_that_its_batch_lacks() -> None:
    graphs, _, widths = make_graphs(256)
    graphs.capture_next()
    assert width_used(graphs, 1) == 256
    graphs.capture_for(1)
    assert widths == [256, 1]
    assert width_used(graphs, 1) == 1


def test_a_bucket_hardly_wider_than_the_batch_is_good_enough_under_load() -> None:
    graphs, _, widths = make_graphs(256)
    graphs.capture_next()
    graphs.capture_for(240)
    assert widths == [256]
    graphs.capture_for(200)
    assert widths == [256, 200]


def test_captures_under_load_wait_for_their_time() -> None:
    graphs, pool, widths = make_graphs(16)
    graphs.capture_next()
    pool.is_due = False
    graphs.capture_for(1)
    graphs.capture_forward_for(1)
    assert graphs.forward(1) is None
    assert widths == [16]


def test_a_wider_forward_pass_serves_until_the_fitting_one_is_captured() -> None:
    graphs, pool, _ = make_graphs(16)
    graphs.capture_next()
    graphs.capture_forward_for(3)
    graphs.capture_for(3)
    pool.is_due = False
    graphs.capture_forward_for(3)
    found = graphs.forward(3)
    assert found is not None
    assert found[0][0, 0] == 16  # of the wide one
    pool.is_due = True
    graphs.capture_forward_for(3)
    found = graphs.forward(3)
    assert found is not None
    assert found[0][0, 0] == 3


def test_a_capture_that_failed_is_not_tried_again() -> None:
    graphs, pool, widths = make_graphs(16)
    graphs.capture_next()
    pool.is_full = True
    for attempt in (graphs.capture_for, graphs.capture_forward_for):
        with pytest.raises(torch.OutOfMemoryError):
            attempt(3)
        attempt(3)
    with pytest.raises(torch.OutOfMemoryError):
        graphs.capture_next()
    pool.is_full = False
    while graphs.capture_next():
        pass
    assert widths == [16, 8, 4, 2, 1]
    assert graphs.forward(3) is None


def test_the_forward_pass_alone_is_captured_when_a_full_tail_needs_it() -> None:
    graphs, _, _ = make_graphs(8)
    while graphs.capture_next():
        pass
    assert graphs.forward(3) is None
    graphs.capture_forward_for(3)
    found = graphs.forward(3)
    assert found is not None
    hidden, positions = found
    assert hidden.shape == (3, 2)
    assert positions.tolist() == [0, 1, 2]


def test_no_bucket_serves_more_rows_than_the_largest() -> None:
    graphs, _, _ = make_graphs(8)
    graphs.capture_next()
    graphs.capture_for(9)
    assert graphs.step(9) is None


def test_ranks_of_a_group_pace_their_captures_by_steps_alone() -> None:
    paces = [Pace(is_in_step=True) for _ in range(2)]
    due: list[list[int]] = [[], []]
    for rank, pace in enumerate(paces):
        for step in range(3 * CAPTURE_EVERY_STEPS):
            pace.begin_step()
            if pace.is_due:
                due[rank].append(step)
                pace.note_capture()
    assert due[0] == due[1] == [0, CAPTURE_EVERY_STEPS, 2 * CAPTURE_EVERY_STEPS]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_cut_of_decode_attention_is_compiled_before_the_first_request(
    dtype: torch.dtype, head_dim: int
) -> None:
    plan = pytest.importorskip("nvserve.kernels.attention_plan", exc_type=ImportError)

    def kinds(rows: list[int]) -> set[object]:
        return {(row <= FUSED_ROWS, plan.decode_shape(dtype, head_dim, row)) for row in rows}

    def unfused(rows: list[int]) -> set[object]:
        return {plan.decode_shape(dtype, head_dim, row) for row in rows}

    every = list(range(1, 1025))
    assert kinds([*COMPILED_ROWS]) == kinds(every)
    assert unfused([rows for rows, _ in COMPILED_MIXED]) == unfused(every)


@pytest.mark.parametrize("name", [*SHAPES])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("max_num_seqs", [1, 8, 64, 256])
def test_every_cut_of_a_matmul_is_compiled_before_the_first_request(
    name: str, tp_size: int, max_num_seqs: int
) -> None:
    shape = SHAPES[name]
    heads, width = shape.num_heads // tp_size, shape.intermediate_size // tp_size
    num_qkv = (heads + 2 * shape.num_kv_heads // tp_size) * shape.head_dim
    sizes = [
        (num_qkv, shape.hidden_size),
        (shape.hidden_size, heads * shape.head_dim),
        (2 * width, shape.hidden_size),
        (shape.hidden_size, width),
        (shape.vocab_size // tp_size, shape.hidden_size),
    ]

    def kinds(rows: Iterable[int]) -> set[object]:
        """Of the matmul kernels that steps of so many rows launch."""
        found: set[object] = set()
        for row, (outputs, inputs) in product(rows, sizes):
            plain = skinny_cut(row, outputs, inputs, torch.bfloat16)
            gated = gated_cut(row, width, shape.hidden_size, torch.bfloat16)
            found |= {(cut, tile_tokens(row)) for cut in (plain, gated) if cut is not None}
        return found

    compiled = {min(rows, max_num_seqs) for rows in COMPILED_ROWS}
    compiled |= {min(rows, max_num_seqs) + num_tokens for rows, num_tokens in COMPILED_MIXED}
    assert kinds(compiled) >= kinds(range(1, 200))
