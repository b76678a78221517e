"""The Triton kernel of sums in one shot: addends are put into the others' inboxes, see all_reduce.

A value says by itself that it has come, so nothing else crosses the links and nobody waits for a
write to be seen before it sends another.
"""

import torch
import triton
import triton.language as tl

from nvserve.kernels.all_reduce import NUM_INBOXES, Addends
from nvserve.kernels.all_reduce_rows import elements, num_warps, put_row, take_residual
from nvserve.kernels.launch import (
    inputs_ready,
    jit,
    jit_general,
    launch_options,
    start_next,
)

_INBOXES = tl.constexpr(NUM_INBOXES)
_LOOK_TURNS = tl.constexpr(64)  # between looks at the device's note of an abort ...
_HOST_TURNS = tl.constexpr(4096)  # ... and at the host's word, which is far away


@jit
def _bits(x):  # type: ignore[no-untyped-def]
    """Those of 0.0 are 0, and of no other value."""
    integer: tl.constexpr = tl.int32 if x.dtype.primitive_bitwidth == 32 else tl.int16
    return x.to(integer, bitcast=True)


@jit
def _sendable(mine_ptr, at, inside):  # type: ignore[no-untyped-def]
    """This rank's addend, with -0.0 for what would look like an empty inbox."""
    mine = tl.load(mine_ptr + at, mask=inside, other=0.0)
    bits = _bits(mine)
    sign: tl.constexpr = -(1 << (mine.dtype.primitive_bitwidth - 1))
    return tl.where(bits == 0, sign, bits).to(bits.dtype).to(mine.dtype, bitcast=True)


@jit
def _slot(sender: tl.constexpr, receiver: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where in an inbox of the receiver's: nobody sends to itself."""
    return sender - 1 if sender > receiver else sender


@jit
def _has_aborted(turn, given_up_ptr, abort_ptr):  # type: ignore[no-untyped-def]
    """Now and then: whether somebody, at last the host, has said so. Threads may disagree."""
    gone = turn < 0
    if turn % _LOOK_TURNS == 0:
        gone = tl.load(given_up_ptr, volatile=True) != 0
        if turn == 0:
            gone = gone | (tl.load(abort_ptr, volatile=True) != 0)
    return gone


@jit_general("num_rows")
def _one_shot_kernel(  # type: ignore[no-untyped-def]
    mine_ptr,
    inboxes_ptr,
    turns_ptr,
    given_up_ptr,
    abort_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    width,
    inbox_rows,
    eps,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    element: tl.constexpr = out_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    stride = width.to(tl.int64)
    start_next(PDL)
    weight = tl.zeros([BLOCK], tl.float32)
    if NORM:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    inputs_ready(PDL)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        mine = _sendable(mine_ptr, row * stride + columns, inside)
        turn = tl.load(turns_ptr + row)
        there = (turn * inbox_rows + row) * (SIZE - 1) * stride + columns
        for rank in tl.static_range(SIZE):
            if rank != RANK:
                at = there + _slot(RANK, rank) * stride
                tl.store(elements(inboxes_ptr, rank, at, element), mine, mask=inside)
    inboxes = tl.load(inboxes_ptr + RANK).to(tl.pointer_type(element))
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        at = row * stride + columns
        mine = _sendable(mine_ptr, at, inside)
        residual = take_residual(residual_ptr, at, inside, NORM, BLOCK)
        turn = tl.load(turns_ptr + row)
        last = (turn + _INBOXES - 1) % _INBOXES
        here = (turn * inbox_rows + row) * (SIZE - 1) * stride + columns
        old = (last * inbox_rows + row) * (SIZE - 1) * stride + columns
        nothing = tl.zeros([BLOCK], element)
        for slot in tl.static_range(SIZE - 1):
            emptied = tl.multiple_of(inboxes + old + slot * stride, 16)
            tl.store(emptied, nothing, mask=inside)
        total = tl.zeros([BLOCK], tl.float32)
        num_looks = 0
        state = 2  # 0: all is there; 1: not all, and there was an abort; 2: not all
        while state == 2:
            total = tl.zeros([BLOCK], tl.float32)
            missing = columns < 0
            for rank in tl.static_range(SIZE):
                part = mine
                if rank != RANK:
                    inbox = tl.multiple_of(inboxes + here + _slot(rank, RANK) * stride, 16)
                    part = tl.load(inbox, mask=inside, other=0.0, volatile=True)
                    missing = missing | (inside & (_bits(part) == 0))
                total += part.to(tl.float32)
            num_looks = (num_looks + 1) % _HOST_TURNS
            gone = _has_aborted(num_looks, given_up_ptr, abort_ptr)
            # All threads go by what they find together, as some may not know of an abort yet.
            state = tl.max(tl.where(missing, tl.where(gone, 1, 2), 0))
        if state == 1:
            tl.store(given_up_ptr, 1)
        rounded = total.to(element)
        put_row(rounded, residual, weight, eps, width, residual_ptr, out_ptr, at, inside, NORM)
        tl.store(turns_ptr + row, (turn + 1) % _INBOXES)


def launch(
    addends: Addends,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
) -> None:
    """Write to out [R, N] the sums, or the normalized rows where there are residual and weight."""
    meeting, (num_rows, width) = addends.meeting, out.shape
    assert num_rows <= meeting.inbox_rows
    block = triton.next_power_of_2(width)
    _one_shot_kernel[(min(num_rows, meeting.max_programs),)](
        addends.mine,
        meeting.inboxes,
        meeting.turns,
        meeting.given_up,
        meeting.abort,
        out if residual is None else residual,
        out if weight is None else weight,
        out,
        num_rows,
        width,
        meeting.inbox_rows,
        eps,
        RANK=meeting.rank,
        SIZE=meeting.size,
        NORM=residual is not None,
        BLOCK=block,
        num_warps=num_warps(block),
        **launch_options(out.device),
    )
