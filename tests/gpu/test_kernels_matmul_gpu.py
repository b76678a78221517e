"""The skinny matmuls against their torch twins."""

import pytest
import torch
from gpu.kernel_cases import MARKS, assert_close, on_gpu_only, random

from nvserve.kernels import matmul, reference, room
from nvserve.kernels.dispatch import HAS_TRITON, INTERPRETED
from nvserve.kernels.matmul import SkinnyCut

pytestmark = MARKS

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")

PROJECTIONS = [(6144, 4096), (4096, 14336), (1024, 3072), (1024, 2048), (96, 80), (1000, 2056)]


@on_gpu_only
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 16, 17, 32, 33, 64, 65, 100, 128])
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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_linear_add_rounds_the_sum_once(dtype: torch.dtype) -> None:
    x, weight = random(1024, 4096, dtype=dtype), random(96, 4096, dtype=dtype)
    residual = random(1024, 96, dtype=dtype)
    assert matmul.adds_in_matmul(x)
    expected = residual.double() + x.double() @ weight.double().t()
    assert matmul.linear_add(x, weight, residual) is residual
    assert_close(residual.double(), expected, 5e-6 if dtype == torch.float32 else 4e-3)


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


@needs_triton
@pytest.mark.parametrize("biased", [False, True])
def test_the_vector_kernel_matches_the_reference_at_ragged_edges(biased: bool) -> None:
    from nvserve.kernels import matmul_triton

    x, weight, gate_up = random(1, 200), random(37, 200), random(74, 200)
    bias = random(74) if biased else None
    cut = SkinnyCut(8, 64, 1, 4)
    short = None if bias is None else bias[:37]
    out = matmul_triton.linear(x, weight, short, cut)
    assert_close(out, reference.linear(x, weight, short), 2e-6)
    out = matmul_triton.linear_silu_mul(x, gate_up, bias, cut)
    assert_close(out, reference.silu_and_mul(reference.linear(x, gate_up, bias)), 2e-6)


def check_strips(num_tokens: int, outputs: int, inputs: int, biased: bool, cut: SkinnyCut) -> None:
    """Both matmuls are right, twice of the same bits, and leave nobody counted as arrived."""
    from nvserve.kernels import matmul_strips, matmul_triton

    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    x = random(num_tokens, inputs, dtype=dtype)
    weight = 0.1 * random(2 * outputs, inputs, dtype=dtype)
    bias = random(2 * outputs, dtype=dtype) if biased else None
    wide = reference.linear(x.float(), weight.float(), None if bias is None else bias.float())
    half = None if bias is None else bias[:outputs]
    tolerance = 2e-6 if INTERPRETED else 6e-3
    first: list[torch.Tensor] = []
    for _ in range(2):
        out = matmul_triton.linear(x, weight[:outputs], half, cut)
        gated = matmul_triton.linear_silu_mul(x, weight, bias, cut)
        assert_close(out.float(), wide[:, :outputs], tolerance)
        assert_close(gated.float(), reference.silu_and_mul(wide), tolerance)
        first = first or [out, gated]
        assert torch.equal(out, first[0])
        assert torch.equal(gated, first[1])
        assert not matmul_strips.workspace(x.device, 0, 0).arrivals.any()


