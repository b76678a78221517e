"""The gated activation of the feed-forward layers."""

import torch

from nvserve.kernels import reference
from nvserve.kernels.dispatch import uses_triton


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up [T, 2 * I] (gate first), contiguous; returns [T, I]."""
    if not uses_triton(gate_up):
        return reference.silu_and_mul(gate_up)
    # Triton is absent from CPU-only installs, so its kernels load with their first use.
    from nvserve.kernels import activation_triton

    return activation_triton.silu_and_mul(gate_up)
