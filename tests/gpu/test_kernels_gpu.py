"""Every Triton kernel against its torch twin: a shape grid on a GPU, a few shapes interpreted.

With TRITON_INTERPRET=1 the same tests run on the CPU (tests/test_kernels_interpreted.py starts
that process); dependent launch and CUDA graphs need the GPU.
"""

import itertools
from typing import NamedTuple

import pytest
import torch

from nvserve.kernels import (
    activation,
    attention,
    decode_step,
    matmul,
    norm,
    reference,
    reference_sampling,
    reference_step,
    rope,
    sampling,
)
from nvserve.kernels.dispatch import HAS_TRITON, INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"
    ),
]
on_gpu_only = pytest.mark.skipif(INTERPRETED, reason="the interpreter cannot run it")

DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}

if INTERPRETED:
    import triton_interpreter  # where there is no triton there is nothing to interpret

    triton_interpreter.mend()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(device=DEVICE, dtype=dtype)


def assert_close(out: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    error = (out.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    assert error.item() <= tolerance, f"relative error {error.item():.2e} over {tolerance:.0e}"


# -- norm, activation ------------------------------------------------------------------------------
WIDTHS = [96] if INTERPRETED else [64, 96, 1024, 4096, 8192]
TOKENS = [3] if INTERPRETED else [1, 7, 256]


@pytest.mark.parametrize(("num_tokens", "width"), [*itertools.product(TOKENS, WIDTHS)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_match_the_reference(num_tokens: int, width: int, dtype: torch.dtype) -> None:
    x, weight = random(num_tokens, width, dtype=dtype), random(width, dtype=dtype)
    out = norm.rms_norm(x, weight, 1e-6)
    assert_close(out, reference.rms_norm(x, weight, 1e-6), TOLERANCE[dtype])

    residual = random(num_tokens, width, dtype=dtype)
    expected, expected_sum = reference.add_rms_norm(x, residual.clone(), weight, 1e-6)
    out, total = norm.add_rms_norm(x, residual, weight, 1e-6)
    assert total.data_ptr() == residual.data_ptr()
    assert torch.equal(total, expected_sum)
    assert_close(out, expected, TOLERANCE[dtype])


@pytest.mark.parametrize(("num_tokens", "width"), [*itertools.product(TOKENS, WIDTHS)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_matches_the_reference(
    num_tokens: int, width: int, dtype: torch.dtype
) -> None:
    gate_up = 3 * random(num_tokens, 2 * width, dtype=dtype)
    out = activation.silu_and_mul(gate_up)
    assert_close(out, reference.silu_and_mul(gate_up), TOLERANCE[dtype])


# -- rope ------------------------------------------------------------------------------------------
HEADS = [(4, 2, 24)] if INTERPRETED else [(32, 8, 128), (16, 8, 128), (14, 2, 64), (6, 3, 96)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("norms", [(True, True), (False, False)])
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_writes_what_the_reference_writes(
    heads: tuple[int, int, int], norms: tuple[bool, bool], num_tokens: int, dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    num_blocks, block_size = 40, 16
    qkv = random(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    angles = torch.rand(100, head_dim // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE)
    positions = torch.randint(0, 100, (num_tokens,)).to(DEVICE)
    slots = torch.randperm(num_blocks * block_size)[:num_tokens].to(DEVICE, torch.int32)
    q_gain, k_gain = (random(head_dim, dtype=dtype) if wanted else None for wanted in norms)
    keys, values = (
        random(num_blocks, block_size, num_kv_heads, head_dim, dtype=dtype) for _ in "kv"
    )
    expected_keys, expected_values = keys.clone(), values.clone()
    head = (qkv, positions, cos_sin, q_gain, k_gain, 1e-6)
    shape = (slots, num_heads, num_kv_heads)
    out = rope.qk_norm_rope_cache(*head, keys, values, *shape)
    expected = reference.qk_norm_rope_cache(*head, expected_keys, expected_values, *shape)
    assert_close(out, expected, TOLERANCE[dtype])
    assert_close(keys, expected_keys, TOLERANCE[dtype])
    assert torch.equal(values, expected_values)


# -- attention -------------------------------------------------------------------------------------
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


# -- sampling --------------------------------------------------------------------------------------
VOCABULARIES = [500] if INTERPRETED else [500, 32_003, 151_936]


class Rows(NamedTuple):
    """The arguments of sample() after the logits."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


def rows(num_rows: int) -> Rows:
    """One of each kind of row, repeated: greedy, plain, top-k, top-p, min-p and all of them."""
    kinds = torch.tensor(
        [
            # temperature, top_k, top_p, min_p
            [0.0, 5, 0.5, 0.1],
            [1.0, 0, 1.0, 0.0],
            [0.7, 20, 1.0, 0.0],
            [1.3, 0, 0.9, 0.0],
            [1.0, 0, 1.0, 0.05],
            [0.6, 20, 0.95, 0.02],
            [2.0, 1, 1.0, 0.0],
            [1.0, 0, 0.0, 0.0],
            [1.0, 300, 0.5, 0.0],
            [1.0, 3000, 0.999, 0.0],
        ]
    )
    kinds = kinds[torch.arange(num_rows) % len(kinds)].to(DEVICE)
    return Rows(
        kinds[:, 0].contiguous(),
        kinds[:, 1].to(torch.int32),
        kinds[:, 2].contiguous(),
        kinds[:, 3].contiguous(),
        torch.randint(-(2**63), 2**63 - 1, (num_rows,)).to(DEVICE),
        torch.randint(0, 2**33, (num_rows,)).to(DEVICE),
    )


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_random_bits_equal_the_reference_bits() -> None:
    import triton
    import triton.language as tl

    from nvserve.kernels import noise

    def store_bits(out_ptr, seed_ptr, position_ptr, first_group):  # type: ignore[no-untyped-def]
        groups = first_group + tl.arange(0, 16)
        bits = noise.token_bits(tl.load(seed_ptr), tl.load(position_ptr), groups)
        tl.store(out_ptr + tl.arange(0, 64), bits.to(tl.int64))

    store_bits.__globals__.update(tl=tl, noise=noise)
    kernel = triton.jit(store_bits)
    for seed, position, group in ((0, 0, 0), (-1, 2**33 + 7, 37_983), (2**62 + 9, 2**31, 5)):
        key, place = torch.tensor([seed]).to(DEVICE), torch.tensor([position]).to(DEVICE)
        out = torch.zeros(64, dtype=torch.int64, device=DEVICE)
        kernel[(1,)](out, key, place, group)
        assert torch.equal(out, reference_sampling.token_bits(key, place, 64, 4 * group)[0])


@pytest.mark.parametrize("first_token_id", [0, 4096, 37])
@pytest.mark.parametrize("num_tokens", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gumbel_argmax_picks_the_reference_token(
    num_tokens: int, first_token_id: int, dtype: torch.dtype
) -> None:
    logits = 3 * random(12, num_tokens, dtype=dtype)
    row = rows(12)
    arguments = (row.temperature, row.seeds, row.positions)
    values, ids = sampling.gumbel_argmax(logits, *arguments, first_token_id)
    expected = reference_sampling.perturb(logits, *arguments, first_token_id)
    best, best_ids = reference_sampling.gumbel_argmax(logits, *arguments, first_token_id)
    assert torch.allclose(values, best, atol=2e-4, rtol=1e-5)
    # Logarithms differ in their last bits, so near ties may fall the other way.
    got = expected.gather(1, ids[:, None] - first_token_id)[:, 0]
    assert torch.all((ids == best_ids) | (best - got < 2e-4))
    assert (ids == best_ids).float().mean() > 0.9


@pytest.mark.parametrize("num_tokens", VOCABULARIES)
@pytest.mark.parametrize("spread", [0.1, 4.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sample_picks_the_reference_token(
    num_tokens: int, spread: float, dtype: torch.dtype
) -> None:
    num_rows = 10 if INTERPRETED else 60
    logits = spread * random(num_rows, num_tokens, dtype=dtype)
    logits[:, ::7] = float("-inf")
    arguments = rows(num_rows)
    ids = sampling.sample(logits, *arguments)
    expected = reference_sampling.sample(logits, *arguments)
    # A nucleus' edge is a sum of rounded terms, so a rare row may differ; greedy rows never.
    assert (ids == expected).float().mean() >= 0.95
    assert torch.equal(ids[::10], expected[::10])


def test_sample_with_ties_takes_the_reference_token() -> None:
    logits = torch.randint(-3, 3, (40, 700)).float().to(DEVICE)[: 10 if INTERPRETED else 40]
    arguments = rows(len(logits))
    ids = sampling.sample(logits, *arguments)
    assert torch.equal(ids, reference_sampling.sample(logits, *arguments))
    nothing = torch.full((2, 64), float("-inf"), device=DEVICE)
    assert sampling.sample(nothing, *rows(2)).max() < 64


@pytest.mark.parametrize("num_tokens", [100] if INTERPRETED else [100, 32_003])
@pytest.mark.parametrize("dtype", DTYPES)
def test_penalties_masks_and_counts_match_the_reference(
    num_tokens: int, dtype: torch.dtype
) -> None:
    num_rows, num_slots = 5, 9
    slots = torch.tensor([3, 0, 8, 3, 1], dtype=torch.int32).to(DEVICE)
    counts = torch.randint(0, 3, (num_slots, num_tokens), dtype=torch.int32).to(DEVICE)
    prompt = (torch.rand(num_slots, num_tokens) < 0.3).to(DEVICE)
    frequency, presence = torch.rand(num_rows).to(DEVICE), torch.rand(num_rows).to(DEVICE)
    repetition = 0.5 + torch.rand(num_rows).to(DEVICE)
    frequency[1] = presence[1] = 0.0
    repetition[1] = 1.0
    logits = random(num_rows, num_tokens, dtype=dtype)
    penalties = (slots, counts, prompt, frequency, presence, repetition)
    expected = reference_sampling.apply_penalties(logits.clone(), *penalties)
    assert sampling.apply_penalties(logits, *penalties) is logits
    assert_close(logits, expected, TOLERANCE[dtype])

    words = torch.randint(-(2**31), 2**31, (num_rows, -(-num_tokens // 32)), dtype=torch.int32)
    expected = reference_sampling.apply_token_mask(expected, words.to(DEVICE))
    sampling.apply_token_mask(logits, words.to(DEVICE))
    assert torch.equal(logits.isinf(), expected.isinf())

    ids = torch.tensor([1, -1, 5, 1, num_tokens]).to(DEVICE)
    expected = counts.clone()
    reference_sampling.count_tokens(expected, slots, ids)
    sampling.count_tokens(counts, slots, ids)
    assert torch.equal(counts, expected)


# -- matmul ----------------------------------------------------------------------------------------
PROJECTIONS = [(6144, 4096), (4096, 14336), (1024, 3072), (96, 80), (1000, 2056)]


@on_gpu_only
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(("outputs", "inputs"), PROJECTIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_matches_the_reference(
    num_tokens: int, outputs: int, inputs: int, biased: bool
) -> None:
    x = random(num_tokens, inputs, dtype=torch.bfloat16)
    weight = random(outputs, inputs, dtype=torch.bfloat16)
    bias = 10 * random(outputs, dtype=torch.bfloat16) if biased else None
    assert_close(matmul.linear(x, weight, bias), reference.linear(x, weight, bias), 6e-3)


@on_gpu_only
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 16, 32, 33])
@pytest.mark.parametrize(("outputs", "inputs"), PROJECTIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_silu_mul_matches_its_parts(
    num_tokens: int, outputs: int, inputs: int, biased: bool
) -> None:
    x = random(num_tokens, inputs, dtype=torch.bfloat16)
    weight = 0.1 * random(2 * outputs, inputs, dtype=torch.bfloat16)
    bias = random(2 * outputs, dtype=torch.bfloat16) if biased else None
    out = matmul.linear_silu_mul(x, weight, bias)
    wide = reference.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert_close(out.float(), reference.silu_and_mul(wide), 1.2e-2)


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.parametrize("biased", [False, True])
def test_the_vector_kernel_matches_the_reference_at_ragged_edges(biased: bool) -> None:
    from nvserve.kernels import matmul_triton

    x, weight, gate_up = random(1, 200), random(37, 200), random(74, 200)
    bias = random(74) if biased else None
    cut = matmul.SkinnyCut(8, 64, 1, 4)
    short = None if bias is None else bias[:37]
    out = matmul_triton.linear(x, weight, short, cut)
    assert_close(out, reference.linear(x, weight, short), 2e-6)
    out = matmul_triton.linear_silu_mul(x, gate_up, bias, cut)
    assert_close(out, reference.silu_and_mul(reference.linear(x, gate_up, bias)), 2e-6)


# -- around the model ------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_embed_rms_norm_matches_the_reference(dtype: torch.dtype) -> None:
    embedding, weight = random(11, 200, dtype=dtype), random(200, dtype=dtype)
    tokens = torch.tensor([10, 0, 3, 3]).to(DEVICE)
    out, rows = norm.embed_rms_norm(tokens, embedding, weight, 1e-6)
    expected, expected_rows = reference.embed_rms_norm(tokens, embedding, weight, 1e-6)
    assert torch.equal(rows, expected_rows)
    assert_close(out, expected, TOLERANCE[dtype])


def test_gather_rows_matches_the_reference_and_writes_tables_as_far_as_they_are_read() -> None:
    num_slots, max_blocks = 9, 300
    last_token = torch.arange(100, 100 + num_slots).to(DEVICE)
    lengths = torch.tensor([0, 1, 15, 16, 17, 4799, 2064, 500, 0]).to(DEVICE)
    table = torch.randint(1, 99, (num_slots, max_blocks), dtype=torch.int32).to(DEVICE)
    rows = torch.tensor([5, 8, 0, 3, 2, 7, 8]).to(DEVICE)
    tables, expected_tables = torch.zeros_like(table), torch.zeros_like(table)
    got = decode_step.gather_rows(rows, last_token, lengths, table, tables, 16)
    expected = reference_step.gather_rows(rows, last_token, lengths, table, expected_tables, 16)
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours, theirs)
    for row, length in enumerate(got.seq_lens.tolist()):
        used = -(-length // 16)
        assert torch.equal(tables[row, :used], expected_tables[row, :used])
        assert not tables[row, used:].any()


@pytest.mark.parametrize("has_values", [False, True])
def test_advance_rows_matches_the_reference(has_values: bool) -> None:
    slots = torch.tensor([3, 0, 6, 5, 6]).to(DEVICE)  # the last one is scratch
    ids = torch.tensor([7, -1, 9, 11, 12]).to(DEVICE)
    lengths = torch.tensor([4, 5, 6, 7, 8]).to(DEVICE)
    values = torch.tensor([1.0, -3.0, 0.5, float("nan"), float("-inf")]).to(DEVICE)
    states = [torch.full((7,), 50).to(DEVICE) for _ in range(4)]
    chosen = values if has_values else None
    out = decode_step.advance_rows(slots, ids, chosen, lengths, states[0], states[1], 6)
    expected = reference_step.advance_rows(
        slots, ids, chosen, lengths, states[2], states[3], 6, decode_step.BAD_TOKEN
    )
    assert torch.equal(out, expected)
    assert out.dtype == torch.int32
    assert torch.equal(states[0][:6], states[2][:6])  # of the scratch slot either token may stay
    assert torch.equal(states[1], states[3])
    assert out.tolist() == [7, -1, 9, *((-1, -1) if has_values else (11, 12))]
