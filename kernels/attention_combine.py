"""How decode attention adds up what several programs found for the same queries."""

import triton.language as tl

from nvserve.kernels.launch import jit


@jit
def combine(  # type: ignore[no-untyped-def]
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
