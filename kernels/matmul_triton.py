"""Skinny matmuls: few rows of x against a weight that is streamed once.

One program takes a strip of outputs and all inputs. Weights do not depend on earlier kernels, so a
program asks for its first ones before it waits for x; with dependent launch the memory stays busy
across the boundary between two kernels.

The operation before the projection is part of the load of x (PROLOGUE):
  PLAIN     x
  NORM      RMS norm of x: x times the norm's weight here, the row's scale at the end
  ADD_NORM  the same of x + residual, rounded as stored; the first program stores the sums
  SILU      silu(gate) * up
"""

from typing import Final

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
    start_next,
)
from nvserve.kernels.matmul import SkinnyCut

PLAIN: Final = tl.constexpr(0)
NORM: Final = tl.constexpr(1)
ADD_NORM: Final = tl.constexpr(2)
SILU: Final = tl.constexpr(3)


@jit
def _load_inputs(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    norm_weight_ptr,
    sum_ptr,
    at,
    columns,
    inside,
    inputs,
    stores,
    PROLOGUE: tl.constexpr,
):
    """x at offsets `at` (columns are within the row), float32: (as multiplied, as squared).

    For SILU, `at` counts rows of inputs elements, and the rows in memory are twice as long.
    """
    if PROLOGUE == SILU:
        gate_at = x_ptr + at * 2 - columns
        gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_at + inputs, mask=inside, other=0.0).to(tl.float32)
        x = gate / (1.0 + tl.exp(-gate)) * up
        return x, x
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if PROLOGUE == ADD_NORM:
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rounded = (x + residual).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, rounded, mask=inside & stores)
        x = rounded.to(tl.float32)
    if PROLOGUE == PLAIN:
        return x, x
    norm_weight = tl.load(norm_weight_ptr + columns, mask=columns < inputs, other=0.0)
    return x * norm_weight.to(tl.float32), x