@needs_triton
@pytest.mark.parametrize(
    ("num_tokens", "outputs", "inputs"),
    [
        (2, 37, 200),
        (5, 130, 72),
        (17, 16, 40),
        (32, 70, 96),
        (3, 16, 400),
        (50, 37, 96),
        (100, 40, 72),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(("programs_per_sm", "equal_shares"), [(1, False), (1, True), (3, True)])
def test_strips_match_the_reference_at_ragged_edges(
    num_tokens: int,
    outputs: int,
    inputs: int,
    biased: bool,
    rows: int,
    programs_per_sm: int,
    equal_shares: bool,
) -> None:
    cut = SkinnyCut(rows, 32, 2, 4, programs_per_sm, equal_shares)
    check_strips(num_tokens, outputs, inputs, biased, cut)


@needs_triton
@pytest.mark.parametrize("num_tokens", [5, 20, 72])
def test_what_is_behind_the_rows_changes_no_result(num_tokens: int) -> None:
    from nvserve.kernels import matmul_triton

    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    tokens = room.tile_tokens(num_tokens)
    whole = random(tokens, 96, dtype=dtype)
    x, weight = whole[:num_tokens], random(148, 96, dtype=dtype)
    assert room.has_room(x, tokens)
    alone = x.clone()
    assert not room.has_room(alone, tokens)
    whole[num_tokens:] = float("nan")
    cut = SkinnyCut(64, 32, 2, 4)
    expected = matmul_triton.linear(alone, weight, None, cut)
    assert torch.equal(matmul_triton.linear(x, weight, None, cut), expected)
    expected = matmul_triton.linear_silu_mul(alone, weight, None, cut)
    assert torch.equal(matmul_triton.linear_silu_mul(x, weight, None, cut), expected)


@needs_triton
@pytest.mark.skipif(not INTERPRETED, reason="programs of a GPU run in no order of ours")
@pytest.mark.parametrize("shift", [1, 3, 5])
def test_whichever_program_arrives_last_the_bits_are_the_same(
    shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime import interpreter

    from nvserve.kernels import matmul_strips, matmul_triton

    x, weight, bias = random(5, 400), random(74, 400), random(74)
    cut = SkinnyCut(16, 32, 2, 4, 3, True)  # 9 programs, 13 tiles of each of 3 or 5 strips
    expected = [
        matmul_triton.linear(x, weight, bias, cut),
        matmul_triton.linear_silu_mul(x, weight, bias, cut),
    ]
    builder = interpreter.interpreter_builder
    set_index = builder.set_grid_idx
    order: list[int] = []

    def set_other_index(*index: int) -> None:
        """Backwards, and not from the last."""
        num_programs = builder.grid_dim[0]
        order.append((shift - index[0]) % num_programs)
        set_index(order[-1], *index[1:])

    monkeypatch.setattr(builder, "set_grid_idx", set_other_index)
    assert torch.equal(matmul_triton.linear(x, weight, bias, cut), expected[0])
    assert torch.equal(matmul_triton.linear_silu_mul(x, weight, bias, cut), expected[1])
    assert sorted(order) == sorted([*range(9), *range(9)])
    assert order != sorted(order)
    assert not matmul_strips.workspace(x.device, 0, 0).arrivals.any()


@on_gpu_only
@pytest.mark.parametrize("num_tokens", [2, 8, 16, 17, 32])
@pytest.mark.parametrize(("outputs", "inputs"), PROJECTIONS)
@pytest.mark.parametrize(
    "cut",
    [
        SkinnyCut(64, 128, 4, 4, 2, True),
        SkinnyCut(64, 128, 5, 4, 1, True),
        SkinnyCut(32, 256, 3, 4, 2, True),
        SkinnyCut(16, 512, 3, 2, 1, True),
        SkinnyCut(128, 64, 4, 8, 1, True),
        SkinnyCut(64, 128, 4, 4),
    ],
)
def test_strips_match_the_reference_at_projections(
    num_tokens: int, outputs: int, inputs: int, cut: SkinnyCut
) -> None:
    check_strips(num_tokens, outputs, inputs, True, cut)


@on_gpu_only
def test_equal_shares_are_the_same_bits_in_replays_of_a_graph() -> None:
    from nvserve.kernels import matmul_triton

    x, weight = (random(rows, 1024, dtype=torch.bfloat16) for rows in (8, 2000))
    cut = SkinnyCut(64, 128, 4, 4, 1, True)

    def chain() -> torch.Tensor:
        """Launches in a row, which meet in the same workspace."""
        outs = [matmul_triton.linear(x, weight, None, cut) for _ in range(20)]
        return torch.stack(outs)

    expected = chain()[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = chain()
    for _ in range(5):
        outs.zero_()
        graph.replay()
        assert all(torch.equal(out, expected) for out in outs)


@needs_triton
def test_a_workspace_grows_to_the_largest_launch_and_starts_at_zero() -> None:
    from nvserve.kernels.matmul_strips import workspace

    device = random(1).device
    small = workspace(device, 1, 1)
    large = workspace(device, small.sums.numel() + 1, 1)
    assert large.sums.numel() > small.sums.numel()
    assert large.arrivals.numel() == small.arrivals.numel()
    assert not large.arrivals.any()
    assert workspace(device, 1, 1) is large
    assert workspace(device, 1, large.arrivals.numel()) is large


@on_gpu_only
def test_a_workspace_does_not_grow_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    from nvserve.kernels.matmul_strips import workspace

    device = random(1).device
    known = workspace(device, 1, 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert workspace(device, 1, 1) is known
    with pytest.raises(AssertionError, match="beforehand"):
        workspace(device, known.sums.numel() + 1, 1)
