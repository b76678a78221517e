"""Triton kernel of rope.py: a program takes one token and a few of its heads."""

import torch
import triton
import triton.language as tl

from nvserve.kernels.launch import inputs_ready, jit, launch_options, start_next


@jit
def _qk_norm_rope_cache_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slots_ptr,
    out_ptr,
    qkv_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    HEADS: tl.constexpr,  # heads of one program
    HALF: tl.constexpr,  # power of two that holds HEAD_DIM // 2
    PDL: tl.constexpr,
):
    half_dim: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pairs = tl.arange(0, HALF)
    is_q = heads < NUM_HEADS
    is_k = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    is_v = (heads >= NUM_HEADS + NUM_KV_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
    in_pair = pairs < half_dim
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_pair[None, :]
    start_next(PDL)
    inputs_ready(PDL)

    at = qkv_ptr + token * qkv_stride + heads[:, None] * HEAD_DIM + pairs[None, :]
    raw_first = tl.load(at, mask=inside, other=0.0)
    raw_second = tl.load(at + half_dim, mask=inside, other=0.0)
    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * HEAD_DIM + pairs, mask=in_pair, other=0.0)[None, :]
    sin_at = cos_sin_ptr + position * HEAD_DIM + half_dim + pairs
    sin = tl.load(sin_at, mask=in_pair, other=0.0)[None, :]

    if Q_NORM or K_NORM:
        squares = tl.sum(first * first + second * second, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        if Q_NORM:
            low = tl.load(q_weight_ptr + pairs, mask=in_pair, other=0.0).to(tl.float32)
            high = tl.load(q_weight_ptr + half_dim + pairs, mask=in_pair, other=0.0)
            first = tl.where(is_q[:, None], first * scale * low[None, :], first)
            second = tl.where(is_q[:, None], second * scale * high.to(tl.float32)[None, :], second)
        if K_NORM:
            low = tl.load(k_weight_ptr + pairs, mask=in_pair, other=0.0).to(tl.float32)
            high = tl.load(k_weight_ptr + half_dim + pairs, mask=in_pair, other=0.0)
            first = tl.where(is_k[:, None], first * scale * low[None, :], first)
            second = tl.where(is_k[:, None], second * scale * high.to(tl.float32)[None, :], second)

    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin
    q_at = out_ptr + (token * NUM_HEADS + heads[:, None]) * HEAD_DIM + pairs[None, :]
    q_mask = inside & is_q[:, None]
    tl.store(q_at, rotated_first.to(out_ptr.dtype.element_ty), mask=q_mask)
    tl.store(q_at + half_dim, rotated_second.to(out_ptr.dtype.element_ty), mask=q_mask)

    slot = tl.load(slots_ptr + token).to(tl.int64)
    kv_row = slot * NUM_KV_HEADS * HEAD_DIM
    k_at = key_cache_ptr + kv_row + (heads - NUM_HEADS)[:, None] * HEAD_DIM + pairs[None, :]
    k_mask = inside & is_k[:, None]
    tl.store(k_at, rotated_first.to(key_cache_ptr.dtype.element_ty), mask=k_mask)
    tl.store(k_at + half_dim, rotated_second.to(key_cache_ptr.dtype.element_ty), mask=k_mask)
    v_heads = (heads - NUM_HEADS - NUM_KV_HEADS)[:, None]
    v_at = value_cache_ptr + kv_row + v_heads * HEAD_DIM + pairs[None, :]
    v_mask = inside & is_v[:, None]
    tl.store(v_at, raw_first.to(value_cache_ptr.dtype.element_ty), mask=v_mask)
    tl.store(v_at + half_dim, raw_second.to(value_cache_ptr.dtype.element_ty), mask=v_mask)


def qk_norm_rope_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """See rope.qk_norm_rope_cache."""
    num_tokens, head_dim = qkv.shape[0], key_cache.shape[-1]
    assert qkv.stride(1) == 1
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    assert cos_sin.is_contiguous()
    assert cos_sin.shape[1] == head_dim
    out = qkv.new_empty(num_tokens, num_heads, head_dim)
    if num_tokens == 0:
        return out
    # Few tokens: many small programs, for latency; many: fewer, larger ones.
    heads = 4 if num_tokens <= 64 else 16
    _qk_norm_rope_cache_kernel[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, heads))](
        qkv,
        positions,
        cos_sin,
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        key_cache,
        value_cache,
        slot_mapping,
        out,
        qkv.stride(0),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        Q_NORM=q_weight is not None,
        K_NORM=k_weight is not None,
        HEADS=heads,
        HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=heads // 4,
        **launch_options(qkv.device),
    )
    return out
