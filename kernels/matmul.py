"""The projections: skinny_cut, one function of the shape, chooses the matmul kernel.

A decode step with few rows only streams weights. Where that was measured faster than cuBLAS, the
Triton kernels of matmul_triton.py do it: for one row on the ordinary units, for more on the matrix
units. They fetch weights before the kernel ahead of them has finished, which cuBLAS cannot.

T tokens, K inputs, N outputs.
"""

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F

from nvserve.kernels.activation import silu_and_mul
from nvserve.kernels.dispatch import HAS_TRITON


class SkinnyCut(NamedTuple):
    """How a skinny matmul is cut: outputs and inputs of a tile, stages, warps, programs per SM.

    For one token there are neither stages nor persistent programs; those two are 1.
    """

    outputs: int
    inputs: int
    stages: int
    warps: int
    programs_per_sm: int = 1


# Measured on H200 (torch 2.11, cuBLAS 13.0), microseconds ours / cuBLAS.
#     T   N x K            ours   cuBLAS        T   N x K            ours   cuBLAS
#     1   4096 x 1024       3.4      4.9        8   4096 x 1024       4.0      4.9
#     1   1024 x 2048       2.2     12.8        8   1024 x 2048       4.5      5.9
#     1   6144 x 1024       4.2      6.0        8   6144 x 1024       6.5      6.1
#     1   1024 x 3072       3.1      6.7        8   1024 x 3072       5.9      6.7
#     1   151936 x 1024    70.9     75.1        8   151936 x 1024    76.6     79.9
#     1   6144 x 4096      13.7     15.7        8   6144 x 4096      16.5     16.1
#     1   4096 x 4096      10.0     12.7        8   4096 x 4096      11.2     12.7
#     1   28672 x 4096     54.5     56.2        8   28672 x 4096     60.0     57.5
#     1   4096 x 14336     29.1     31.3        8   4096 x 14336     31.7     32.4
_SMALL_WEIGHT: Final = 1 << 23  # elements: here the gaps between kernels cost more than the bytes
_HEAD_OUTPUTS: Final = 100_000
_DEEP: Final = SkinnyCut(64, 256, 5, 4, 1)


def skinny_cut(num_tokens: int, outputs: int, inputs: int, dtype: torch.dtype) -> SkinnyCut | None:
    """The cut of the Triton kernel for this shape, or None for cuBLAS."""
    if dtype != torch.bfloat16 or num_tokens > 32 or inputs % 8:
        return None
    if num_tokens == 1:
        if inputs > 1024:
            return SkinnyCut(2, 2048, 1, 4)
        return SkinnyCut(16 if outputs > 4096 else 8, 512, 1, 4)
    if outputs >= _HEAD_OUTPUTS:
        return SkinnyCut(128, 128, 5, 4, 1) if inputs <= 1024 or num_tokens > 16 else _DEEP
    if outputs * inputs <= _SMALL_WEIGHT:
        if inputs > 1024:
            return _DEEP if num_tokens <= 16 else None
        return SkinnyCut(64, 256, 3, 4, 2) if outputs <= 4096 else SkinnyCut(64, 128, 5, 4, 2)
    return _DEEP if outputs <= 4096 and num_tokens <= 16 else None


def gated_cut(num_tokens: int, outputs: int, inputs: int, dtype: torch.dtype) -> SkinnyCut | None:
    """As skinny_cut, of linear_silu_mul; outputs are those of the result."""
    if dtype != torch.bfloat16 or num_tokens > 32 or inputs % 8:
        return None
    if num_tokens == 1:
        return SkinnyCut(8, 512, 1, 4) if inputs <= 1024 else SkinnyCut(1, 2048, 1, 4)
    return SkinnyCut(64, 128, 5, 4, 1)


def _cut(x: torch.Tensor, weight: torch.Tensor, is_gated: bool = False) -> SkinnyCut | None:
    if not (HAS_TRITON and x.is_cuda) or x.shape[0] == 0:
        return None
    if torch.cuda.get_device_capability(x.device)[0] < 9:
        return None  # measured, and for more than one row possible, only there
    if is_gated:
        return gated_cut(x.shape[0], weight.shape[0] // 2, weight.shape[1], x.dtype)
    return skinny_cut(x.shape[0], weight.shape[0], weight.shape[1], x.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N] in x's dtype."""
    cut = _cut(x, weight)
    if cut is None:
        return F.linear(x, weight, bias)
    # Triton is absent from CPU-only installs, so its kernels load with their first use.
    from nvserve.kernels import matmul_triton

    return matmul_triton.linear(x, weight, bias, cut)


def linear_silu_mul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """silu(gate) * up of linear(x) [T, 2 * I], gate first: [T, I]. One kernel where that pays."""
    cut = _cut(x, weight, is_gated=True)
    if cut is None:
        return silu_and_mul(linear(x, weight, bias))
    from nvserve.kernels import matmul_triton

    return matmul_triton.linear_silu_mul(x, weight, bias, cut)
