"""Norms that two matmuls share, against the norm between them; and a whole model of such."""

from pathlib import Path

import pytest
import torch
from gpu.kernel_cases import DEVICE, MARKS, assert_close, random
from step_driver import make_driver

from nvserve.kernels import matmul, reference
from nvserve.kernels import norm as norms
from nvserve.kernels.dispatch import HAS_TRITON, INTERPRETED
from nvserve.kernels.matmul import SkinnyCut
from nvserve.protocol.messages import Chunks, NewRows, SchedulerOutput, TableChanges, pack_ids
from nvserve.protocol.sampling import SamplingParams
from nvserve.scripts.model_facts import DEMO_MODEL
from nvserve.workers.runner import Runner

pytestmark = [*MARKS, pytest.mark.skipif(not HAS_TRITON, reason="needs triton")]

DTYPE, TOLERANCE = (torch.float32, 4e-6) if INTERPRETED else (torch.bfloat16, 1.2e-2)
EPS = 1e-2


def defer(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor,
    cut: SkinnyCut,
) -> norms.DeferredNorm:
    """linear_deferred_norm with squares that nobody has written yet."""
    from nvserve.kernels import matmul_triton

    num_strips = -(-len(weight) // cut.outputs)
    count = 1 << (num_strips - 1).bit_length()
    squares = torch.full((len(x), count), float("nan"), device=DEVICE)
    return matmul_triton.linear_deferred_norm(x, weight, residual, norm, EPS, cut, squares)


@pytest.mark.parametrize(
    ("num_tokens", "hidden", "width", "biased"),
    [(2, 72, 40, True), (5, 136, 96, False), (17, 48, 200, True), (32, 96, 72, False)],
)
@pytest.mark.parametrize("rows", [8, 16, 64])
@pytest.mark.parametrize(("programs_per_sm", "equal_shares"), [(1, False), (1, True), (3, True)])
def test_a_deferred_norm_is_the_norm_between_two_matmuls(
    num_tokens: int,
    hidden: int,
    width: int,
    biased: bool,
    rows: int,
    programs_per_sm: int,
    equal_shares: bool,
) -> None:
    from nvserve.kernels import activation, matmul_triton

    cut = SkinnyCut(rows, 32, 2, 4, programs_per_sm, equal_shares)
    x, before = random(num_tokens, width, dtype=DTYPE), random(hidden, width, dtype=DTYPE)
    residual = random(num_tokens, hidden, dtype=DTYPE)
    norm = 1 + random(hidden, dtype=DTYPE)
    after = 0.1 * random(2 * width, hidden, dtype=DTYPE)
    bias = random(2 * width, dtype=DTYPE) if biased else None
    part = reference.linear(x, before)
    expected, total = reference.add_rms_norm(part, residual.clone(), norm, EPS)
    wide = reference.linear(expected, after, bias)

    added = residual.clone()
    deferred = defer(x, before, added, norm, cut)
    assert_close(added, total, TOLERANCE)
    assert_close(norms.finish(deferred), expected, TOLERANCE)
    assert torch.allclose(deferred.squares.sum(1), added.float().pow(2).sum(1), rtol=1e-5)
    assert_close(matmul_triton.linear(deferred, after, bias, cut), wide, TOLERANCE)
    gated = matmul_triton.linear_silu_mul(deferred, after, bias, cut)
    assert_close(gated, reference.silu_and_mul(wide), TOLERANCE)
    raw = reference.linear(deferred.rows, after)
    unbiased = reference.silu_and_mul(reference.linear(expected, after))
    assert_close(activation.silu_and_mul(raw, deferred), unbiased, TOLERANCE)


def test_an_embedding_is_finished_to_its_norm() -> None:
    embedding, weight = random(11, 200, dtype=DTYPE), random(200, dtype=DTYPE)
    tokens = torch.tensor([10, 0, 3, 3]).to(DEVICE)
    deferred, rows = norms.embed_deferred_norm(tokens, embedding, weight, EPS, 16)
    expected, expected_rows = reference.embed_rms_norm(tokens, embedding, weight, EPS)
    assert torch.equal(rows, expected_rows)
    assert deferred.squares.shape == (4, 16)
    assert_close(norms.finish(deferred), expected, TOLERANCE)


def test_two_launches_leave_the_same_bits() -> None:
    x, weight = random(9, 400, dtype=DTYPE), random(72, 400, dtype=DTYPE)
    residual, norm = random(9, 72, dtype=DTYPE), random(72, dtype=DTYPE)
    cut = SkinnyCut(16, 32, 2, 4, 3, True)
    runs = [defer(x, weight, residual.clone(), norm, cut) for _ in range(2)]
    assert torch.equal(runs[0].rows, runs[1].rows)
    assert torch.equal(runs[0].squares, runs[1].squares)


def run_prompt(runner: Runner, num_tokens: int) -> torch.Tensor:
    """Logits behind every token of one chunk in slot 0, float32 [T, V]."""
    tables = TableChanges([0], [0], [4], pack_ids([1, 2, 3, 4]))
    new = NewRows([0], [SamplingParams()], [0], [b""], [b""])
    prompt = pack_ids([(7 * i) % 900 + 5 for i in range(num_tokens)])
    with torch.inference_mode():
        runner._staging.begin()
        runner.batch.apply(SchedulerOutput(0, 0, new=new, tables=tables))
        chunks = Chunks([0], [0], [num_tokens], prompt, [True])
        inputs = runner.batch.chunk_inputs(runner.batch.upload_chunks(chunks))
        hidden = runner.model.forward(inputs, runner.cache, runner.backend)
        runner._staging.end()
        logits = reference.linear(hidden, runner.model.head).float()
        runner.clear()
    return logits


def test_a_model_with_deferred_norms_is_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else differs between the two runs, which matmuls are ours included."""
    if INTERPRETED:  # which has neither a device nor 16-bit values of its own
        cut = SkinnyCut(64, 128, 2, 4)
        monkeypatch.setattr(matmul, "_cut", lambda rows, *_, **__: cut if rows > 1 else None)
    dtype = "float32" if INTERPRETED else "bfloat16"
    runner = make_driver(DEMO_MODEL, tmp_path, device=DEVICE, dtype=dtype).runner
    runner.model.layers = runner.model.layers[:2]
    taken: list[bool] = []
    takes_deferred = matmul.takes_deferred

    def note(num_tokens: int, weight: torch.Tensor) -> bool:
        taken.append(takes_deferred(num_tokens, weight))
        return taken[-1]

    monkeypatch.setattr("nvserve.workers.models.decoder.takes_deferred", note)
    deferred = run_prompt(runner, 5)
    assert taken == [True, True]
    monkeypatch.setattr(matmul, "_DEFERRED_ROWS", range(0))
    plain = run_prompt(runner, 5)
    assert taken[2:] == [False]  # the first layer is not asked where nothing can be deferred
    assert not torch.equal(deferred, plain), "the same code ran twice"
    tolerance = 1e-5 if INTERPRETED else 2e-2
    assert ((deferred - plain).abs().amax(1) <= tolerance * plain.abs().amax(1)).all()
    assert torch.equal(deferred.argmax(1), plain.argmax(1))
