"""The layer references against independent formulas, and the dispatch without a GPU."""

import math
import subprocess
import sys
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nvserve.kernels import (
    activation,
    attention,
    attention_flash,
    attention_torch,
    matmul,
    norm,
    reference,
    room,
    rope,
)

CPU = torch.device("cpu")
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_rms_norm_is_torch_rms_norm() -> None:
    x, weight = torch.randn(3, 5, 64), torch.randn(64)
    assert torch.allclose(norm.rms_norm(x, weight, 1e-5), F.rms_norm(x, (64,), weight, 1e-5))


def test_rms_norm_of_bfloat16_rounds_once() -> None:
    x, weight = torch.randn(4, 256).bfloat16(), torch.randn(256).bfloat16()
    exact = F.rms_norm(x.double(), (256,), weight.double(), 1e-6)
    assert torch.equal(norm.rms_norm(x, weight, 1e-6), exact.float().bfloat16())


def test_add_rms_norm_updates_the_residual_in_place_and_normalizes_what_it_stored() -> None:
    x, residual = torch.randn(4, 64).bfloat16(), torch.randn(4, 64).bfloat16()
    weight, expected = torch.randn(64).bfloat16(), x + residual
    normed, total = norm.add_rms_norm(x, residual, weight, 1e-6)
    assert total is residual
    assert torch.equal(residual, expected)
    assert torch.equal(normed, norm.rms_norm(expected, weight, 1e-6))


def test_silu_and_mul_gates_the_second_half_with_the_first() -> None:
    gate_up = torch.randn(6, 40)
    expected = F.silu(gate_up[:, :20]) * gate_up[:, 20:]
    assert torch.allclose(activation.silu_and_mul(gate_up), expected)


def test_linear_silu_mul_is_its_parts_in_sequence() -> None:
    x, weight, bias = torch.randn(3, 32), torch.randn(20, 32), torch.randn(20)
    gate, up = F.linear(x, weight, bias).chunk(2, dim=1)
    assert torch.allclose(matmul.linear_silu_mul(x, weight, bias), F.silu(gate) * up, atol=1e-5)


def test_linear_add_adds_to_the_residual_in_place() -> None:
    x, weight, residual = torch.randn(3, 32), torch.randn(20, 32), torch.randn(3, 20)
    expected = residual + F.linear(x, weight)
    assert matmul.linear_add(x, weight, residual) is residual
    assert torch.allclose(residual, expected, atol=1e-5)


def test_embed_rms_norm_returns_rows_normalized_and_as_they_are() -> None:
    tokens, embedding, weight = torch.tensor([4, 0, 4]), torch.randn(5, 16), torch.randn(16)
    normed, rows = norm.embed_rms_norm(tokens, embedding, weight, 1e-6)
    assert torch.equal(rows, embedding[tokens])
    assert torch.equal(normed, norm.rms_norm(rows, weight, 1e-6))


def test_only_few_rows_of_bfloat16_leave_cublas() -> None:
    assert matmul.skinny_cut(1, 4096, 4096, torch.bfloat16) is not None
    assert matmul.skinny_cut(128, 4096, 4096, torch.bfloat16) is not None
    assert matmul.skinny_cut(129, 4096, 4096, torch.bfloat16) is None
    assert matmul.skinny_cut(33, 28672, 4096, torch.bfloat16) is None
    assert matmul.skinny_cut(1, 4096, 4096, torch.float32) is None
    assert matmul.skinny_cut(1, 4096, 4100, torch.bfloat16) is None


@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (6144, 4096), (4096, 14336)])
def test_33_to_111_tokens_of_an_8b_are_left_to_cublas(outputs: int, inputs: int) -> None:
    """A step is at best as fast with ours; before results had room it was up to 14 % slower."""
    for num_tokens in range(33, 112):
        assert matmul.skinny_cut(num_tokens, outputs, inputs, torch.bfloat16) is None


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 100, 128, 129, 500])
def test_memory_goes_on_behind_the_rows_of_a_result(num_tokens: int) -> None:
    like = torch.zeros(1, dtype=torch.bfloat16)
    rows = room.new_rows(like, num_tokens, 3, 8)
    assert (rows.shape, rows.dtype) == ((num_tokens, 3, 8), torch.bfloat16)
    assert rows.is_contiguous()
    if 1 < num_tokens <= 128:
        assert room.has_room(rows.flatten(1), room.tile_tokens(num_tokens))
    assert not room.has_room(torch.zeros(num_tokens, 8), num_tokens + 1)
    assert not room.has_room(torch.zeros(16, 8)[16 - 1 :], 2)


