"""Triton decode attention over the paged cache, of queries that are ready.

One loop runs over all units of a program's share (attention_plan.py), so that keys and values are
on their way while a request ends and the next one begins. What covers a request's keys entirely
writes the output; otherwise each program leaves a partial result and the last of them to arrive
combines.

R requests, H query heads, K KV heads, G = H / K, D head size, P tokens of a block.
"""

import torch
import triton
import triton.language as tl

from nvserve.kernels.attention_plan import DecodeShape, blocks_of_tile, own_share, prefetch_keys
from nvserve.kernels.attention_sums import LOG2E, add_tile, finish, part_buffers
from nvserve.kernels.launch import (
    inputs_ready,
    jit,
    jit_general,
    launch_options,
    num_sms,
    start_next,
)


@jit
def _rows(  # type: ignore[no-untyped-def]
    unit_ptr, head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Where the keys of a unit are, in heads of the cache; those that it lacks in its blocks."""
    tokens = tl.arange(0, TILE)
    if TILE % BLOCK_SIZE:  # else tiles begin with a block, and one load need not wait for another
        tokens += tl.load(unit_ptr + 2)
    block = tl.load(unit_ptr + 3 + tokens // BLOCK_SIZE).to(tl.int64)
    return (block * BLOCK_SIZE + tokens % BLOCK_SIZE) * NUM_KV_HEADS + head


@jit_general("num_requests")
def _decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    key_ptr,
    value_ptr,
    plan_ptr,
    partial_ptr,
    sums_ptr,
    out_ptr,
    num_requests,
    scale,  # softmax scale times log2(e)
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP padded to what a matrix instruction takes
    DIM: tl.constexpr,  # HEAD_DIM padded to a power of two
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a tile
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    in_dim = dims < HEAD_DIM
    q_mask = (rows < GROUP)[:, None] & in_dim[None, :]
    start_next(PDL)
    # Nothing that runs between the plan's kernel and this one writes what is read before the wait.
    units, share, begin, end = own_share(plan_ptr, num_requests, NUM_KV_HEADS)
    units_ptr = plan_ptr + 1 + num_requests * (NUM_KV_HEADS + 1) + tl.num_programs(0)
    if PDL and begin < end:
        unit_ptr = units_ptr + begin % units * (3 + BLOCKS)
        kv_row = _rows(unit_ptr, begin // units, NUM_KV_HEADS, BLOCK_SIZE, TILE)
        prefetch_keys(key_ptr, value_ptr, kv_row, HEAD_DIM)
    inputs_ready(PDL)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for unit in tl.range(begin, end, num_stages=STAGES):
        head = unit // units
        unit_ptr = units_ptr + unit % units * (3 + BLOCKS)
        request = tl.load(unit_ptr)
        num_left = tl.load(unit_ptr + 1)
        inside = tl.arange(0, TILE) < num_left
        q_rows = (request * NUM_KV_HEADS + head) * GROUP + rows
        q_at = q_rows[:, None] * HEAD_DIM + dims[None, :]
        q = tl.load(q_ptr + q_at, mask=q_mask, other=0.0)
        kv_row = _rows(unit_ptr, head, NUM_KV_HEADS, BLOCK_SIZE, TILE)
        kv_at = kv_row[:, None] * HEAD_DIM + dims[None, :]
        kv_mask = inside[:, None] & in_dim[None, :]
        keys = tl.load(key_ptr + kv_at, mask=kv_mask, other=0.0)
        values = tl.load(value_ptr + kv_at, mask=kv_mask, other=0.0)
        best, total, acc = add_tile(q, keys, values, inside, scale, best, total, acc)
        is_last = num_left <= TILE
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
) -> torch.Tensor:
    """Attention of q [R, H, D] over the paged cache; the plan is of the same shape."""
    q = q.contiguous()
    num_requests, num_heads, head_dim = q.shape
    block_size, num_kv_heads, _ = key_cache.shape[1:]
    group = num_heads // num_kv_heads
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    num_programs = num_sms(q.device) * shape.programs_per_sm
    out = torch.empty_like(q)
    _decode_kernel[(num_programs,)](
        q,
        key_cache,
        value_cache,
        plan,
        *part_buffers(out, num_programs, group),
        out,
        num_requests,
        scale * LOG2E,
        BLOCK_SIZE=block_size,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        ROWS=max(16, triton.next_power_of_2(group)),
        DIM=max(16, triton.next_power_of_2(head_dim)),
        TILE=shape.tile,
        BLOCKS=blocks_of_tile(shape.tile, block_size),
        STAGES=shape.stages,
        num_warps=shape.warps,
        **launch_options(q.device),
    )
    return out
