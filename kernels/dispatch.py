"""Decides which implementation an operation uses: Triton on CUDA, plain torch elsewhere."""

import importlib.util
import os
from typing import Final

import torch

HAS_TRITON: Final = importlib.util.find_spec("triton") is not None

# Set before the first import of triton: every kernel then runs on the CPU, one program after
# another, which is how the tests check the kernels' arithmetic without a GPU.
INTERPRETED: Final = os.environ.get("TRITON_INTERPRET", "0") == "1"


def uses_triton(tensor: torch.Tensor) -> bool:
    """True where the Triton kernel serves this tensor's device."""
    return HAS_TRITON and (tensor.is_cuda or INTERPRETED)
