"""The projections: skinny_cut and gated_cut, functions of the shape, choose the matmul kernel.

A decode step with few rows only streams weights. Where that was measured faster than cuBLAS, our
Triton kernels do it: for one row on the ordinary units (matmul_triton.py), for more on the matrix
units (matmul_strips.py). They fetch weights before the kernel ahead of them has finished, which
cuBLAS cannot.

T tokens, K inputs, N outputs.
"""

import functools
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F

from nvserve.kernels.activation import silu_and_mul
from nvserve.kernels.dispatch import HAS_TRITON


class SkinnyCut(NamedTuple):
    """How a skinny matmul is cut: outputs and inputs of a tile, stages, warps, programs per SM.

    For one token there are neither stages nor persistent programs; those two are 1. Programs take
    whole strips of `outputs`, or equal shares of the tiles of all strips, for which they meet.
    """

    outputs: int
    inputs: int
    stages: int
    warps: int
    programs_per_sm: int = 1
    equal_shares: bool = False


# Measured on H200 (torch 2.11, cuBLAS 13.0), microseconds ours / cuBLAS; "gated" with SiLU and mul,
# "in shares" where programs meet.
#     N x K                 T = 1           T = 8           T = 32
#     4096 x 1024         3.4 /  5.0      4.1 /  5.4      4.1 /  5.4
#     1024 x 2048         2.2 / 12.8      4.6 /  6.0      4.6 /  5.9
#     1024 x 3072         3.2 /  6.7      6.0 /  6.9      5.7 /  7.0 in shares
#     6144 x 4096        13.2 / 16.0     17.1 / 16.2     17.3 / 16.6
#     4096 x 4096         9.9 / 12.8     11.0 / 12.8     12.7 / 13.4
#     4096 x 14336       28.9 / 31.7     31.3 / 31.9     34.9 / 33.9 in shares
#     5120 x 8192                        25.3 / 27.1     26.6 / 27.2 in shares
#     8192 x 4096                        19.3 / 19.0     19.9 / 19.6
#     8192 x 14336                       57.8 / 60.2     59.6 / 61.6
#     gated 3072 x 1024   4.4 /  7.0      7.7 /  7.2      6.6 /  7.3
#     gated 14336 x 4096 55.0 / 61.2     64.3 / 58.5     65.8 / 62.4
#     gated 14336 x 8192                117.8 / 112.3   122.3 / 114.7
# In a step ours gain more, since they start before the kernel ahead of them has ended: a whole step
# of the 8B was 1 to 2 % faster with ours where the figures are nearly equal. Equal shares, which
# use all multiprocessors, seldom pay for the meeting: 1 % of that step for 4096 x 14336. With 33
# to 128 tokens a step of the 0.6B gains 1 to 7 % by _wider_cut, of the 8B 1 % from 112 on, though
# the kernels alone are the slower ones there; before that, 0 to 1 % is lost.
_HEAD_OUTPUTS: Final = 100_000
_MANY_TOKENS: Final = 1024
_LONG_INPUTS: Final = 8192
_FEW_INPUTS: Final = 3072
_NARROW: Final = SkinnyCut(8, 512, 4, 2)
_MIDDLE: Final = SkinnyCut(32, 512, 3, 4)
_SHORT: Final = SkinnyCut(64, 256, 3, 4)
_DEEP: Final = SkinnyCut(64, 256, 5, 4)
_THIN_SHARES: Final = SkinnyCut(16, 256, 4, 2, 2, equal_shares=True)
_SHARES: Final = SkinnyCut(64, 256, 4, 4, equal_shares=True)
_WIDE: Final = SkinnyCut(64, 128, 4, 4)


