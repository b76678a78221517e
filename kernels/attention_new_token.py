"""How a fused decode program begins: queries and the new key are made of the QKV projection's rows.

All of it comes before the first key arrives, so it is few instructions: tiles have a row for each
query, not as many as a matrix instruction takes, and the one key has a copy beside each query, so
that neither the rotation nor the first score moves anything between warps.
"""

import triton.language as tl

from nvserve.kernels.launch import jit


@jit
def begin_fused(  # type: ignore[no-untyped-def]
    qkv_ptr,  # the request's row
    cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    scale,  # softmax scale times log2(e)
    key_ptr,
    value_ptr,
    table,
    position,  # of the new token
    is_new,  # whether this program is the one that takes care of it
    head,  # KV head
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,  # GROUP padded to a power of two, one for each warp at least
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
):
    """Queries, rounded to the cache's dtype, and the new token's scores and value, 0 unless is_new.

    [ROWS, DIM], [ROWS] float32, [DIM] float32; rows from GROUP on are of no use. Where is_new, the
    token's key and value go to the cache.
    """
    dtype: tl.constexpr = key_ptr.dtype.element_ty
    rows = tl.arange(0, QUERIES)
    dims = tl.arange(0, DIM)
    in_dim = dims < HEAD_DIM
    mask = (rows < GROUP)[:, None] & in_dim[None, :]
    new_mask = mask & is_new
    angles_ptr = cos_sin_ptr + position.to(tl.int64) * HEAD_DIM
    heads = (head * GROUP + rows)[:, None]
    k_heads = NUM_KV_HEADS * GROUP + head + 0 * rows[:, None]
    q_ptr = qkv_ptr + heads * HEAD_DIM
    k_ptr = qkv_ptr + k_heads * HEAD_DIM
    q = _rotated(q_ptr, mask, q_weight_ptr, eps, angles_ptr, HEAD_DIM, DIM, QUERIES, Q_NORM)
    key = _rotated(k_ptr, new_mask, k_weight_ptr, eps, angles_ptr, HEAD_DIM, DIM, QUERIES, K_NORM)
    # Rounded before they meet, as they are where the one is stored and the other is in the cache.
    q, key = q.to(dtype), key.to(dtype)
    v_ptr = qkv_ptr + (NUM_KV_HEADS * (GROUP + 1) + head) * HEAD_DIM
    value = tl.load(v_ptr + dims, mask=in_dim & is_new, other=0.0)
    scores = tl.sum(q.to(tl.float32) * key.to(tl.float32), axis=1) * scale

    block = tl.load(table + position // BLOCK_SIZE, mask=is_new, other=0).to(tl.int64)
    kv_row = (block * BLOCK_SIZE + position % BLOCK_SIZE) * NUM_KV_HEADS + head
    key_at = key_ptr + kv_row * HEAD_DIM + 0 * rows[:, None] + dims[None, :]
    tl.store(key_at, key, mask=new_mask & (rows == 0)[:, None])
    tl.store(value_ptr + kv_row * HEAD_DIM + dims, value, mask=in_dim & is_new)
    copies: tl.constexpr = ROWS // QUERIES
    q = tl.reshape(tl.broadcast_to(q[None, :, :], [copies, QUERIES, DIM]), [ROWS, DIM])
    scores = tl.reshape(tl.broadcast_to(scores[None, :], [copies, QUERIES]), [ROWS])
    return q, scores, value.to(tl.float32)


@jit
def _rotated(  # type: ignore[no-untyped-def]
    heads_ptr,  # [QUERIES, 1], where each head begins
    mask,  # [QUERIES, DIM], false from HEAD_DIM on
    weight_ptr,
    eps,
    angles_ptr,  # the position's row of cos_sin
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    NORM: tl.constexpr,
):
    """What qk_norm_rope_cache makes of these heads, before it rounds; [QUERIES, DIM] float32.

    Each value is loaded beside the one that it is rotated with, so that no threads exchange any.
    """
    half_dim: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, DIM)[None, :]
    is_first = dims < half_dim
    others = tl.where(is_first, dims + half_dim, dims - half_dim)
    # Every row loads them for itself: from a vector they would come by way of shared memory.
    copies = 0 * tl.arange(0, QUERIES)[:, None]
    pairs = tl.where(is_first, dims, dims - half_dim) + copies
    own = tl.load(heads_ptr + dims, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(heads_ptr + others, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(angles_ptr + pairs, mask=mask, other=0.0)
    sin = tl.load(angles_ptr + half_dim + pairs, mask=mask, other=0.0)
    if NORM:
        weight = tl.load(weight_ptr + dims + copies, mask=mask, other=0.0)
        other_weight = tl.load(weight_ptr + others + copies, mask=mask, other=0.0)
        squares = tl.where(is_first, own * own + other * other, 0.0)
        scale = tl.rsqrt(tl.sum(squares, axis=1) / HEAD_DIM + eps)[:, None]
        own = own * scale * weight.to(tl.float32)
        other = other * scale * other_weight.to(tl.float32)
    return own * cos + tl.where(is_first, -other, other) * sin
