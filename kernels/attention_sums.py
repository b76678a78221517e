"""What a decode program keeps of the queries of one request and head: maxima, masses, sums.

Tiles are added one by one. Where several programs share a request, each leaves what it has, and
the last of them to arrive adds that up.
"""

from typing import Final

import triton.language as tl

from nvserve.kernels.launch import jit, meet

LOG2E: Final = 1.4426950408889634


@jit
def add_tile(q, keys, values, inside, scale, best, total, acc):  # type: ignore[no-untyped-def]
    """Keys and values [TILE, DIM], of which `inside` counts: new best, total [ROWS], acc.

    best is in units of log2, so that scale is the softmax scale times log2(e).
    """
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where(inside[None, :], scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores - safe[:, None])
    decay = tl.exp2(best - safe)
    total = total * decay + tl.sum(weights, axis=1)
    weights = weights.to(values.dtype)
    acc = tl.dot(weights, values, acc=acc * decay[:, None], input_precision="ieee")
    return new_best, total, acc


@jit
def finish(  # type: ignore[no-untyped-def]
    best,
    total,
    acc,
    out_at,  # [ROWS, DIM] addresses
    mask,  # of rows and dims that there are
    partial_ptr,
    sums_ptr,
    counter_ptr,  # arrivals at this request and head
    first_unit,  # of this request and head
    last_unit,  # behind the last
    begin,  # of this program's share, ...
    share,  # ... which has so many units
    is_to_the_end,  # whether the program has the last unit
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Write the output where the program had all units; else leave a part, and the last one adds.

    A program has two slots: for the request that its share begins with and for the one it ends in.
    """
    is_from_the_start = first_unit >= begin
    if is_from_the_start & is_to_the_end:
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_at, out.to(out_at.dtype.element_ty), mask=mask)
    else:
        rows = tl.arange(0, ROWS)
        dims = tl.arange(0, DIM)
        at = (2 * tl.program_id(0) + tl.where(is_from_the_start, 1, 0)) * GROUP + rows
        tl.store(sums_ptr + 2 * at, best, mask=rows < GROUP)
        tl.store(sums_ptr + 2 * at + 1, total, mask=rows < GROUP)
        tl.store(partial_ptr + at[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
        # All threads' partial results come before the one thread's release.
        meet()
        arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
        first_program = first_unit // share
        count = (last_unit - 1) // share - first_program + 1
        if arrived == count - 1:
            tl.store(counter_ptr, 0)
            merged = _combine(
                partial_ptr, sums_ptr, first_program, count, GROUP, ROWS, HEAD_DIM, DIM, 4
            )
            tl.store(out_at, merged.to(out_at.dtype.element_ty), mask=mask)


@jit
def _combine(  # type: ignore[no-untyped-def]
    partial_ptr,
    sums_ptr,
    first_program,
    count,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Merge the partial results of `count` consecutive programs; [ROWS, DIM] float32."""
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    in_rows = rows < GROUP
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM], tl.float32)
    for first in range(0, count, UNROLL):
        for step in tl.static_range(UNROLL):
            index = first + step
            # The first program reaches this request last in its share, the others first in theirs.
            slot = 2 * (first_program + index) + tl.where(index == 0, 1, 0)
            valid = in_rows & (index < count)
            at = slot * GROUP + rows
            # .cg: another SM wrote these, and this SM's L1 must not answer.
            top = tl.load(sums_ptr + 2 * at, mask=valid, other=float("-inf"), cache_modifier=".cg")
            mass = tl.load(sums_ptr + 2 * at + 1, mask=valid, other=0.0, cache_modifier=".cg")
            values = tl.load(
                partial_ptr + at[:, None] * HEAD_DIM + dims[None, :],
                mask=valid[:, None] & (dims < HEAD_DIM)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            new_best = tl.maximum(best, top)
            safe = tl.where(new_best == float("-inf"), 0.0, new_best)
            old_scale, scale = tl.exp2(best - safe), tl.exp2(top - safe)
            total = total * old_scale + mass * scale
            out = out * old_scale[:, None] + values * scale[:, None]
            best = new_best
    return out / tl.where(total == 0.0, 1.0, total)[:, None]
