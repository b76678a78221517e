"""The Triton kernel of sums in two shots: a program takes every so many rows and meets its twins.

There are no more programs than multiprocessors, so that none waits for one without a place.
"""

import torch
import triton
import triton.language as tl

from nvserve.kernels.all_reduce import Addends
from nvserve.kernels.all_reduce_rows import elements, num_warps, put_row, take_residual
from nvserve.kernels.dispatch import INTERPRETED
from nvserve.kernels.launch import (
    inputs_ready,
    jit,
    jit_general,
    launch_options,
    start_next,
)


@jit
def _announce(flags_ptr, at, call, SIZE: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Set the flag `at` of every rank to this call; what came before it can be seen by then.

    Thread r of the program tells rank r.
    """
    if PTX:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred others;
            .reg .u32 thread;
            .reg .u64 flag;
            mov.u32 thread, %tid.x;
            setp.ge.u32 others, thread, $4;
            @others bra TOLD;
            mul.wide.u32 flag, thread, 8;
            add.u64 flag, flag, $1;
            ld.global.u64 flag, [flag];
            add.u64 flag, flag, $2;
            st.release.sys.global.s32 [flag], $3;
            TOLD:
            mov.u32 $0, 0;
            }
            """,
            "=r,l,l,r,r",
            [flags_ptr.to(tl.int64), at.to(tl.int64) * 4, call, SIZE],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        for rank in tl.static_range(SIZE):
            flags = tl.load(flags_ptr + rank).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + at, call, sem="release", scope="sys")


