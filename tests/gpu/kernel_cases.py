"""What the tests of the Triton kernels share: device, marks, tolerances, random inputs.

A shape grid on a GPU, a few shapes interpreted: with TRITON_INTERPRET=1 the same tests run on the
CPU (tests/test_kernels_interpreted.py starts that process); dependent launch and CUDA graphs need
the GPU.
"""

import pytest
import torch

from nvserve.kernels.dispatch import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
MARKS = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("_seed"),
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"
    ),
]
on_gpu_only = pytest.mark.skipif(INTERPRETED, reason="the interpreter cannot run it")

DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}

if INTERPRETED:
    import triton_interpreter  # where there is no triton there is nothing to interpret

    triton_interpreter.mend()


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(device=DEVICE, dtype=dtype)


def assert_close(out: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    error = (out.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    assert error.item() <= tolerance, f"relative error {error.item():.2e} over {tolerance:.0e}"
