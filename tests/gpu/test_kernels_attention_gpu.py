"""Paged attention against its torch twin: decode, prefill, and decode in a graph."""

import itertools

import pytest
import torch
from gpu.kernel_cases import DEVICE, DTYPES, MARKS, TOLERANCE, assert_close, on_gpu_only, random

from nvserve.kernels import attention, reference
from nvserve.kernels.dispatch import INTERPRETED

pytestmark = MARKS

BACKENDS = ["triton"] if INTERPRETED else ["triton", "fa3", "fa3+triton"]
SHAPES = [(4, 2, 24, 4)] if INTERPRETED else [
    (32, 8, 128, 16), (16, 8, 128, 16), (14, 2, 64, 32), (8, 8, 96, 16), (32, 1, 128, 1),
    (8, 2, 256, 64),
]  # fmt: skip
BATCHES = [[1, 37, 70]] if INTERPRETED else [
    [1], [512], [5, 1, 700, 64, 65, 16, 1, 2000], [1] * 64, [100] * 130
]  # fmt: skip


def make_backend(name: str, dtype: torch.dtype, head_dim: int) -> attention.AttentionBackend:
    try:
        return attention.select_backend(torch.device(DEVICE), dtype, head_dim, 16, name)
    except ValueError as error:
        pytest.skip(str(error))


def paged_case(
    shape: tuple[int, int, int, int], lengths: list[int], queries: list[int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, attention.AttentionMetadata]:
    """Queries and caches whose unused tokens are NaN, so that reading one shows."""
    num_heads, num_kv_heads, head_dim, block_size = shape
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 1
    order = (torch.randperm(num_blocks - 1) + 1).tolist()
    tables = torch.zeros(len(lengths), max(counts) + 3, dtype=torch.int32)
    caches = [
        torch.full((num_blocks, block_size, num_kv_heads, head_dim), float("nan")) for _ in "kv"
    ]
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks, order = order[:count], order[count:]
        tables[row, :count] = torch.tensor(blocks)
        for cache in caches:
            flat = torch.full((count * block_size, num_kv_heads, head_dim), float("nan"))
            flat[:length] = torch.randn(length, num_kv_heads, head_dim)
            cache[blocks] = flat.view(count, block_size, num_kv_heads, head_dim)
    meta = attention.AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32).to(
            DEVICE
        ),
        seq_lens=torch.tensor(lengths, dtype=torch.int32).to(DEVICE),
        block_tables=tables.to(DEVICE),
        max_query_len=max(queries),
        max_seq_len=tables.shape[1] * block_size,
    )
    q = random(sum(queries), num_heads, head_dim, dtype=dtype)
    key_cache, value_cache = (cache.to(DEVICE, dtype) for cache in caches)
    return q, key_cache, value_cache, meta


def expected_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    meta: attention.AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    tables = (meta.cu_seqlens_q, meta.seq_lens, meta.block_tables)
    return reference.paged_attention(q, key_cache, value_cache, *tables, scale)


@pytest.mark.parametrize("lengths", BATCHES, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BACKENDS)
def test_decode_attends_to_every_key_and_to_no_other(
    name: str, dtype: torch.dtype, shape: tuple[int, int, int, int], lengths: list[int]
) -> None:
    backend = make_backend(name, dtype, shape[2])
    q, keys, values, meta = paged_case(shape, lengths, [1] * len(lengths), dtype)
    expected = expected_attention(q, keys, values, meta, shape[2] ** -0.5)
    out = backend.decode(q, keys, values, meta, shape[2] ** -0.5)
    assert_close(out, expected, max(TOLERANCE[dtype], 3e-6))
    backend.plan_decode(meta, *shape, dtype)
    for _ in range(2):  # the second layer finds the counters as the first left them
        out = backend.decode(q, keys, values, meta, shape[2] ** -0.5)
        assert_close(out, expected, max(TOLERANCE[dtype], 3e-6))


CHUNKS = [[(1, 1), (9, 40), (7, 7)]] if INTERPRETED else [
    [(1, 1)], [(300, 300)], [(1, 900), (17, 17), (128, 700), (1, 1), (64, 65)], [(1, 33)] * 70
]  # fmt: skip


@pytest.mark.parametrize("chunks", CHUNKS, ids=lambda chunks: f"{len(chunks)}x{max(chunks)}")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BACKENDS)
def test_prefill_is_causal_from_the_bottom_right(
    name: str, dtype: torch.dtype, shape: tuple[int, int, int, int], chunks: list[tuple[int, int]]
) -> None:
    backend = make_backend(name, dtype, shape[2])
    queries, lengths = [q for q, _ in chunks], [length for _, length in chunks]
    q, keys, values, meta = paged_case(shape, lengths, queries, dtype)
    out = backend.prefill(q, keys, values, meta, shape[2] ** -0.5)
    expected = expected_attention(q, keys, values, meta, shape[2] ** -0.5)
    assert_close(out, expected, max(TOLERANCE[dtype], 3e-6))


@on_gpu_only
@pytest.mark.parametrize("name", BACKENDS)
def test_a_decode_graph_captured_at_length_1_is_right_at_any_length(name: str) -> None:
    shape = (32, 8, 128, 16)
    backend = make_backend(name, torch.bfloat16, 128)
    lengths = [4000, 1, 77, 1024, 3, 2048, 16, 900]
    q, keys, values, meta = paged_case(shape, lengths, [1] * 8, torch.bfloat16)
    expected = expected_attention(q, keys, values, meta, 0.1)
    real = meta.seq_lens.clone()
    meta.seq_lens.fill_(1)

    def step() -> list[torch.Tensor]:
        backend.plan_decode(meta, *shape, torch.bfloat16)
        return [backend.decode(q, keys, values, meta, 0.1) for _ in range(3)]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers = step()
    for _ in range(3):
        meta.seq_lens.copy_(real)
        graph.replay()
        for out in layers:
            assert_close(out, expected, TOLERANCE[torch.bfloat16])
            out.fill_(float("nan"))
        meta.seq_lens.fill_(1)
        graph.replay()
