"""Skinny matmuls: few rows of x against a weight that is streamed once.

Weights do not depend on earlier kernels, so a program asks for its first ones before it waits for
x; with dependent launch the memory stays busy across the boundary between two kernels.
"""

import torch
import triton
import triton.language as tl

from nvserve.kernels.launch import inputs_ready, jit, launch_options, start_next
from nvserve.kernels.matmul import SkinnyCut
from nvserve.kernels.matmul_strips import silu_mul, strips
from nvserve.kernels.room import new_rows


@jit
def _vector_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    outputs,
    inputs,
    GATED: tl.constexpr,  # weight rows `outputs` further on are those of `up`
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of x: multiply and add on the ordinary units, weights straight to registers."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = rows < outputs
    block = tl.arange(0, BLOCK)
    weight_at = weight_ptr + rows.to(tl.int64)[:, None] * inputs + block[None, :]
    up_at = weight_at + outputs.to(tl.int64) * inputs
    mask = in_rows[:, None] & (block < inputs)[None, :]
    weights = tl.load(weight_at, mask=mask, other=0.0, eviction_policy="evict_first")
    ups = weights
    if GATED:
        ups = tl.load(up_at, mask=mask, other=0.0, eviction_policy="evict_first")
    start_next(PDL)
    inputs_ready(PDL)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    up_acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, inputs, BLOCK):
        columns = first + block
        later = in_rows[:, None] & (columns + BLOCK < inputs)[None, :]
        next_weights = tl.load(
            weight_at + first + BLOCK, mask=later, other=0.0, eviction_policy="evict_first"
        )
        x = tl.load(x_ptr + columns, mask=columns < inputs, other=0.0).to(tl.float32)
        acc += weights.to(tl.float32) * x[None, :]
        weights = next_weights
        if GATED:
            next_ups = tl.load(
                up_at + first + BLOCK, mask=later, other=0.0, eviction_policy="evict_first"
            )
            up_acc += ups.to(tl.float32) * x[None, :]
            ups = next_ups
    out = tl.sum(acc, axis=1)
    if BIAS:
        out += tl.load(bias_ptr + rows, mask=in_rows, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(up_acc, axis=1)
        if BIAS:
            up += tl.load(bias_ptr + outputs + rows, mask=in_rows, other=0.0).to(tl.float32)
        out = silu_mul(out, up)
    tl.store(out_ptr + rows, out.to(out_ptr.dtype.element_ty), mask=in_rows)


def _vector(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cut: SkinnyCut,
    out: torch.Tensor,
    *,
    gated: bool,
) -> None:
    inputs = weight.shape[1]
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    x = x.contiguous()
    _vector_kernel[(triton.cdiv(outputs, cut.outputs),)](
        x,
        weight,
        x if bias is None else bias,
        out,
        outputs,
        inputs,
        GATED=gated,
        BIAS=bias is not None,
        ROWS=cut.outputs,
        BLOCK=min(cut.inputs, triton.next_power_of_2(inputs)),
        num_warps=cut.warps,
        **launch_options(x.device),
    )


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cut: SkinnyCut,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See matmul.linear; weight is contiguous and its rows a multiple of 16 bytes."""
    assert weight.is_contiguous()
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0])
    assert out.is_contiguous()
    if x.shape[0] == 1:
        _vector(x, weight, bias, cut, out, gated=False)
    else:
        strips(x, weight, bias, cut, out, gated=False)
    return out


def linear_silu_mul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cut: SkinnyCut
) -> torch.Tensor:
    """See matmul.linear_silu_mul; weight is contiguous and its rows a multiple of 16 bytes."""
    assert weight.is_contiguous()
    out = new_rows(x, x.shape[0], weight.shape[0] // 2)
    if x.shape[0] == 1:
        _vector(x, weight, bias, cut, out, gated=True)
    else:
        strips(x, weight, bias, cut, out, gated=True)
    return out
