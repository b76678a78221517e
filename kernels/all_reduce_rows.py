"""Triton helpers of both ways of all_reduce.py: where a row is, and what becomes of its sum."""

import triton.language as tl

from nvserve.kernels.launch import jit


@jit
def elements(addresses_ptr, rank, at, ELEMENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointers to elements `at`, which follow each other, of a rank's part.

    Parts are aligned, which the compiler cannot know: without it, it would read 2 bytes at a time.
    """
    part = tl.load(addresses_ptr + rank).to(tl.pointer_type(ELEMENT))
    return tl.multiple_of(part + at, 16)


@jit
def take_residual(residual_ptr, at, inside, NORM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row of the residual in float32; zeros where there is none."""
    residual = tl.zeros([BLOCK], tl.float32)
    if NORM:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return residual


@jit
def put_row(  # type: ignore[no-untyped-def]
    total,  # rounded
    residual,
    weight,
    eps,
    width,
    residual_ptr,
    out_ptr,
    at,
    inside,
    NORM: tl.constexpr,
):
    """Store a row's sum, or with NORM what norm.add_rms_norm makes of it."""
    if NORM:
        total = (total.to(tl.float32) + residual).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + at, total, mask=inside)
        x = total.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x) / width + eps)
        total = (x * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, total, mask=inside)


def num_warps(block: int) -> int:
    """16 bytes a thread and rank in flight at once."""
    return max(1, min(32, block // 256))
