"""The projections: one function, skinny_cut, chooses the matmul kernel from the shape.

A decode step with few rows only streams weights. There the Triton kernels of matmul_triton.py beat
cuBLAS: they fetch weights before the kernel ahead has finished (dependent launch), and take the
operation before the projection (residual add and RMS norm, or SiLU * up) into their own loads.
Everywhere else it is cuBLAS, with that operation as a kernel of its own.

T tokens, K inputs, N outputs.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nvserve.kernels.activation import silu_and_mul
from nvserve.kernels.dispatch import HAS_TRITON
from nvserve.kernels.norm import add_rms_norm, rms_norm


class SkinnyCut(NamedTuple):
    """How a skinny matmul is cut: outputs and inputs of a tile, stages, warps, programs per SM.

    With one token there are neither stages nor persistent programs; those two are 1.
    """

    outputs: int
    inputs: int
    stages: int
    warps: int
    programs_per_sm: int = 1


def skinny_cut(num_tokens: int, outputs: int, inputs: int, dtype: torch.dtype) -> SkinnyCut | None:
    """The cut of the Triton kernel where it was measured faster than cuBLAS; None for cuBLAS."""
    if dtype != torch.bfloat16 or num_tokens > 16 or inputs % 8:
        return None
    if num_tokens == 1:
        if inputs > 1024:
            return SkinnyCut(2, 2048, 1, 4)
        return SkinnyCut(16 if outputs > 4096 else 8, 512, 1, 4)
    return SkinnyCut(16, 256, 5, 2, 3) if outputs <= 2048 else SkinnyCut(32, 256, 4, 4, 2)


def _cut(x: torch.Tensor, weight: torch.Tensor, num_tokens: int) -> SkinnyCut | None:
    if not (HAS_TRITON and x.is_cuda) or num_tokens == 0:
        return None
    return skinny_cut(num_tokens, weight.shape[0], weight.shape[1], x.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N] in x's dtype."""
    cut = _cut(x, weight, x.shape[0])
    if cut is None:
        return F.linear(x, weight, bias)
    # Triton is absent from CPU-only installs, so its kernels load with their first use.
    from nvserve.kernels import matmul_triton

    return matmul_triton.linear(x, weight, bias, cut)


def add_rms_norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """linear(rms_norm(x + residual)) and the sum x + residual, [T, N] and [T, K].

    Without a residual the sum is x. The sum may be the residual's memory or new memory: go on with
    what is returned and drop both arguments.
    """
    cut = _cut(x, weight, x.shape[0])
    if cut is not None:
        from nvserve.kernels import matmul_triton

        return matmul_triton.add_rms_norm_linear(x, residual, norm_weight, eps, weight, bias, cut)
    if residual is None:
        return linear(rms_norm(x, norm_weight, eps), weight, bias), x
    normed, residual = add_rms_norm(x, residual, norm_weight, eps)
    return linear(normed, weight, bias), residual


def silu_mul_linear(
    gate_up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """linear(silu_and_mul(gate_up)): gate_up [T, 2 * K], weight [N, K], result [T, N]."""
    cut = _cut(gate_up, weight, gate_up.shape[0])
    if cut is None:
        return linear(silu_and_mul(gate_up), weight, bias)
    from nvserve.kernels import matmul_triton

    return matmul_triton.silu_mul_linear(gate_up, weight, bias, cut)
