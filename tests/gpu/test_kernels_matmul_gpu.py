"""The skinny matmuls against their torch twins."""

import pytest
import torch
from gpu.kernel_cases import MARKS, assert_close, on_gpu_only, random

from nvserve.kernels import matmul, reference
from nvserve.kernels.dispatch import HAS_TRITON

pytestmark = MARKS

PROJECTIONS = [(6144, 4096), (4096, 14336), (1024, 3072), (96, 80), (1000, 2056)]


@on_gpu_only
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(("outputs", "inputs"), PROJECTIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_matches_the_reference(
    num_tokens: int, outputs: int, inputs: int, biased: bool
) -> None:
    x = random(num_tokens, inputs, dtype=torch.bfloat16)
    weight = random(outputs, inputs, dtype=torch.bfloat16)
    bias = 10 * random(outputs, dtype=torch.bfloat16) if biased else None
    assert_close(matmul.linear(x, weight, bias), reference.linear(x, weight, bias), 6e-3)


@on_gpu_only
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 16, 32, 33])
@pytest.mark.parametrize(("outputs", "inputs"), PROJECTIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_silu_mul_matches_its_parts(
    num_tokens: int, outputs: int, inputs: int, biased: bool
) -> None:
    x = random(num_tokens, inputs, dtype=torch.bfloat16)
    weight = 0.1 * random(2 * outputs, inputs, dtype=torch.bfloat16)
    bias = random(2 * outputs, dtype=torch.bfloat16) if biased else None
    out = matmul.linear_silu_mul(x, weight, bias)
    wide = reference.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert_close(out.float(), reference.silu_and_mul(wide), 1.2e-2)


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.parametrize("biased", [False, True])
def test_the_vector_kernel_matches_the_reference_at_ragged_edges(biased: bool) -> None:
    from nvserve.kernels import matmul_triton

    x, weight, gate_up = random(1, 200), random(37, 200), random(74, 200)
    bias = random(74) if biased else None
    cut = matmul.SkinnyCut(8, 64, 1, 4)
    short = None if bias is None else bias[:37]
    out = matmul_triton.linear(x, weight, short, cut)
    assert_close(out, reference.linear(x, weight, short), 2e-6)
    out = matmul_triton.linear_silu_mul(x, gate_up, bias, cut)
    assert_close(out, reference.silu_and_mul(reference.linear(x, gate_up, bias)), 2e-6)
