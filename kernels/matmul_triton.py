"""Skinny matmuls: few rows of x against a weight that is streamed once.

Weights do not depend on earlier kernels, so a program asks for its first ones before it waits for
x; with dependent launch the memory stays busy across the boundary between two kernels.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nvserve.kernels.launch import (
    inputs_ready,
    jit,
    jit_general,
    launch_options,
    num_sms,
    prefetch_rows,
    start_next,
)
from nvserve.kernels.matmul import SkinnyCut


@jit
def _silu_mul(gate, up):  # type: ignore[no-untyped-def]
    return gate / (1.0 + tl.exp(-gate)) * up


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
        out = _silu_mul(out, up)
    tl.store(out_ptr + rows, out.to(out_ptr.dtype.element_ty), mask=in_rows)


@jit_general("num_tokens")
def _strip_kernel(  # type: ignore[no-untyped-def]
    x_tiles,  # tensor map of x, TOKENS x BLOCK
    weight_tiles,  # tensor map of the weight, ROWS x BLOCK
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    outputs,
    inputs,
    BIAS: tl.constexpr,
    SWAPPED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Up to TOKENS rows of x on the matrix units; the copy engine brings tiles to shared memory.

    A program takes every num_programs-th strip of ROWS outputs; one loop runs over the tiles of
    all of them, so that the pipeline does not drain between two strips. Tiles past an edge are
    filled with zeros. SWAPPED puts tokens first: for strips of fewer rows than the matrix
    instructions of Hopper take.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    strips = tl.cdiv(tl.cdiv(outputs, ROWS) - program, num_programs)
    tiles = tl.cdiv(inputs, BLOCK)
    each = tl.arange(0, ROWS)
    tokens = tl.arange(0, TOKENS)
    if PDL:
        first_rows = tl.minimum(program * ROWS + each, outputs - 1).to(tl.int64)
        prefetch_rows(weight_ptr + first_rows * inputs, tl.minimum(2 * inputs, 2048))
    start_next(PDL)
    inputs_ready(PDL)
    acc = tl.zeros([TOKENS, ROWS] if SWAPPED else [ROWS, TOKENS], tl.float32)
    for step in tl.range(0, strips * tiles, num_stages=STAGES):
        first_row = (program + step // tiles * num_programs) * ROWS
        tile = step % tiles
        weights = weight_tiles.load([first_row, tile * BLOCK])
        x = x_tiles.load([0, tile * BLOCK])
        if SWAPPED:
            acc = tl.dot(x, tl.trans(weights), acc=acc)
        else:
            acc = tl.dot(weights, tl.trans(x), acc=acc)
        if tile == tiles - 1:
            rows = first_row + each
            row_axis: tl.constexpr = 1 if SWAPPED else 0
            rows_wide = tl.expand_dims(rows, 1 - row_axis)
            tokens_wide = tl.expand_dims(tokens, row_axis)
            out = acc
            if BIAS:
                bias = tl.load(bias_ptr + rows, mask=rows < outputs, other=0.0)
                out += tl.expand_dims(bias.to(tl.float32), 1 - row_axis)
            out_at = out_ptr + tokens_wide * outputs + rows_wide
            out_mask = (rows_wide < outputs) & (tokens_wide < num_tokens)
            tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=out_mask)
            acc = tl.zeros([TOKENS, ROWS] if SWAPPED else [ROWS, TOKENS], tl.float32)


def _strips(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cut: SkinnyCut,
    out: torch.Tensor,
) -> None:
    num_tokens, (outputs, inputs) = x.shape[0], weight.shape
    tokens = max(16, triton.next_power_of_2(num_tokens))
    num_strips = triton.cdiv(outputs, cut.outputs)
    _strip_kernel[(min(num_strips, cut.programs_per_sm * num_sms(x.device)),)](
        TensorDescriptor.from_tensor(x.contiguous(), [tokens, cut.inputs]),
        TensorDescriptor.from_tensor(weight, [cut.outputs, cut.inputs]),
        weight,
        x if bias is None else bias,
        out,
        num_tokens,
        outputs,
        inputs,
        BIAS=bias is not None,
        SWAPPED=cut.outputs < 64,
        TOKENS=tokens,
        ROWS=cut.outputs,
        BLOCK=cut.inputs,
        STAGES=cut.stages,
        num_warps=cut.warps,
        **launch_options(x.device),
    )


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
        _strips(x, weight, bias, cut, out)
    return out


def linear_silu_mul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cut: SkinnyCut
) -> torch.Tensor:
    """See matmul.linear_silu_mul; one row, weight is contiguous."""
    assert weight.is_contiguous()
    assert x.shape[0] == 1
    out = x.new_empty(1, weight.shape[0] // 2)
    _vector(x, weight, bias, cut, out, gated=True)
    return out