def skinny_cut(num_tokens: int, outputs: int, inputs: int, dtype: torch.dtype) -> SkinnyCut | None:
    """The cut of the Triton kernel for this shape, or None for cuBLAS."""
    if dtype != torch.bfloat16 or num_tokens > 128 or inputs % 8:
        return None
    if num_tokens > 32:
        return _wider_cut(num_tokens, outputs, inputs)
    if num_tokens == 1:
        if inputs > 1024:
            return SkinnyCut(2, 1024 if outputs > 4096 else 2048, 1, 4)
        return SkinnyCut(16 if outputs > 4096 else 8, 512, 1, 4)
    is_wide = num_tokens > 16
    if outputs >= _HEAD_OUTPUTS:
        return SkinnyCut(128, 128, 5, 4) if inputs <= 1024 or is_wide else _DEEP
    if inputs <= 1024:
        if outputs <= 4096:
            return _SHORT
        return None if is_wide else SkinnyCut(64, 128, 5, 4, 2)
    if outputs <= 2048:
        if not is_wide:
            return _DEEP
        return _NARROW if inputs <= 2048 else _THIN_SHARES
    if outputs < 8192 and inputs >= _LONG_INPUTS:
        return _SHARES
    if outputs <= 4096:
        return _MIDDLE if is_wide else _DEEP
    if outputs <= 8192:
        return _SHORT if is_wide else _DEEP
    return None


def _wider_cut(num_tokens: int, outputs: int, inputs: int) -> SkinnyCut | None:
    """For 33 to 128 tokens: where a whole step was measured faster than with cuBLAS."""
    is_narrow = num_tokens <= 64
    if inputs <= 1024:
        return _WIDE if outputs <= 4096 else None
    if inputs > 4096 or (inputs > _FEW_INPUTS and num_tokens < 112):
        return None
    if outputs <= 2048:
        return SkinnyCut(16, 256, 3, 4, 2) if inputs <= 2048 and is_narrow else None
    if outputs <= 4096:
        return SkinnyCut(32, 128, 5, 4, 2)
    return _WIDE if outputs <= 6144 and not is_narrow else None


def gated_cut(num_tokens: int, outputs: int, inputs: int, dtype: torch.dtype) -> SkinnyCut | None:
    """As skinny_cut, of linear_silu_mul; outputs are those of the result."""
    if dtype != torch.bfloat16 or num_tokens > 32 or inputs % 8:
        return None
    if num_tokens == 1:
        return SkinnyCut(8, 512, 1, 4) if inputs <= 1024 else SkinnyCut(1, 2048, 1, 4)
    is_wide = num_tokens > 16
    return SkinnyCut(16, 256, 4, 2, 2) if is_wide and inputs <= 1024 else None


@functools.cache
def _has_room(device: torch.device) -> bool:
    """For cuts of 200 KB of shared memory: Hopper, and the Blackwell of data centers."""
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def _cut(x: torch.Tensor, weight: torch.Tensor, is_gated: bool = False) -> SkinnyCut | None:
    if not (HAS_TRITON and x.is_cuda) or x.shape[0] == 0:
        return None
    if not _has_room(x.device):
        return None
    if is_gated:
        return gated_cut(x.shape[0], weight.shape[0] // 2, weight.shape[1], x.dtype)
    return skinny_cut(x.shape[0], weight.shape[0], weight.shape[1], x.dtype)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N] in x's dtype.

    Written to `out` where that is given, which is contiguous, and then without a bias.
    """
    assert out is None or bias is None
    cut = _cut(x, weight)
    if cut is None:
        return F.linear(x, weight, bias) if out is None else torch.mm(x, weight.t(), out=out)
    # Triton is absent from CPU-only installs, so its kernels load with their first use.
    from nvserve.kernels import matmul_triton

    return matmul_triton.linear(x, weight, bias, cut, out)


def adds_in_matmul(x: torch.Tensor) -> bool:
    """Is linear_add faster than linear, with the sum in the norm behind it?

    On H200 with 8192 tokens: 389 / 447 us with the norm for 4096 x 4096, 1362 / 1402 us for
    4096 x 14336; at 512 tokens 28.0 / 29.0 and 82.6 / 82.6 us.
    """
    return x.is_cuda and x.shape[0] >= _MANY_TOKENS


def linear_add(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """residual [T, N] += x [T, K] times weight [N, K] transposed; the sum is rounded once."""
    return torch.addmm(residual, x, weight.t(), out=residual)


def linear_silu_mul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """silu(gate) * up of linear(x) [T, 2 * I], gate first: [T, I]. One kernel where that pays."""
    cut = _cut(x, weight, is_gated=True)
    if cut is None:
        return silu_and_mul(linear(x, weight, bias))
    from nvserve.kernels import matmul_triton

    return matmul_triton.linear_silu_mul(x, weight, bias, cut)
