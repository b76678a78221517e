"""Triton decode attention: the KV of all requests is one line of tiles, cut into equal shares.

A unit is one tile of one request's keys for one KV head; all units of a head come before the next
head's. A fixed grid of programs takes equal, contiguous shares of the line, so that a batch of any
lengths is balanced and nothing about the launch depends on them: a captured graph stays right and
fast. A share may cover the end of one request, some whole ones and the start of another. What
covers a request's keys entirely writes the output; otherwise each program leaves a partial result
and the last of them to arrive combines.

Plan (int32, [R + 1 + R * K + programs]): first unit of each request within a head and their total;
an arrival counter for each request and head, which the combining program sets back to zero; the
request in which each program starts.

There are two ways in. decode() takes queries, and finds all keys in the cache. decode_fused() takes
what the QKV projection left: each program norms and rotates the queries it needs, and the one that
has a request's last unit also makes the new token's key and value, writes them to the cache, and
begins with them as a first key. Nothing reads them from the cache in the same launch.

R requests, H query heads, K KV heads, G = H / K, D head size, P tokens of a block.
"""

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from nvserve.kernels.attention import NewTokens
from nvserve.kernels.attention_combine import combine
from nvserve.kernels.attention_new_token import begin_fused
from nvserve.kernels.launch import (
    inputs_ready,
    jit_general,
    launch_options,
    num_sms,
    prefetch_rows,
    start_next,
)

LOG2E: Final = 1.4426950408889634


class DecodeShape(NamedTuple):
    """How a decode launch is cut: keys of a tile, warps, pipeline stages, programs per SM."""

    tile: int
    warps: int
    stages: int
    programs_per_sm: int


@jit_general("num_requests", "num_counters", "num_programs")
def _plan_kernel(  # type: ignore[no-untyped-def]
    seq_lens_ptr,
    plan_ptr,
    num_requests,
    num_counters,
    num_programs,
    NUM_KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    REQUESTS: tl.constexpr,  # num_requests padded to a power of two
    PROGRAMS: tl.constexpr,  # decode programs that one program here plans
    PDL: tl.constexpr,
):
    # No start_next: what follows starts after this kernel's end, so that decode kernels may read
    # the plan, the lengths and the tables before they wait.
    inputs_ready(PDL)
    rows = tl.arange(0, REQUESTS)
    in_rows = rows < num_requests
    lengths = tl.load(seq_lens_ptr + rows, mask=in_rows, other=0)
    # An empty request still has a unit, which writes its zeros.
    units = tl.where(in_rows, tl.maximum(tl.cdiv(lengths, TILE), 1), 0)
    ends = tl.cumsum(units, axis=0)
    total = tl.sum(units)
    share = tl.cdiv(total * NUM_KV_HEADS, num_programs)
    if tl.program_id(0) == 0:
        tl.store(plan_ptr, 0)
        tl.store(plan_ptr + 1 + rows, ends, mask=in_rows)
        for first in range(0, num_counters, REQUESTS):
            counter = first + rows
            tl.store(plan_ptr + 1 + num_requests + counter, 0, mask=counter < num_counters)
    programs = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    unit = programs * share % total
    before = (ends[None, :] <= unit[:, None]) & in_rows[None, :]
    request_ptr = plan_ptr + 1 + num_requests + num_counters
    first_request = tl.sum(before.to(tl.int32), axis=1)
    tl.store(request_ptr + programs, first_request, mask=programs < num_programs)


