"""Triton decode attention that begins with what the QKV projection left.

Each program norms and rotates the queries it needs, and the one that has a request's last unit also
makes the new token's key and value, writes them to the cache, and begins with them as a first key.
Nothing reads them from the cache in the same launch. Shares are those of attention_plan.py.

R requests, H query heads, K KV heads, G = H / K, D head size, P tokens of a block.
"""

import torch
import triton
import triton.language as tl

from nvserve.kernels.attention import NewTokens
from nvserve.kernels.attention_new_token import begin_fused
from nvserve.kernels.attention_plan import DecodeShape, own_share, prefetch_keys
from nvserve.kernels.attention_sums import LOG2E, add_tile, finish, part_buffers
from nvserve.kernels.launch import (
    inputs_ready,
    jit_general,
    launch_options,
    num_sms,
    start_next,
)


@jit_general("num_requests")
def _fused_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    key_ptr,
    value_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    plan_ptr,
    partial_ptr,
    sums_ptr,
    out_ptr,
    num_requests,
    table_stride,
    scale,  # softmax scale times log2(e)
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
    STAGES: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    in_dim = dims < HEAD_DIM
    start_next(PDL)
    # Nothing that runs between the plan's kernel and this one writes what is read before the wait.
    units, share, begin, end = own_share(plan_ptr, num_requests, NUM_KV_HEADS)
    request = tl.load(plan_ptr + 1 + num_requests * (NUM_KV_HEADS + 1) + tl.program_id(0))
    head = begin // units
    length = tl.load(seq_lens_ptr + request)
    first_unit = head * units + tl.load(plan_ptr + request)
    last_unit = head * units + tl.load(plan_ptr + request + 1)
    if PDL and begin < end:
        tokens = (begin - first_unit) * TILE + tl.arange(0, TILE)
        tokens = tl.where(tokens < length - 1, tokens, 0)
        table_at = block_tables_ptr + request.to(tl.int64) * table_stride + tokens // BLOCK_SIZE
        kv_row = tl.load(table_at).to(tl.int64) * BLOCK_SIZE + tokens % BLOCK_SIZE
        prefetch_keys(key_ptr, value_ptr, kv_row * NUM_KV_HEADS + head, HEAD_DIM)
    inputs_ready(PDL)
    unit = begin
    while unit < end:
        stop = tl.minimum(last_unit, end)
        heads = head * GROUP + rows
        out_at = (request * NUM_KV_HEADS * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
        out_mask = (rows < GROUP)[:, None] & in_dim[None, :]
        table = block_tables_ptr + request.to(tl.int64) * table_stride

        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        # The last of a request's tokens is not read from the cache.
        num_cached = length - 1
        first_tile, stop_tile = unit - first_unit, stop - first_unit
        # The last unit has no cached key where the new token is the first of its tile.
        stop_tile = tl.minimum(stop_tile, tl.cdiv(num_cached, TILE))
        is_new = (stop == last_unit) & (length > 0)
        q, first_score, value = begin_fused(
            qkv_ptr + request.to(tl.int64) * qkv_stride,
            cos_sin_ptr,
            q_weight_ptr,
            k_weight_ptr,
            eps,
            scale,
            key_ptr,
            value_ptr,
            table,
            tl.maximum(num_cached, 0),
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
        for tile in tl.range(first_tile, stop_tile, num_stages=STAGES):
            tokens = tile * TILE + tl.arange(0, TILE)
            inside = tokens < num_cached
            block = tl.load(table + tokens // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            kv_row = (block * BLOCK_SIZE + tokens % BLOCK_SIZE) * NUM_KV_HEADS + head
            kv_at = kv_row[:, None] * HEAD_DIM + dims[None, :]
            kv_mask = inside[:, None] & in_dim[None, :]
            keys = tl.load(key_ptr + kv_at, mask=kv_mask, other=0.0)
            values = tl.load(value_ptr + kv_at, mask=kv_mask, other=0.0)
            best, total, acc = add_tile(q, keys, values, inside, scale, best, total, acc)
        finish(
            best,
            total,
            acc,
            out_ptr + out_at,
            out_mask,
            partial_ptr,
            sums_ptr,
            plan_ptr + 1 + num_requests + request * NUM_KV_HEADS + head,
            first_unit,
            last_unit,
            begin,
            share,
            stop == last_unit,
            GROUP,
            ROWS,
            HEAD_DIM,
            DIM,
        )
        unit = stop
        request += 1
        if request == num_requests:
            request = 0
            head += 1
        length = tl.load(seq_lens_ptr + request)
        first_unit = head * units + tl.load(plan_ptr + request)
        last_unit = head * units + tl.load(plan_ptr + request + 1)


def decode_fused(
    new: NewTokens,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: torch.Tensor,
    scale: float,
    shape: DecodeShape,
) -> torch.Tensor:
    """What AttentionBackend.decode_fused says; [R, H, D]. The plan is of the same shape."""
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    assert new.qkv.stride(1) == 1
    assert new.cos_sin.is_contiguous()
    assert new.cos_sin.shape[1] == head_dim
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    num_requests = new.qkv.shape[0]
    num_heads = new.qkv.shape[1] // head_dim - 2 * num_kv_heads
    group = num_heads // num_kv_heads
    num_programs = num_sms(new.qkv.device) * shape.programs_per_sm
    out = new.qkv.new_empty(num_requests, num_heads, head_dim)
    _fused_kernel[(num_programs,)](
        new.qkv,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        plan,
        *part_buffers(out, num_programs, group),
        out,
        num_requests,
        block_tables.stride(0),
        scale * LOG2E,
        new.qkv.stride(0),
        new.cos_sin,
        new.q_weight,
        new.k_weight,
        new.eps,
        BLOCK_SIZE=block_size,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        QUERIES=max(shape.warps, triton.next_power_of_2(group)),
        ROWS=max(16, triton.next_power_of_2(group)),
        DIM=max(16, triton.next_power_of_2(head_dim)),
        TILE=shape.tile,
        STAGES=shape.stages,
        Q_NORM=new.q_weight is not None,
        K_NORM=new.k_weight is not None,
        num_warps=shape.warps,
        **launch_options(out.device),
    )
    return out
