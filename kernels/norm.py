"""RMS normalization, alone and fused with the residual addition before it."""

import torch

from nvserve.kernels import reference
from nvserve.kernels.dispatch import uses_triton


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize rows of x [..., N] and scale by weight [N]; returns a new tensor of x's dtype.

    Rows must be contiguous in the last dimension. Math is in float32.
    """
    if not uses_triton(x):
        return reference.rms_norm(x, weight, eps)
    # Triton is absent from CPU-only installs, so its kernels load with their first use.
    from nvserve.kernels import norm_triton

    return norm_triton.rms_norm(x, weight, eps)


def embed_rms_norm(
    tokens: torch.Tensor, embedding: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalized rows, the rows): rows tokens [T] int64 of embedding [V, N]; both new [T, N]."""
    if not uses_triton(tokens):
        return reference.embed_rms_norm(tokens, embedding, weight, eps)
    from nvserve.kernels import norm_triton

    return norm_triton.embed_rms_norm(tokens, embedding, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalized x + residual, residual): residual [..., N] is updated in place.

    Both inputs are contiguous with the same shape and dtype; the sum is rounded to that dtype
    before it is normalized, so that the stored residual is what was normalized.
    """
    if not uses_triton(x):
        return reference.add_rms_norm(x, residual, weight, eps)
    from nvserve.kernels import norm_triton

    return norm_triton.add_rms_norm(x, residual, weight, eps)