@jit_general("num_requests")
def _decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # of qkv rows where IS_FUSED
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
    qkv_stride,  # this and what follows: only where IS_FUSED, else None
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
    IS_FUSED: tl.constexpr,
    PDL: tl.constexpr,
):
    # Where fused, the last of a request's tokens is not read from the cache.
    num_new: tl.constexpr = 1 if IS_FUSED else 0
    program = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    in_dim = dims < HEAD_DIM
    start_next(PDL)
    # Nothing that runs between the plan's kernel and this one writes what is read before the wait.
    units = tl.load(plan_ptr + num_requests)
    request = tl.load(plan_ptr + 1 + num_requests * (NUM_KV_HEADS + 1) + program)
    share = tl.cdiv(units * NUM_KV_HEADS, tl.num_programs(0))
    unit = program * share
    end = tl.minimum(unit + share, units * NUM_KV_HEADS)
    head = unit // units
    length = tl.load(seq_lens_ptr + request)
    first_unit = head * units + tl.load(plan_ptr + request)
    last_unit = head * units + tl.load(plan_ptr + request + 1)
    if PDL and HEAD_DIM * key_ptr.dtype.element_ty.primitive_bitwidth % 128 == 0:
        tokens = (unit - first_unit) * TILE + tl.arange(0, TILE)
        tokens = tl.where((tokens < length - num_new) & (unit < end), tokens, 0)
        table_at = block_tables_ptr + request.to(tl.int64) * table_stride + tokens // BLOCK_SIZE
        kv_row = tl.load(table_at).to(tl.int64) * BLOCK_SIZE + tokens % BLOCK_SIZE
        kv_row = kv_row * NUM_KV_HEADS + tl.where(unit < end, head, 0)
        row_bytes = HEAD_DIM * key_ptr.dtype.element_ty.primitive_bitwidth // 8
        prefetch_rows(key_ptr + kv_row * HEAD_DIM, row_bytes)
        prefetch_rows(value_ptr + kv_row * HEAD_DIM, row_bytes)
    inputs_ready(PDL)

    while unit < end:
        stop = tl.minimum(last_unit, end)
        heads = head * GROUP + rows
        q_at = (request * NUM_KV_HEADS * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
        q_mask = (rows < GROUP)[:, None] & in_dim[None, :]
        if not IS_FUSED:
            q = tl.load(q_ptr + q_at, mask=q_mask, other=0.0)
        table = block_tables_ptr + request.to(tl.int64) * table_stride

        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        num_cached = length - num_new
        first_tile, stop_tile = unit - first_unit, stop - first_unit
        if IS_FUSED:
            # The last unit has no cached key where the new token is the first of its tile.
            stop_tile = tl.minimum(stop_tile, tl.cdiv(num_cached, TILE))
            is_new = (stop == last_unit) & (length > 0)
            q, first_score, value = begin_fused(
                q_ptr + request.to(tl.int64) * qkv_stride,
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
            scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
            scores = tl.where(inside[None, :], scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, axis=1))
            safe = tl.where(new_best == float("-inf"), 0.0, new_best)
            weights = tl.exp2(scores - safe[:, None])
            decay = tl.exp2(best - safe)
            total = total * decay + tl.sum(weights, axis=1)
            values = tl.load(value_ptr + kv_at, mask=kv_mask, other=0.0)
            weights = weights.to(values.dtype)
            acc = tl.dot(weights, values, acc=acc * decay[:, None], input_precision="ieee")
            best = new_best

        if (unit == first_unit) & (stop == last_unit):
            acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(out_ptr + q_at, acc.to(out_ptr.dtype.element_ty), mask=q_mask)
        else:
            slot = 2 * program + tl.where(unit == first_unit, 1, 0)
            at = slot * GROUP + rows
            tl.store(sums_ptr + 2 * at, best, mask=rows < GROUP)
            tl.store(sums_ptr + 2 * at + 1, total, mask=rows < GROUP)
            tl.store(partial_ptr + at[:, None] * HEAD_DIM + dims[None, :], acc, mask=q_mask)
            # All threads' partial results come before the one thread's release.
            tl.debug_barrier()
            counter = plan_ptr + 1 + num_requests + request * NUM_KV_HEADS + head
            arrived = tl.atomic_add(counter, 1, sem="acq_rel")
            first_program = first_unit // share
            count = (last_unit - 1) // share - first_program + 1
            if arrived == count - 1:
                tl.store(counter, 0)
                merged = combine(
                    partial_ptr, sums_ptr, first_program, count, GROUP, ROWS, HEAD_DIM, DIM, 4
                )
                tl.store(out_ptr + q_at, merged.to(out_ptr.dtype.element_ty), mask=q_mask)
        unit = stop
        request += 1
        if request == num_requests:
            request = 0
            head += 1
        length = tl.load(seq_lens_ptr + request)
        first_unit = head * units + tl.load(plan_ptr + request)
        last_unit = head * units + tl.load(plan_ptr + request + 1)


def decode_shape(dtype: torch.dtype, head_dim: int, num_requests: int) -> DecodeShape:
    """The one place that chooses how decode attention is cut (measured on H200)."""
    if dtype == torch.float32:
        return DecodeShape(tile=32, warps=4, stages=2, programs_per_sm=2)
    if head_dim > 128:
        return DecodeShape(tile=32, warps=4, stages=5, programs_per_sm=2)
    if num_requests <= 48:
        return DecodeShape(tile=128, warps=4, stages=3, programs_per_sm=2)
    return DecodeShape(tile=64, warps=4, stages=3, programs_per_sm=4)


def plan_decode(seq_lens: torch.Tensor, num_kv_heads: int, shape: DecodeShape) -> torch.Tensor:
    """The plan of one decode step, for every layer; a new tensor, computed on the device."""
    num_requests = seq_lens.shape[0]
    num_counters = num_requests * num_kv_heads
    num_programs = num_sms(seq_lens.device) * shape.programs_per_sm
    plan = seq_lens.new_empty(num_requests + 1 + num_counters + num_programs, dtype=torch.int32)
    requests = max(16, triton.next_power_of_2(num_requests))
    _plan_kernel[(triton.cdiv(num_programs, 16),)](
        seq_lens,
        plan,
        num_requests,
        num_counters,
        num_programs,
        NUM_KV_HEADS=num_kv_heads,
        TILE=shape.tile,
        REQUESTS=requests,
        PROGRAMS=16,
        num_warps=4,
        **launch_options(seq_lens.device),
    )
    return plan


def decode(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: torch.Tensor,
    scale: float,
    shape: DecodeShape,
) -> torch.Tensor:
    """Attention of q [R, H, D] contiguous over the paged cache; the plan is of the same shape."""
    q = q.contiguous()
    caches = (key_cache, value_cache)
    return _launch(q, None, q.shape[1], *caches, block_tables, seq_lens, plan, scale, shape)


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
    num_kv_heads, head_dim = key_cache.shape[2:]
    assert new.qkv.stride(1) == 1
    assert new.cos_sin.is_contiguous()
    assert new.cos_sin.shape[1] == head_dim
    num_heads = new.qkv.shape[1] // head_dim - 2 * num_kv_heads
    caches = (key_cache, value_cache)
    return _launch(new.qkv, new, num_heads, *caches, block_tables, seq_lens, plan, scale, shape)


def _launch(
    queries: torch.Tensor,
    new: NewTokens | None,
    num_heads: int,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: torch.Tensor,
    scale: float,
    shape: DecodeShape,
) -> torch.Tensor:
    """Queries [R, H, D], or rows of new.qkv."""
    num_requests = queries.shape[0]
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    group = num_heads // num_kv_heads
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    num_programs = num_sms(queries.device) * shape.programs_per_sm
    out = queries.new_empty(num_requests, num_heads, head_dim)
    partial = queries.new_empty(2 * num_programs, group, head_dim, dtype=torch.float32)
    sums = queries.new_empty(2 * num_programs, group, 2, dtype=torch.float32)
    _decode_kernel[(num_programs,)](
        queries,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        plan,
        partial,
        sums,
        out,
        num_requests,
        block_tables.stride(0),
        scale * LOG2E,
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
        STAGES=shape.stages,
        Q_NORM=new is not None and new.q_weight is not None,
        K_NORM=new is not None and new.k_weight is not None,
        IS_FUSED=new is not None,
        num_warps=shape.warps,
        **launch_options(queries.device),
    )
    return out
