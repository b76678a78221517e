"""Paged attention against its torch twin: decode, prefill, and decode in a graph."""

import itertools

import pytest
import torch
from gpu.kernel_cases import DEVICE, DTYPES, MARKS, TOLERANCE, assert_close, on_gpu_only, random

from nvserve.kernels import attention, reference, rope
from nvserve.kernels.dispatch import INTERPRETED

pytestmark = MARKS

BACKENDS = ["triton"] if INTERPRETED else ["triton", "fa3", "fa3+triton"]
# Heads, KV heads, head size, tokens of a block: also such as tiles are no multiple of.
SHAPES = [(4, 2, 24, 4), (2, 1, 16, 12)] if INTERPRETED else [
    (32, 8, 128, 16), (16, 8, 128, 16), (14, 2, 64, 32), (8, 8, 96, 16), (32, 1, 128, 1),
    (8, 2, 256, 64), (8, 2, 64, 24), (8, 2, 128, 200),
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


def framed(q: torch.Tensor) -> torch.Tensor:
    """Room for a result like q, between a row before and one behind."""
    return torch.full_like(torch.cat((q[:1], q, q[:1])), 7.0)


def unframed(wide: torch.Tensor) -> torch.Tensor:
    """The result, once the rows beside it were found as they had been."""
    assert (wide[[0, -1]] == 7.0).all()
    return wide[1:-1]


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
        wide = framed(q)
        backend.decode(q, keys, values, meta, shape[2] ** -0.5, wide[1:-1])
        assert_close(unframed(wide), expected, max(TOLERANCE[dtype], 3e-6))


FUSED_SHAPES = [(4, 4, 80, 16), (8, 2, 64, 4), (10, 2, 128, 4)] if INTERPRETED else [
    *SHAPES, (24, 1, 80, 4),
]  # fmt: skip
# Tiles are of 32 tokens in float32; of 128, 64 or 32 in 16 bits.
FUSED_BATCHES = [[1, 33, 2, 32, 1, 100, 31]] if INTERPRETED else [
    [1], [512], [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130, 2000, 1, 700, 257], [129] * 60
]  # fmt: skip


def new_tokens(
    shape: tuple[int, int, int, int],
    num_rows: int,
    num_positions: int,
    dtype: torch.dtype,
    *,
    is_normed: bool,
) -> attention.NewTokens:
    num_heads, num_kv_heads, head_dim, _ = shape
    angles = torch.rand(num_positions, head_dim // 2) * 6
    q_gain, k_gain = (random(head_dim, dtype=dtype) if is_normed else None for _ in "qk")
    qkv = random(num_rows, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE)
    return attention.NewTokens(qkv, cos_sin, q_gain, k_gain, 1e-6)


def expected_fused(
    new: attention.NewTokens,
    keys: torch.Tensor,
    values: torch.Tensor,
    meta: attention.AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    norms = (new.cos_sin, new.q_weight, new.k_weight, new.eps)
    tables = (meta.block_tables, meta.seq_lens)
    return reference.decode_fused(new.qkv, *norms, keys, values, *tables, scale)


def one_after_the_other(
    backend: attention.AttentionBackend,
    new: attention.NewTokens,
    keys: torch.Tensor,
    values: torch.Tensor,
    meta: attention.AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """The rope kernel, then decode."""
    block_size, num_kv_heads, head_dim = keys.shape[1:]
    positions = meta.seq_lens.long() - 1
    blocks = meta.block_tables.gather(1, positions[:, None] // block_size)[:, 0].long()
    slots = blocks * block_size + positions % block_size
    heads = (new.qkv.shape[1] // head_dim - 2 * num_kv_heads, num_kv_heads)
    norms = (new.cos_sin, new.q_weight, new.k_weight, new.eps)
    q = rope.qk_norm_rope_cache(new.qkv, positions, *norms, keys, values, slots, *heads)
    return backend.decode(q, keys, values, meta, scale)


@pytest.mark.parametrize(
    "lengths", FUSED_BATCHES, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}"
)
@pytest.mark.parametrize("is_normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("shape", FUSED_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_decode_writes_and_attends_as_the_kernels_apart(
    dtype: torch.dtype, shape: tuple[int, int, int, int], is_normed: bool, lengths: list[int]
) -> None:
    backend = make_backend("triton", dtype, shape[2])
    assert backend.decode_fused is not None
    _, keys, values, meta = paged_case(shape, lengths, [1] * len(lengths), dtype)
    new = new_tokens(shape, len(lengths), max(lengths), dtype, is_normed=is_normed)
    apart_keys, apart_values = keys.clone(), values.clone()
    arguments = (meta, shape[2] ** -0.5)
    apart = one_after_the_other(backend, new, apart_keys, apart_values, *arguments)
    expected = expected_fused(new, keys.clone(), values.clone(), *arguments)
    backend.plan_decode(meta, *shape, dtype)
    before = (keys.clone(), values.clone())
    for _ in range(2):  # the second layer finds the counters as the first left them
        keys.copy_(before[0])
        values.copy_(before[1])
        out = backend.decode_fused(new, keys, values, *arguments)
        assert_close(out, expected, max(TOLERANCE[dtype], 3e-6))
        assert_close(out, apart, max(TOLERANCE[dtype], 3e-6))
        assert torch.equal(values.nan_to_num(7.0), apart_values.nan_to_num(7.0))
        assert_same_keys(keys, apart_keys, before[0])


def assert_same_keys(keys: torch.Tensor, apart: torch.Tensor, before: torch.Tensor) -> None:
    """Bit by bit where nothing was written; a GPU may add up and fuse products in another order."""
    was_written = (apart.nan_to_num(7.0) != before.nan_to_num(7.0)).any(-1)
    assert torch.equal(keys[~was_written].nan_to_num(7.0), apart[~was_written].nan_to_num(7.0))
    if INTERPRETED:
        assert torch.equal(keys[was_written], apart[was_written])
    assert_close(keys[was_written], apart[was_written], TOLERANCE[keys.dtype])


# Head size and rows of the steps that 16 bits cut in different ways.
CUT_BY = [(128, 1), (128, 9), (128, 49), (256, 1)]


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the tests above reach every cut")
@pytest.mark.parametrize("num_sms", [1, 7])
@pytest.mark.parametrize(("head_dim", "num_rows"), CUT_BY)
def test_every_cut_is_right_with_more_programs_than_tiles_and_with_fewer(
    head_dim: int, num_rows: int, num_sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They need triton, without which nothing is interpreted.
    from nvserve.kernels import attention_decode
    from nvserve.kernels.attention_plan import decode_shape, plan_decode

    monkeypatch.setattr(attention_decode, "num_sms", lambda device: num_sms)
    cut = decode_shape(torch.bfloat16, head_dim, num_rows)
    shape, scale = (6, 2, 32, 12), 0.2
    lengths = [cut.tile - 1, 1, cut.tile, cut.tile + 1, 2, 2 * cut.tile, 3 * cut.tile + 5]
    q, keys, values, meta = paged_case(shape, lengths, [1] * len(lengths), torch.float32)
    new = new_tokens(shape, len(lengths), max(lengths), torch.float32, is_normed=True)
    tables, lens = meta.block_tables, meta.seq_lens
    plan = plan_decode(lens, tables, shape[3], shape[1], cut)
    out = attention_decode.decode(q, keys, values, plan, scale, cut)
    assert_close(out, expected_attention(q, keys, values, meta, scale), 3e-6)
    expected = expected_fused(new, keys.clone(), values.clone(), meta, scale)
    out = attention_decode.decode_fused(new, keys, values, tables, plan, scale, cut)
    assert_close(out, expected, 3e-6)
    lens[[1, 3, 6]] = 0  # a row without keys, at the end too
    plan = plan_decode(lens, tables, shape[3], shape[1], cut)
    out = attention_decode.decode(q, keys, values, plan, scale, cut)
    assert_close(out, expected_attention(q, keys, values, meta, scale), 3e-6)
    assert not out[[1, 3, 6]].any()


def test_fused_decode_of_padded_rows_writes_to_scratch_only() -> None:
    shape, lengths = (4, 2, 64, 16), [1, 40, 1, 1]
    backend = make_backend("triton", torch.float32, 64)
    assert backend.decode_fused is not None
    _, keys, values, meta = paged_case(shape, lengths, [1] * 4, torch.float32)
    meta.block_tables[[0, 2, 3]] = 0
    new = new_tokens(shape, 4, 40, torch.float32, is_normed=True)
    before = keys.clone()
    slot = int(meta.block_tables[1, 2]) * 16 + 39 % 16
    before[0, 0] = before.flatten(0, 1)[slot] = 0.0
    out = backend.decode_fused(new, keys, values, meta, 0.125)
    assert not out.isnan().any()
    assert not keys[0, 0].isnan().any()
    keys[0, 0] = keys.flatten(0, 1)[slot] = 0.0
    assert torch.equal(keys.nan_to_num(7.0), before.nan_to_num(7.0))
    expected = expected_fused(new, keys, values, meta, 0.125)
    # The padded rows all wrote to one place, but each attends to what is its own.
    assert_close(out[1], expected[1], 3e-6)
    own = new.qkv.view(4, 8, 64)[:, 6:].repeat_interleave(2, dim=1)
    assert_close(out[[0, 2, 3]], own[[0, 2, 3]], 3e-6)


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
    wide = framed(q)
    backend.prefill(q, keys, values, meta, shape[2] ** -0.5, wide[1:-1])
    assert torch.equal(unframed(wide), out)


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


@on_gpu_only
@pytest.mark.parametrize("is_normed", [False, True], ids=["plain", "normed"])
def test_a_fused_graph_captured_at_length_1_is_right_at_any_length(is_normed: bool) -> None:
    shape, dtype = (32, 8, 128, 16), torch.bfloat16
    backend = make_backend("triton", dtype, 128)
    fused = backend.decode_fused
    assert fused is not None
    lengths = [4000, 1, 77, 1025, 3, 2048, 129, 900]
    _, keys, values, meta = paged_case(shape, lengths, [1] * 8, dtype)
    new = new_tokens(shape, 8, 4000, dtype, is_normed=is_normed)
    apart = (keys.clone(), values.clone())
    expected = one_after_the_other(backend, new, *apart, meta, 0.1)
    before = (keys.clone(), values.clone())
    real, tables = meta.seq_lens.clone(), meta.block_tables.clone()

    def step() -> list[torch.Tensor]:
        backend.plan_decode(meta, *shape, dtype)
        return [fused(new, keys, values, meta, 0.1) for _ in range(3)]

    def pad() -> None:
        meta.seq_lens.fill_(1)
        meta.block_tables.zero_()

    pad()
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers = step()
    for _ in range(3):
        meta.seq_lens.copy_(real)
        meta.block_tables.copy_(tables)
        keys.copy_(before[0])
        values.copy_(before[1])
        graph.replay()
        for out in layers:
            assert_close(out, expected, TOLERANCE[dtype])
            out.fill_(float("nan"))
        assert torch.equal(values.nan_to_num(7.0), apart[1].nan_to_num(7.0))
        assert_same_keys(keys, apart[0], before[0])
        pad()
        graph.replay()
