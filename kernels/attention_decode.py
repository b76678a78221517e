"""Triton decode attention over the paged cache.

One loop runs over all units of a program's share (attention_plan.py), so that keys and values are
on their way while a request ends and the next one begins. What covers a request's keys entirely
writes the output; otherwise each program leaves a partial result and the last of them to arrive
combines.

There are two ways in. decode() takes queries, and finds all keys in the cache. decode_fused() takes
what the QKV projection left: where a program begins with a request, it norms and rotates the
queries, and the one that has the request's last unit also makes the new token's key and value,
writes them to the cache, and begins with them as a first key. Nothing reads them from the cache in
the same launch, so that the loop's first keys need not wait for the projection.

R requests, H query heads, K KV heads, G = H / K, D head size, P tokens of a block.
"""

import torch
import triton
import triton.language as tl

from nvserve.kernels.attention import NewTokens
from nvserve.kernels.attention_new_token import begin_fused
from nvserve.kernels.attention_plan import DecodeShape, blocks_of_tile, own_share, prefetch_keys
from nvserve.kernels.attention_sums import LOG2E, add_tile, finish
from nvserve.kernels.launch import (
    inputs_ready,
    jit,
    jit_general,
    launch_options,
    num_sms,
    start_next,
)
from nvserve.kernels.room import new_rows


