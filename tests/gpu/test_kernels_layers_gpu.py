"""Norms, the gated activation and rotary embedding against their torch twins."""

import itertools

import pytest
import torch
from gpu.kernel_cases import DEVICE, DTYPES, MARKS, TOLERANCE, assert_close, random

from nvserve.kernels import activation, norm, reference, rope
from nvserve.kernels.dispatch import INTERPRETED

pytestmark = MARKS

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


def test_silu_and_mul_in_wide_blocks_matches_the_reference() -> None:
    gate_up = 3 * random(65, 4096)
    assert_close(activation.silu_and_mul(gate_up), reference.silu_and_mul(gate_up), 2e-6)


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed_rms_norm_matches_the_reference(dtype: torch.dtype) -> None:
    embedding, weight = random(11, 200, dtype=dtype), random(200, dtype=dtype)
    tokens = torch.tensor([10, 0, 3, 3]).to(DEVICE)
    out, rows = norm.embed_rms_norm(tokens, embedding, weight, 1e-6)
    expected, expected_rows = reference.embed_rms_norm(tokens, embedding, weight, 1e-6)
    assert torch.equal(rows, expected_rows)
    assert_close(out, expected, TOLERANCE[dtype])