@jit
def _await(  # type: ignore[no-untyped-def]
    flags_ptr,
    at,
    call,
    given_up_ptr,
    abort_ptr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PTX: tl.constexpr,
):
    """Wait until all ranks have announced this call to the flags from `at` on, or abort is set.

    The threads of the first warp look at a flag each, and the others wait for these. Where the host
    has set abort, a look at its memory every few thousand turns tells, and the device's own note of
    it the programs to come.
    """
    flags = tl.load(flags_ptr + RANK).to(tl.pointer_type(tl.int32)) + at
    if PTX:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred go;
            .reg .u32 turns, word;
            .reg .s32 seen;
            .reg .u64 flag;
            mov.u32 turns, %tid.x;
            setp.ge.u32 go, turns, $5;
            @go bra MET;
            mul.wide.u32 flag, turns, 4;
            add.u64 flag, flag, $1;
            mov.u32 turns, 0;
            LOOK:
            ld.relaxed.sys.global.s32 seen, [flag];
            sub.s32 seen, seen, $2;
            setp.ge.s32 go, seen, 0;
            @go bra COME;
            add.u32 turns, turns, 1;
            and.b32 word, turns, 63;
            setp.ne.u32 go, word, 0;
            @go bra LOOK;
            ld.relaxed.gpu.global.u32 word, [$3];
            setp.ne.u32 go, word, 0;
            @go bra MET;
            and.b32 word, turns, 4095;
            setp.ne.u32 go, word, 0;
            @go bra LOOK;
            ld.relaxed.sys.global.u32 word, [$4];
            setp.eq.u32 go, word, 0;
            @go bra LOOK;
            st.relaxed.gpu.global.u32 [$3], 1;
            bra MET;
            COME:
            ld.acquire.sys.global.s32 seen, [flag];
            MET:
            mov.u32 $0, 0;
            }
            """,
            "=r,l,r,l,l,r",
            [flags.to(tl.int64), call, given_up_ptr.to(tl.int64), abort_ptr.to(tl.int64), SIZE],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()
    else:
        for rank in tl.static_range(SIZE):
            seen = tl.atomic_add(flags + rank, 0, sem="acquire", scope="sys")
            while (seen - call < 0) & (tl.load(abort_ptr) == 0):
                seen = tl.atomic_add(flags + rank, 0, sem="acquire", scope="sys")


@jit
def _sum_of(addends_ptr, at, mask, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements `at` of every rank's addend, added in rank order, in float32, and rounded once.

    Past the L1 cache, which may hold what was there before.
    """
    element: tl.constexpr = out_ptr.dtype.element_ty
    first = elements(addends_ptr, 0, at, element)
    total = tl.load(first, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    for rank in tl.static_range(1, SIZE):
        other = elements(addends_ptr, rank, at, element)
        total += tl.load(other, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    return total.to(element)


@jit
def _gathered(  # type: ignore[no-untyped-def]
    sums_ptr,
    at,
    columns,
    inside,
    out_ptr,
    SHARE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row whose columns have been summed by one rank each."""
    element: tl.constexpr = out_ptr.dtype.element_ty
    total = tl.zeros([BLOCK], element)
    for rank in tl.static_range(SIZE):
        is_theirs = inside & (columns >= rank * SHARE) & (columns < rank * SHARE + SHARE)
        sums = elements(sums_ptr, rank, at, element)
        found = tl.load(sums, mask=is_theirs, other=0.0, cache_modifier=".cg")
        total = tl.where(is_theirs, found, total)
    return total


@jit_general("num_rows")
def _two_shot_kernel(  # type: ignore[no-untyped-def]
    addends_ptr,
    sums_ptr,
    flags_ptr,
    calls_ptr,
    given_up_ptr,
    abort_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    width,
    max_rows,
    eps,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    SHARE: tl.constexpr,  # columns that a rank sums for all
    SHARE_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    element: tl.constexpr = out_ptr.dtype.element_ty
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    stride = width.to(tl.int64)
    start_next(PDL)
    weight = tl.zeros([BLOCK], tl.float32)
    if NORM:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    inputs_ready(PDL)
    call = tl.load(calls_ptr + program) + 1
    _announce(flags_ptr, program * SIZE + RANK, call, SIZE, PTX)
    _await(flags_ptr, program * SIZE, call, given_up_ptr, abort_ptr, RANK, SIZE, PTX)
    ours = RANK * SHARE + tl.arange(0, SHARE_BLOCK)
    is_ours = (ours < RANK * SHARE + SHARE) & (ours < width)
    for row in range(program, num_rows, num_programs):
        at = row * stride + ours
        part = _sum_of(addends_ptr, at, is_ours, out_ptr, SIZE)
        tl.store(elements(sums_ptr, RANK, at, element), part, mask=is_ours)
    tl.debug_barrier()  # the threads that announce do so for all
    second = (max_rows + program) * SIZE
    _announce(flags_ptr, second + RANK, call, SIZE, PTX)
    _await(flags_ptr, second, call, given_up_ptr, abort_ptr, RANK, SIZE, PTX)
    for row in range(program, num_rows, num_programs):
        at = row * stride + columns
        residual = take_residual(residual_ptr, at, inside, NORM, BLOCK)
        total = _gathered(sums_ptr, at, columns, inside, out_ptr, SHARE, SIZE, BLOCK)
        put_row(total, residual, weight, eps, width, residual_ptr, out_ptr, at, inside, NORM)
    tl.store(calls_ptr + program, call)


def launch(
    addends: Addends,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
) -> None:
    """Write to out [R, N] the sums, or the normalized rows where there are residual and weight."""
    meeting, (num_rows, width) = addends.meeting, out.shape
    assert num_rows <= meeting.max_rows
    # Whole groups of 16 bytes, so that what a thread reads at a time has one owner.
    share = triton.cdiv(triton.cdiv(width, meeting.size), 8) * 8
    block = triton.next_power_of_2(width)
    _two_shot_kernel[(min(num_rows, meeting.max_programs),)](
        addends.all,
        addends.sums,
        meeting.flags,
        meeting.calls,
        meeting.given_up,
        meeting.abort,
        out if residual is None else residual,
        out if weight is None else weight,
        out,
        num_rows,
        width,
        meeting.max_rows,
        eps,
        RANK=meeting.rank,
        SIZE=meeting.size,
        SHARE=share,
        SHARE_BLOCK=triton.next_power_of_2(share),
        NORM=residual is not None,
        BLOCK=block,
        PTX=not INTERPRETED,
        num_warps=num_warps(block),
        **launch_options(out.device),
    )