@jit
def _rows(  # type: ignore[no-untyped-def]
    unit_ptr, head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Where the keys of a unit are, in heads of the cache; those that it lacks in its blocks."""
    tokens = tl.arange(0, TILE)
    if TILE % BLOCK_SIZE:  # else tiles begin with a block, and one load need not wait for another
        tokens += tl.load(unit_ptr + 1) % BLOCK_SIZE
    block = tl.load(unit_ptr + 3 + tokens // BLOCK_SIZE).to(tl.int64)
    return (block * BLOCK_SIZE + tokens % BLOCK_SIZE) * NUM_KV_HEADS + head


@jit_general("num_requests")
def _decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # of qkv rows where IS_FUSED
    key_ptr,
    value_ptr,
    plan_ptr,
    partial_ptr,
    sums_ptr,
    out_ptr,
    num_requests,
    scale,  # softmax scale times log2(e)
    block_tables_ptr,  # this and what follows: only where IS_FUSED, else None
    table_stride,
    qkv_stride,
    cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr,  # GROUP padded to a power of two, one for each warp at least
    ROWS: tl.constexpr,  # GROUP padded to what a matrix instruction takes
    DIM: tl.constexpr,  # HEAD_DIM padded to a power of two
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a tile
    STAGES: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    IS_FUSED: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    in_dim = dims < HEAD_DIM
    q_mask = (rows < GROUP)[:, None] & in_dim[None, :]
    # Where fused, the last of a request's tokens is not read from the cache.
    num_new: tl.constexpr = 1 if IS_FUSED else 0
    start_next(PDL)
    # Nothing that runs between the plan's kernel and this one writes what is read before the wait.
    units, share, begin, end = own_share(plan_ptr, num_requests, NUM_KV_HEADS)
    units_ptr = plan_ptr + 1 + num_requests * (NUM_KV_HEADS + 1)
    if not IS_FUSED:
        if PDL and begin < end:
            unit_ptr = units_ptr + begin % units * (3 + BLOCKS)
            kv_row = _rows(unit_ptr, begin // units, NUM_KV_HEADS, BLOCK_SIZE, TILE)
            prefetch_keys(key_ptr, value_ptr, kv_row, HEAD_DIM)
        inputs_ready(PDL)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    q = tl.zeros([ROWS, DIM], key_ptr.dtype.element_ty)
    is_start = True
    for unit in tl.range(begin, end, num_stages=STAGES):
        head = unit // units
        unit_ptr = units_ptr + unit % units * (3 + BLOCKS)
        request = tl.load(unit_ptr)
        num_left = tl.load(unit_ptr + 2)
        inside = tl.arange(0, TILE) < num_left - num_new
        kv_row = _rows(unit_ptr, head, NUM_KV_HEADS, BLOCK_SIZE, TILE)
        kv_at = kv_row[:, None] * HEAD_DIM + dims[None, :]
        kv_mask = inside[:, None] & in_dim[None, :]
        q_rows = (request * NUM_KV_HEADS + head) * GROUP + rows
        q_at = q_rows[:, None] * HEAD_DIM + dims[None, :]
        keys = tl.load(key_ptr + kv_at, mask=kv_mask, other=0.0)
        values = tl.load(value_ptr + kv_at, mask=kv_mask, other=0.0)
        if not IS_FUSED:
            q = tl.load(q_ptr + q_at, mask=q_mask, other=0.0)
        elif is_start:
            inputs_ready(PDL)
            length = tl.load(unit_ptr + 1) + num_left
            is_new = (head * units + tl.load(plan_ptr + request + 1) <= end) & (length > 0)
            q, first_score, value = begin_fused(
                q_ptr + request.to(tl.int64) * qkv_stride,
                cos_sin_ptr,
                q_weight_ptr,
                k_weight_ptr,
                eps,
                scale,
                key_ptr,
                value_ptr,
                block_tables_ptr + request.to(tl.int64) * table_stride,
                tl.maximum(length - 1, 0),
                is_new,
                head,
                BLOCK_SIZE,
                NUM_KV_HEADS,
                GROUP,
                HEAD_DIM,
                ROWS,
                DIM,
                QUERIES,
                Q_NORM,
                K_NORM,
            )
            best = tl.where(is_new, first_score, best)
            total = tl.where(is_new, 1.0, total)
            acc += value[None, :]
        best, total, acc = add_tile(q, keys, values, inside, scale, best, total, acc)
        is_last = num_left <= TILE
        is_start = is_last
        if is_last | (unit + 1 == end):
            finish(
                best,
                total,
                acc,
                out_ptr + q_at,
                q_mask,
                partial_ptr,
                sums_ptr,
                plan_ptr + 1 + num_requests + request * NUM_KV_HEADS + head,
                head * units + tl.load(plan_ptr + request),
                head * units + tl.load(plan_ptr + request + 1),
                begin,
                share,
                is_last,
                GROUP,
                ROWS,
                HEAD_DIM,
                DIM,
            )
            best = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, DIM], tl.float32)


def decode(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: torch.Tensor,
    scale: float,
    shape: DecodeShape,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q [R, H, D] over the paged cache; the plan is of the same shape."""
    q = q.contiguous()
    out = new_rows(q, *q.shape) if out is None else out
    return _launch(q, None, None, key_cache, value_cache, plan, scale, shape, out)


def decode_fused(
    new: NewTokens,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    plan: torch.Tensor,
    scale: float,
    shape: DecodeShape,
) -> torch.Tensor:
    """What AttentionBackend.decode_fused says; [R, H, D]. The plan is of the same shape."""
    num_kv_heads, head_dim = key_cache.shape[2:]
    assert new.qkv.stride(1) == 1
    assert new.cos_sin.is_contiguous()
    assert new.cos_sin.shape[1] == head_dim
    num_rows, width = new.qkv.shape
    out = new_rows(new.qkv, num_rows, width // head_dim - 2 * num_kv_heads, head_dim)
    caches = (key_cache, value_cache)
    return _launch(new.qkv, new, block_tables, *caches, plan, scale, shape, out)


def _launch(
    queries: torch.Tensor,
    new: NewTokens | None,
    block_tables: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: torch.Tensor,
    scale: float,
    shape: DecodeShape,
    out: torch.Tensor,
) -> torch.Tensor:
    """Queries [R, H, D], or rows of new.qkv; writes and returns out [R, H, D]."""
    num_requests, num_heads = out.shape[:2]
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    group = num_heads // num_kv_heads
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    assert out.is_contiguous()
    num_programs = num_sms(queries.device) * shape.programs_per_sm
    partial = queries.new_empty(2 * num_programs, group, head_dim, dtype=torch.float32)
    sums = queries.new_empty(2 * num_programs, group, 2, dtype=torch.float32)
    _decode_kernel[(num_programs,)](
        queries,
        key_cache,
        value_cache,
        plan,
        partial,
        sums,
        out,
        num_requests,
        scale * LOG2E,
        block_tables,
        None if block_tables is None else block_tables.stride(0),
        None if new is None else new.qkv.stride(0),
        None if new is None else new.cos_sin,
        None if new is None else new.q_weight,
        None if new is None else new.k_weight,
        None if new is None else new.eps,
        BLOCK_SIZE=block_size,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        QUERIES=max(shape.warps, triton.next_power_of_2(group)),
        ROWS=max(16, triton.next_power_of_2(group)),
        DIM=max(16, triton.next_power_of_2(head_dim)),
        TILE=shape.tile,
        BLOCKS=blocks_of_tile(shape.tile, block_size),
        STAGES=shape.stages,
        Q_NORM=new is not None and new.q_weight is not None,
        K_NORM=new is not None and new.k_weight is not None,
        IS_FUSED=new is not None,
        num_warps=shape.warps,
        **launch_options(queries.device),
    )
    return out
