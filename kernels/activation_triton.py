"""Triton kernel of activation.py."""

import torch
import triton
import triton.language as tl

from nvserve.kernels.launch import inputs_ready, jit, launch_options, start_next
from nvserve.kernels.norm import DeferredNorm
from nvserve.kernels.norm_triton import norm_scale


@jit
def silu_mul(gate, up):  # type: ignore[no-untyped-def]
    """silu(gate) * up, in float32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@jit
def _silu_and_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr,
    out_ptr,
    width,
    squares_ptr,  # this and the next two: of a deferred norm, else None
    inputs,
    eps,
    SQUARES: tl.constexpr,  # of a row; 0: no norm is deferred
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    start_next(PDL)
    inputs_ready(PDL)
    gate = tl.load(gate_up_ptr + row * 2 * width + columns, mask=inside).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + columns, mask=inside).to(tl.float32)
    if SQUARES:
        squares = tl.load(squares_ptr + row * SQUARES + tl.arange(0, SQUARES)[None, :])
        scale = norm_scale(squares, inputs, eps)
        gate *= scale
        up *= scale
    out = silu_mul(gate, up)
    tl.store(out_ptr + row * width + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def silu_and_mul(gate_up: torch.Tensor, norm: DeferredNorm | None = None) -> torch.Tensor:
    """See activation.silu_and_mul."""
    gate_up = gate_up.contiguous()
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, width)
    if num_tokens == 0:
        return out
    deferred: tuple[object, ...] = (None, None, None)
    if norm is not None:
        deferred = (norm.squares, norm.rows.shape[1], norm.eps)
    block = min(1024, triton.next_power_of_2(width))
    _silu_and_mul_kernel[(num_tokens, triton.cdiv(width, block))](
        gate_up,
        out,
        width,
        *deferred,
        SQUARES=0 if norm is None else norm.squares.shape[1],
        BLOCK=block,
        num_warps=4,
        **launch_options(gate_up.device),
    )
    return out