@pytest.mark.parametrize("num_tokens", [2, 16, 17, 32, 33, 64, 65, 128])
def test_the_tiles_of_every_cut_fit_into_shared_memory(num_tokens: int) -> None:
    """Stages of a tile of weights (two where gated) and one of x, 16 bits each."""
    padded = max(16, 1 << (num_tokens - 1).bit_length())
    widths = (1024, 2048, 3072, 4096, 5120, 6144, 8192, 14336, 28672, 151936)
    num_chosen = 0
    for outputs, inputs in product(widths, widths[:-2]):
        for choose, parts in ((matmul.skinny_cut, 1), (matmul.gated_cut, 2)):
            cut = choose(num_tokens, outputs, inputs, torch.bfloat16)
            if cut is not None:
                num_chosen += 1
                tile = 2 * cut.inputs * (parts * cut.outputs + padded)
                assert cut.stages * tile <= 220 << 10, (outputs, inputs, cut)
    assert num_chosen > 0


# -- rope ------------------------------------------------------------------------------------------
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 16, 4


def cos_sin_table(num_positions: int) -> torch.Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angles = torch.outer(torch.arange(num_positions).float(), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def write_tokens(
    qkv: torch.Tensor, positions: torch.Tensor, gain: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, the caches and the slots after one call on scattered slots."""
    caches = [torch.zeros(9, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM) for _ in "kv"]
    slots = torch.randperm(9 * BLOCK_SIZE)[: len(qkv)]
    heads = (NUM_HEADS, NUM_KV_HEADS)
    table = cos_sin_table(50)
    q = rope.qk_norm_rope_cache(
        qkv, positions, table, gain, gain, 1e-6, caches[0], caches[1], slots, *heads
    )
    return q, caches[0], caches[1], slots


def test_rope_multiplies_pairs_as_complex_numbers() -> None:
    qkv = torch.randn(5, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    positions = torch.tensor([0, 3, 49, 7, 7], dtype=torch.int32)
    q, keys, values, slots = write_tokens(qkv, positions)
    heads = qkv.view(5, -1, HEAD_DIM)
    pairs = torch.complex(heads[..., : HEAD_DIM // 2], heads[..., HEAD_DIM // 2 :])
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    turn = torch.polar(torch.ones(5, HEAD_DIM // 2), positions[:, None] * frequencies)
    turned = pairs * turn[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    assert torch.allclose(q, expected[:, :NUM_HEADS], atol=1e-5)
    flat_keys, flat_values = keys.flatten(0, 1), values.flatten(0, 1)
    assert torch.allclose(flat_keys[slots], expected[:, NUM_HEADS:-NUM_KV_HEADS], atol=1e-5)
    assert torch.equal(flat_values[slots], heads[:, -NUM_KV_HEADS:])


def test_rope_leaves_every_other_slot_alone() -> None:
    qkv = torch.randn(5, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    _, keys, values, slots = write_tokens(qkv, torch.arange(5))
    untouched = torch.ones(9 * BLOCK_SIZE, dtype=torch.bool)
    untouched[slots] = False
    assert not keys.flatten(0, 1)[untouched].any()
    assert not values.flatten(0, 1)[untouched].any()


def test_qk_norm_comes_before_the_rotation_and_skips_values() -> None:
    qkv = torch.randn(5, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    gain, positions = torch.rand(HEAD_DIM) + 0.5, torch.arange(5)
    heads = qkv.view(5, -1, HEAD_DIM).clone()
    normed = F.rms_norm(heads[:, :-NUM_KV_HEADS], (HEAD_DIM,), gain, 1e-6)
    heads[:, :-NUM_KV_HEADS] = normed
    torch.manual_seed(1)
    out = write_tokens(qkv, positions, gain)
    torch.manual_seed(1)
    expected = write_tokens(heads.flatten(1), positions)
    for ours, theirs in zip(out, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


# -- attention -------------------------------------------------------------------------------------
def paged(
    keys: list[torch.Tensor], block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches [.., K, D] whose blocks are shuffled (values = -keys), and the block tables."""
    counts = [-(-len(each) // block_size) for each in keys]
    order = (torch.randperm(sum(counts)) + 1).tolist()
    cache = torch.full((sum(counts) + 1, block_size, *keys[0].shape[1:]), float("nan"))
    tables = torch.zeros(len(keys), max(counts) + 2, dtype=torch.int32)
    for row, each in enumerate(keys):
        for index in range(counts[row]):
            block = order.pop()
            tables[row, index] = block
            part = each[index * block_size : (index + 1) * block_size]
            cache[block, : len(part)] = part
    return cache, -cache, tables


@pytest.mark.parametrize("is_normed", [False, True], ids=["plain", "normed"])
def test_fused_decode_is_its_parts_in_sequence(is_normed: bool) -> None:
    lengths = [9, 1, 4]
    keys = [torch.randn(length, NUM_KV_HEADS, HEAD_DIM) for length in lengths]
    key_cache, value_cache, tables = paged(keys, BLOCK_SIZE)
    slots = [int(tables[row, (n - 1) // 4]) * 4 + (n - 1) % 4 for row, n in enumerate(lengths)]
    qkv = torch.randn(3, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    gain, table = torch.rand(HEAD_DIM) + 0.5 if is_normed else None, cos_sin_table(50)
    apart, ends = (key_cache.clone(), value_cache.clone()), torch.tensor(lengths)
    q = rope.qk_norm_rope_cache(
        *(qkv, ends - 1, table, gain, gain, 1e-6),
        *apart,
        torch.tensor(slots),
        NUM_HEADS,
        NUM_KV_HEADS,
    )
    expected = reference.paged_attention(q, *apart, torch.arange(4), ends, tables, 0.3)
    out = reference.decode_fused(
        qkv, table, gain, gain, 1e-6, key_cache, value_cache, tables, ends, 0.3
    )
    assert torch.equal(out, expected)
    for ours, theirs in zip((key_cache, value_cache), apart, strict=True):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


def test_paged_attention_is_dense_attention_of_each_request() -> None:
    lengths, queries = [9, 1, 14, 6], [4, 1, 14, 2]
    keys = [torch.randn(length, 2, 8) for length in lengths]
    key_cache, value_cache, tables = paged(keys, 4)
    q = torch.randn(sum(queries), 6, 8)
    starts = torch.tensor([0, 4, 5, 19, 21], dtype=torch.int32)
    meta = attention.AttentionMetadata(
        starts, torch.tensor(lengths, dtype=torch.int32), tables, 14, tables.shape[1] * 4
    )
    backend = attention.select_backend(CPU, torch.float32, 8, 4)
    out = backend.prefill(q, key_cache, value_cache, meta, 0.3)
    for row, each in enumerate(keys):
        part = q[starts[row] : starts[row + 1]].transpose(0, 1)
        dense = each.repeat_interleave(3, dim=1).transpose(0, 1)
        visible = torch.ones(queries[row], lengths[row], dtype=torch.bool)
        visible = visible.tril(lengths[row] - queries[row])
        expected = F.scaled_dot_product_attention(part, dense, -dense, visible, scale=0.3)
        assert torch.allclose(
            out[starts[row] : starts[row + 1]], expected.transpose(0, 1), atol=1e-5
        )


def test_decode_is_prefill_of_one_query_each_and_empty_rows_are_zero() -> None:
    keys = [torch.randn(length, 1, 8) for length in (5, 1, 12)]
    key_cache, value_cache, tables = paged(keys, 4)
    lengths = torch.tensor([5, 0, 12], dtype=torch.int32)
    starts = torch.arange(4, dtype=torch.int32)
    meta = attention.AttentionMetadata(starts, lengths, tables, 1, 20)
    q = torch.randn(3, 2, 8)
    backend = attention.select_backend(CPU, torch.float32, 8, 4)
    backend.plan_decode(meta, 2, 1, 8, 4, torch.float32)
    out = backend.decode(q, key_cache, value_cache, meta, 0.5)
    off = (out - backend.prefill(q, key_cache, value_cache, meta, 0.5)).abs()
    assert off.max() <= 4 * EPS * torch.cat(keys).abs().max()
    assert not out[1].any()
    assert out[2].abs().sum() > 0


def decode_rows(
    keys: list[torch.Tensor], q: torch.Tensor, rows: list[int], *, is_planned: bool = True
) -> torch.Tensor:
    """Decode attention of some requests [H, D] each, as if there were no others."""
    key_cache, value_cache, tables = paged([keys[row] for row in rows], 4)
    lengths = torch.tensor([len(keys[row]) for row in rows], dtype=torch.int32)
    starts = torch.arange(len(rows) + 1, dtype=torch.int32)
    meta = attention.AttentionMetadata(starts, lengths, tables, 1, tables.shape[1] * 4)
    num_kv_heads, head_dim = keys[0].shape[1:]
    backend = attention.select_backend(CPU, torch.float32, head_dim, 4)
    if is_planned:
        backend.plan_decode(meta, q.shape[1], num_kv_heads, head_dim, 4, torch.float32)
    return backend.decode(q[rows], key_cache, value_cache, meta, 0.5)


TILE = attention_torch.TILE
LENGTHS = [1, 5, TILE - 1, TILE, TILE + 1, 3 * TILE + 7, 17, 9 * TILE]


def test_decode_of_long_and_short_requests_is_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = [torch.randn(length, 2, 8) for length in LENGTHS]
    q = torch.randn(len(LENGTHS), 6, 8)
    key_cache, value_cache, tables = paged(keys, 4)
    lengths, starts = torch.tensor(LENGTHS), torch.arange(len(LENGTHS) + 1)
    expected = reference.paged_attention(q, key_cache, value_cache, starts, lengths, tables, 0.5)
    rows = list(range(len(LENGTHS)))
    whole = decode_rows(keys, q, rows)
    assert (whole - expected).abs().max() <= 8 * EPS * torch.cat(keys).abs().max()
    monkeypatch.setattr(attention_torch, "SLAB_VALUES", 3 * 2 * TILE * 8)  # three tiles
    assert torch.equal(decode_rows(keys, q, rows, is_planned=False), whole)


# One thread multiplies as two do unless a matrix is alone, as it is with a single KV head.
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 8), (6, 1, 80)])
def test_what_a_request_decodes_does_not_depend_on_its_neighbours(
    num_heads: int, num_kv_heads: int, head_dim: int, num_threads: int
) -> None:
    keys = [torch.randn(length, num_kv_heads, head_dim) for length in LENGTHS]
    q = torch.randn(len(LENGTHS), num_heads, head_dim)
    short = [row for row, length in enumerate(LENGTHS) if length <= TILE]
    num_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        together = decode_rows(keys, q, list(range(len(LENGTHS))))
        assert torch.equal(decode_rows(keys, q, short), together[short]), "no long neighbours"
        for row, length in enumerate(LENGTHS):
            assert torch.equal(decode_rows(keys, q, [row])[0], together[row]), length
    finally:
        torch.set_num_threads(num_before)


def test_requests_without_tokens_decode_to_zeros_beside_others_and_alone() -> None:
    keys = [torch.randn(0, 1, 8), torch.randn(3, 1, 8), torch.randn(2 * TILE, 1, 8)]
    q = torch.randn(3, 2, 8)
    assert not decode_rows(keys, q, [0, 0]).any()
    for rows in ([0, 1], [1, 0, 2]):
        out = decode_rows(keys, q, rows)
        assert not out[rows.index(0)].any()
        assert torch.equal(out[rows.index(1)], decode_rows(keys, q, [1])[0])


def test_a_cpu_gets_torch_attention_and_a_reason_for_every_other() -> None:
    assert attention.select_backend(CPU, torch.float32, 64, 16).name == "torch"
    for name, reason in (("fa3", "CUDA"), ("fa2", "CUDA"), ("triton", ""), ("best", "there are")):
        with pytest.raises(ValueError, match=f"{name}.*{reason}"):
            attention.select_backend(CPU, torch.bfloat16, 64, 16, name)


def test_a_decode_step_is_fused_where_the_backend_can_and_rows_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fused(new: attention.NewTokens, *rest: object) -> torch.Tensor:
        return new.qkv

    class Able(attention_torch.TorchBackend):
        decode_fused = staticmethod(fused)  # type: ignore[assignment]

    rows = attention.FUSED_ROWS
    assert attention.fused_decode(Able(), rows) is fused
    assert attention.fused_decode(Able(), rows + 1) is None
    assert attention.fused_decode(attention_torch.TorchBackend(), 1) is None
    monkeypatch.setattr(attention, "FUSED_ROWS", 0)
    assert attention.fused_decode(Able(), 1) is None


def test_flash_attention_3_is_told_the_lengths_the_pages_and_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[dict[str, Any]] = []

    def attend(q: torch.Tensor, *caches: torch.Tensor, **arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return q + 1

    library = SimpleNamespace(
        flash_attn_with_kvcache=attend,
        get_scheduler_metadata=lambda *sizes, **options: torch.tensor(sizes[2]),
    )
    monkeypatch.setitem(sys.modules, "flash_attn_interface", library)
    backend = attention_flash.Flash3Backend()
    cache, tables = torch.zeros(2, 16, 1, 8), torch.zeros(3, 5, dtype=torch.int32)
    lengths, starts = torch.ones(3, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    meta = attention.AttentionMetadata(starts, lengths, tables, 1, 80)
    backend.plan_decode(meta, 2, 1, 8, 16, torch.bfloat16)
    q = torch.zeros(3, 2, 8)
    for call in (backend.decode, backend.prefill):
        out = torch.zeros_like(q)
        assert torch.equal(call(q, cache, cache, meta, 0.5), q + 1)
        assert call(q, cache, cache, meta, 0.5, out) is out
        assert torch.equal(out, q + 1)
    assert calls[0]["scheduler_metadata"] == 80
    assert calls[2]["cu_seqlens_q"] is starts
    for arguments in calls:
        assert arguments["cache_seqlens"] is lengths
        assert arguments["page_table"] is tables
        assert arguments["causal"]


def test_flash_attention_2_gets_key_lengths_as_sums_and_results_where_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = torch.tensor([3, 1, 5], dtype=torch.int32)
    sums: list[torch.Tensor] = []

    def prefill(q: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        sums.append(arguments[3])
        return q + 1

    library = SimpleNamespace(
        flash_attn_varlen_func=prefill,
        flash_attn_with_kvcache=lambda q, *arguments, **named: q + 2,
    )
    monkeypatch.setitem(sys.modules, "flash_attn", library)
    backend = attention_flash.Flash2Backend()
    cache, tables = torch.zeros(2, 256, 1, 8), torch.zeros(3, 1, dtype=torch.int32)
    meta = attention.AttentionMetadata(torch.arange(4), lengths, tables, 1, 256)
    q = torch.zeros(3, 2, 8)
    for call, result in ((backend.prefill, q + 1), (backend.decode, q + 2)):
        out = torch.zeros_like(q)
        assert torch.equal(call(q, cache, cache, meta, 0.5), result)
        assert call(q, cache, cache, meta, 0.5, out) is out
        assert torch.equal(out, result)
    assert all(found.tolist() == [0, 3, 4, 9] for found in sums)
    assert len(sums) == 2


def test_flash_attention_refusals_name_what_is_wrong() -> None:
    gpu = torch.device("cuda")
    with pytest.raises(ValueError, match="multiple of 256, not 16"):
        attention.select_backend(gpu, torch.bfloat16, 64, 16, "fa2")
    with pytest.raises(ValueError, match=r"16-bit values, not torch\.float32"):
        attention.select_backend(gpu, torch.float32, 64, 256, "fa2")


def test_kernels_import_without_triton() -> None:
    modules = "activation attention dispatch matmul norm reference reference_sampling rope sampling"
    code = (
        "import sys, importlib; sys.modules['triton'] = None\n"
        f"for name in '{modules}'.split(): importlib.import_module('nvserve.kernels.' + name)\n"
        "import torch; from nvserve.kernels import norm\n"
        "norm.rms_norm(torch.ones(1, 4), torch.ones(4), 0.0)"
    )
    paths = [path for path in sys.path if path]
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{code}"],
        check=True,
        timeout=120,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""},
    )


def test_reference_linear_accumulates_in_float32() -> None:
    x, weight = torch.full((1, 4096), 0.1).bfloat16(), torch.ones(2, 4096).bfloat16()
    bias = torch.tensor([0.0, 1.0]).bfloat16()
    exact = x.double().sum().item()
    out = reference.linear(x, weight, bias)
    assert math.isclose(out[0, 0].item(), exact, rel_tol=4e-3)
    assert out.dtype == torch.bfloat16
