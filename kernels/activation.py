"""The gated activation of the feed-forward layers."""

import torch

from nvserve.kernels import reference
from nvserve.kernels.dispatch import uses_triton
from nvserve.kernels.norm import DeferredNorm


def silu_and_mul(gate_up: torch.Tensor, norm: DeferredNorm | None = None) -> torch.Tensor:
    """silu(gate) * up of gate_up [T, 2 * I] (gate first), contiguous; returns [T, I].

    `norm` is what gate_up was made from without scaling it, which is done here; where the Triton
    kernels serve.
    """
    if not uses_triton(gate_up):
        assert norm is None, "nothing is deferred here"
        return reference.silu_and_mul(gate_up)
    # Triton is absent from CPU-only installs, so its kernels load with their first use.
    from nvserve.kernels import activation_triton

    return activation_triton.silu_and_mul(gate_up, norm)