@jit
def _vector_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    norm_weight_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    sum_ptr,
    outputs,
    inputs,
    eps,
    PROLOGUE: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of x: multiply and add on the ordinary units, weights straight to registers."""
    program = tl.program_id(0)
    rows = program * ROWS + tl.arange(0, ROWS)
    in_rows = rows < outputs
    block = tl.arange(0, BLOCK)
    weight_at = weight_ptr + rows.to(tl.int64)[:, None] * inputs + block[None, :]
    mask = in_rows[:, None] & (block < inputs)[None, :]
    weights = tl.load(weight_at, mask=mask, other=0.0, eviction_policy="evict_first")
    start_next(PDL)
    inputs_ready(PDL)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, inputs, BLOCK):
        columns = first + block
        later = in_rows[:, None] & (columns + BLOCK < inputs)[None, :]
        next_weights = tl.load(
            weight_at + first + BLOCK, mask=later, other=0.0, eviction_policy="evict_first"
        )
        x, raw = _load_inputs(
            x_ptr,
            residual_ptr,
            norm_weight_ptr,
            sum_ptr,
            columns,
            columns,
            columns < inputs,
            inputs,
            program == 0,
            PROLOGUE,
        )
        acc += weights.to(tl.float32) * x[None, :]
        if (PROLOGUE == NORM) | (PROLOGUE == ADD_NORM):
            squares += raw * raw
        weights = next_weights
    out = tl.sum(acc, axis=1)
    if (PROLOGUE == NORM) | (PROLOGUE == ADD_NORM):
        out = out * tl.rsqrt(tl.sum(squares) / inputs + eps)
    if BIAS:
        out += tl.load(bias_ptr + rows, mask=in_rows, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, out.to(out_ptr.dtype.element_ty), mask=in_rows)


@jit_general("num_tokens")
def _strip_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    norm_weight_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    sum_ptr,
    num_tokens,
    outputs,
    inputs,
    eps,
    PROLOGUE: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Up to TOKENS rows of x on the matrix units, weights through a pipeline in shared memory.

    A program takes every num_programs-th strip of ROWS outputs; one loop runs over the tiles of
    all of them, so that the pipeline does not drain between two strips.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    strips = tl.cdiv(tl.cdiv(outputs, ROWS) - program, num_programs)
    tiles = tl.cdiv(inputs, BLOCK)
    each = tl.arange(0, ROWS)
    tokens = tl.arange(0, TOKENS)
    in_tokens = tokens < num_tokens
    block = tl.arange(0, BLOCK)
    if PDL:
        # Rows past the end repeat the last one; their results are not stored.
        first_rows = tl.minimum(program * ROWS + each, outputs - 1).to(tl.int64)
        prefetch_rows(weight_ptr + first_rows * inputs, tl.minimum(2 * inputs, 2048))
    start_next(PDL)
    inputs_ready(PDL)
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    squares = tl.zeros([TOKENS], tl.float32)
    for step in tl.range(0, strips * tiles, num_stages=STAGES):
        strip = program + step // tiles * num_programs
        tile = step % tiles
        rows = strip * ROWS + each
        columns = tile * BLOCK + block
        in_columns = columns < inputs
        weight_rows = tl.minimum(rows, outputs - 1).to(tl.int64) * inputs
        weights = tl.load(
            weight_ptr + weight_rows[:, None] + columns[None, :],
            mask=in_columns[None, :],
            other=0.0,
        )
        x, raw = _load_inputs(
            x_ptr,
            residual_ptr,
            norm_weight_ptr,
            sum_ptr,
            tokens[:, None] * inputs + columns[None, :],
            columns[None, :],
            in_tokens[:, None] & in_columns[None, :],
            inputs,
            strip == 0,
            PROLOGUE,
        )
        acc = tl.dot(weights, tl.trans(x.to(weights.dtype)), acc=acc)
        if (PROLOGUE == NORM) | (PROLOGUE == ADD_NORM):
            squares += tl.sum(raw * raw, axis=1)
        if tile == tiles - 1:
            in_rows = rows < outputs
            out = acc
            if (PROLOGUE == NORM) | (PROLOGUE == ADD_NORM):
                out = out * tl.rsqrt(squares / inputs + eps)[None, :]
            if BIAS:
                bias = tl.load(bias_ptr + rows, mask=in_rows, other=0.0)
                out += bias.to(tl.float32)[:, None]
            out_at = out_ptr + tokens[None, :] * outputs + rows[:, None]
            out_mask = in_rows[:, None] & in_tokens[None, :]
            tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=out_mask)
            acc = tl.zeros([ROWS, TOKENS], tl.float32)
            squares = tl.zeros([TOKENS], tl.float32)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cut: SkinnyCut,
    prologue: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product and, with ADD_NORM, the sums (otherwise x)."""
    num_tokens, (outputs, inputs) = x.shape[0], weight.shape
    assert weight.is_contiguous()
    x = x.contiguous()
    out = x.new_empty(num_tokens, outputs)
    sums = x if residual is None else torch.empty_like(x)
    pointers = (
        x,
        x if residual is None else residual.contiguous(),
        x if norm_weight is None else norm_weight,
        weight,
        x if bias is None else bias,
        out,
        sums,
    )
    num_strips = triton.cdiv(outputs, cut.outputs)
    shape = {"PROLOGUE": prologue, "BIAS": bias is not None, "ROWS": cut.outputs}
    options = {"num_warps": cut.warps, **launch_options(x.device)}
    if num_tokens == 1:
        block = min(cut.inputs, triton.next_power_of_2(inputs))
        _vector_kernel[(num_strips,)](
            *pointers, outputs, inputs, eps, BLOCK=block, **shape, **options
        )
        return out, sums
    num_programs = min(num_strips, cut.programs_per_sm * num_sms(x.device))
    _strip_kernel[(num_programs,)](
        *pointers,
        num_tokens,
        outputs,
        inputs,
        eps,
        TOKENS=max(16, triton.next_power_of_2(num_tokens)),
        BLOCK=min(cut.inputs, triton.next_power_of_2(inputs)),
        STAGES=cut.stages,
        **shape,
        **options,
    )
    return out, sums


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cut: SkinnyCut
) -> torch.Tensor:
    """See matmul.linear."""
    return _launch(x, None, None, 0.0, weight, bias, cut, PLAIN.value)[0]


def add_rms_norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cut: SkinnyCut,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See matmul.add_rms_norm_linear; the sums are new memory, for other programs still read."""
    prologue = (NORM if residual is None else ADD_NORM).value
    return _launch(x, residual, norm_weight, eps, weight, bias, cut, prologue)


def silu_mul_linear(
    gate_up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cut: SkinnyCut
) -> torch.Tensor:
    """See matmul.silu_mul_linear."""
    return _launch(gate_up, None, None, 0.0, weight, bias, cut, SILU.value)[0]
