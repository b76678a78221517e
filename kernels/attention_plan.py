"""The plan of a decode step, for every layer: the KV of all requests is one line of tiles.

A unit is one tile of one request's keys for one KV head; all units of a head come before the next
head's. A fixed grid of programs takes equal, contiguous shares of the line, so that a batch of any
lengths is balanced and nothing about the launch depends on them: a captured graph stays right and
fast.

The plan is one int32 tensor:
  [R + 1]         first unit of each request within a head, and their total
  [R * K]         arrival counters of each request and head, zero between two launches
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
    prefetch_rows,
)

_UNITS: Final = 64  # of a request, written at a time


class DecodeShape(NamedTuple):
    """How a decode launch is cut: keys of a tile, warps, pipeline stages, programs per SM."""

    tile: int
    warps: int
    stages: int
    programs_per_sm: int


@jit_general("num_requests")
def _plan_kernel(  # type: ignore[no-untyped-def]
    seq_lens_ptr,
    block_tables_ptr,
    table_stride,
    plan_ptr,
    num_requests,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a tile
    REQUESTS: tl.constexpr,  # num_requests padded to a power of two, few to the same one
    HEADS: tl.constexpr,  # NUM_KV_HEADS padded to a power of two
    UNITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program plans one request."""
    # No start_next: what follows starts after this kernel's end, so that decode kernels may read
    # the plan and the cache before they wait.
    inputs_ready(PDL)
    request = tl.program_id(0)
    rows = tl.arange(0, REQUESTS)
    lengths = tl.load(seq_lens_ptr + rows, mask=rows < num_requests, other=0)
    # An empty request still has a unit, which writes its zeros.
    units = tl.maximum(tl.cdiv(lengths, TILE), 1)
    first = tl.sum(tl.where(rows < request, units, 0))
    count = tl.sum(tl.where(rows == request, units, 0))
    if request == 0:
        tl.store(plan_ptr, 0)
    tl.store(plan_ptr + 1 + request, first + count)
    heads = tl.arange(0, HEADS)
    counter_ptr = plan_ptr + 1 + num_requests
    tl.store(counter_ptr + request * NUM_KV_HEADS + heads, 0, mask=heads < NUM_KV_HEADS)
    units_ptr = counter_ptr + num_requests * NUM_KV_HEADS
    length = tl.load(seq_lens_ptr + request)
    table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
    for tile in range(0, count, UNITS):
        tiles = tile + tl.arange(0, UNITS)
        inside = tiles < count
        first_token = tiles * TILE
        at = units_ptr + (first + tiles) * (3 + BLOCKS)
        tl.store(at, 0 * tiles + request, mask=inside)
        tl.store(at + 1, first_token, mask=inside)
        tl.store(at + 2, length - first_token, mask=inside)
        for index in range(BLOCKS):
            block = first_token // BLOCK_SIZE + index
            # Scratch behind the end: those keys do not count.
            ids = tl.load(table_ptr + block, mask=block * BLOCK_SIZE < length, other=0)
            tl.store(at + 3 + index, ids, mask=inside)


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
    if num_requests <= 8:
        return DecodeShape(tile=128, warps=4, stages=3, programs_per_sm=2)
    if num_requests <= 48:
        return DecodeShape(tile=64, warps=4, stages=5, programs_per_sm=2)
    return DecodeShape(tile=64, warps=2, stages=3, programs_per_sm=4)


def blocks_of_tile(tile: int, block_size: int) -> int:
    """How many blocks a tile of tokens touches at most."""
    if tile % block_size == 0 or block_size % tile == 0:
        return max(1, tile // block_size)
    return (tile - 2 + block_size) // block_size + 1


def plan_decode(
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    num_kv_heads: int,
    shape: DecodeShape,
) -> torch.Tensor:
    """The plan of one decode step; a new tensor, computed on the device."""
    num_requests, width = block_tables.shape
    num_units = num_requests * max(1, triton.cdiv(width * block_size, shape.tile))
    blocks = blocks_of_tile(shape.tile, block_size)
    size = 1 + num_requests * (1 + num_kv_heads) + num_units * (3 + blocks)
    plan = seq_lens.new_empty(size, dtype=torch.int32)
    _plan_kernel[(num_requests,)](
        seq_lens,
        block_tables,
        block_tables.stride(0),
        plan,
        num_requests,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        TILE=shape.tile,
        BLOCKS=blocks,
        REQUESTS=max(64, triton.next_power_of_2(num_requests)),
        HEADS=triton.next_power_of_2(num_kv_heads),
        UNITS=_UNITS,
        num_warps=4,
        **launch_options(seq_lens.device),
    )
    return plan
