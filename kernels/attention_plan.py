"""The plan of a decode step, for every layer: the KV of all requests is one line of tiles.

A unit is one tile of one request's keys for one KV head; all units of a head come before the next
head's. A fixed grid of programs takes equal, contiguous shares of the line, so that a batch of any
lengths is balanced and nothing about the launch depends on them: a captured graph stays right and
fast.

The plan is one int32 tensor:
  [R + 1]         first unit of each request within a head, and their total
  [R * K]         arrival counters of each request and head, zero between two launches
  [programs]      the request in which each program starts
  [units, 3 + B]  of each unit within a head: its request, the first token of its tile, how many of
                  the request's tokens are left from that one on, the tile's blocks

R requests, K KV heads, B blocks that a tile may touch.
"""

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from nvserve.kernels.launch import (
    inputs_ready,
    jit,
    jit_general,
    launch_options,
    num_sms,
    prefetch_rows,
)

_PROGRAMS: Final = 16  # decode programs that one program of the plan's kernel plans
_UNITS: Final = 64  # units that one writes at a time


class DecodeShape(NamedTuple):
    """How a decode launch is cut: keys of a tile, warps, pipeline stages, programs per SM."""

    tile: int
    warps: int
    stages: int
    programs_per_sm: int


@jit_general("num_requests", "num_counters", "num_programs", "num_planners")
def _plan_kernel(  # type: ignore[no-untyped-def]
    seq_lens_ptr,
    block_tables_ptr,
    table_stride,
    plan_ptr,
    num_requests,
    num_counters,
    num_programs,
    num_planners,  # programs here that plan; one for each request follows
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a tile
    REQUESTS: tl.constexpr,  # num_requests padded to a power of two
    PROGRAMS: tl.constexpr,
    UNITS: tl.constexpr,
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
    counter_ptr = plan_ptr + 1 + num_requests
    request_ptr = counter_ptr + num_counters
    if tl.program_id(0) >= num_planners:
        request = tl.program_id(0) - num_planners
        first = tl.sum(tl.where(rows < request, units, 0))
        count = tl.sum(tl.where(rows == request, units, 0))
        length = tl.load(seq_lens_ptr + request)
        table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
        for tile in range(0, count, UNITS):
            tiles = tile + tl.arange(0, UNITS)
            first_token = tiles * TILE
            at = request_ptr + num_programs + (first + tiles) * (3 + BLOCKS)
            tl.store(at, 0 * tiles + request, mask=tiles < count)
            tl.store(at + 1, first_token, mask=tiles < count)
            tl.store(at + 2, length - first_token, mask=tiles < count)
            for index in range(BLOCKS):
                block = first_token // BLOCK_SIZE + index
                inside = block * BLOCK_SIZE < length
                # Scratch behind the end: those keys do not count.
                ids = tl.load(table_ptr + block, mask=inside, other=0)
                tl.store(at + 3 + index, ids, mask=tiles < count)
    else:
        ends = tl.cumsum(units, axis=0)
        total = tl.sum(units)
        share = tl.cdiv(total * NUM_KV_HEADS, num_programs)
        if tl.program_id(0) == 0:
            tl.store(plan_ptr, 0)
            tl.store(plan_ptr + 1 + rows, ends, mask=in_rows)
            for first in range(0, num_counters, REQUESTS):
                counter = first + rows
                tl.store(counter_ptr + counter, 0, mask=counter < num_counters)
        programs = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
        unit = programs * share % total
        before = (ends[None, :] <= unit[:, None]) & in_rows[None, :]
        first_request = tl.sum(before.to(tl.int32), axis=1)
        tl.store(request_ptr + programs, first_request, mask=programs < num_programs)


@jit
def own_share(plan_ptr, num_requests, NUM_KV_HEADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Units of a head, and of this program: how many it may have, its first, behind its last."""
    units = tl.load(plan_ptr + num_requests)
    share = tl.cdiv(units * NUM_KV_HEADS, tl.num_programs(0))
    begin = tl.program_id(0) * share
    return units, share, begin, tl.minimum(begin + share, units * NUM_KV_HEADS)


@jit
def prefetch_keys(  # type: ignore[no-untyped-def]
    key_ptr,
    value_ptr,
    kv_row,  # [TILE] int64, first value's index / HEAD_DIM
    HEAD_DIM: tl.constexpr,
):
    """Ask for keys and values to come into the L2 cache. May come before the wait."""
    row_bytes: tl.constexpr = HEAD_DIM * key_ptr.dtype.element_ty.primitive_bitwidth // 8
    if row_bytes % 16 == 0:
        prefetch_rows(key_ptr + kv_row * HEAD_DIM, row_bytes)
        prefetch_rows(value_ptr + kv_row * HEAD_DIM, row_bytes)


def decode_shape(dtype: torch.dtype, head_dim: int, num_requests: int) -> DecodeShape:
    """The one place that chooses how decode attention is cut (measured on H200)."""
    if dtype == torch.float32:
        return DecodeShape(tile=32, warps=4, stages=2, programs_per_sm=2)
    if head_dim > 128:
        return DecodeShape(tile=32, warps=4, stages=5, programs_per_sm=2)
    if num_requests <= 48:
        return DecodeShape(tile=64, warps=4, stages=5, programs_per_sm=2)
    return DecodeShape(tile=64, warps=2, stages=3, programs_per_sm=4)


def blocks_of_tile(tile: int, block_size: int) -> int:
    """How many blocks a tile of tokens touches at most."""
    return (
        tile // block_size if tile % block_size == 0 else (tile - 2 + block_size) // block_size + 1
    )


def plan_decode(
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    num_kv_heads: int,
    shape: DecodeShape,
) -> torch.Tensor:
    """The plan of one decode step; a new tensor, computed on the device."""
    num_requests, width = block_tables.shape
    num_counters = num_requests * num_kv_heads
    num_programs = num_sms(seq_lens.device) * shape.programs_per_sm
    num_planners = triton.cdiv(num_programs, _PROGRAMS)
    num_units = num_requests * max(1, triton.cdiv(width * block_size, shape.tile))
    blocks = blocks_of_tile(shape.tile, block_size)
    size = num_requests + 1 + num_counters + num_programs + num_units * (3 + blocks)
    plan = seq_lens.new_empty(size, dtype=torch.int32)
    _plan_kernel[(num_planners + num_requests,)](
        seq_lens,
        block_tables,
        block_tables.stride(0),
        plan,
        num_requests,
        num_counters,
        num_programs,
        num_planners,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        TILE=shape.tile,
        BLOCKS=blocks,
        REQUESTS=max(16, triton.next_power_of_2(num_requests)),
        PROGRAMS=_PROGRAMS,
        UNITS=_UNITS,
        num_warps=4,
        **launch_options(seq_lens.device),
    )
    return plan
