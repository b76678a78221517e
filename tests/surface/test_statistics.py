"""What a worker's sampler draws, 20 000 times a kind, against the distribution in plain words.

On the CPU the plain-torch twins draw, on a GPU the Triton kernels. Those also draw through their
interpreter, in a process of its own, since TRITON_INTERPRET must be set before triton's first
import: there the tests of this file run again.
"""

import importlib.util
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from step_driver import make_driver, save_model

from nvserve.kernels.dispatch import INTERPRETED
from nvserve.protocol.messages import NewRows, pack_ids
from nvserve.protocol.sampling import SamplingParams
from nvserve.workers.parallel import TensorParallel
from nvserve.workers.sampler import Sampler
from nvserve.workers.sampling_state import SamplingState
from nvserve.workers.staging import Staging

SCALE = float(os.environ.get("NVSERVE_TEST_SCALE", "0.1"))
# A draw through the interpreter takes 10 to 60 ms: a tenth of all would cost CI minutes.
NUM_DRAWS = round(20_000 * SCALE**2.3) if INTERPRETED else 20_000
NUM_SLOTS = 8
MAX_ROWS = 50 * NUM_SLOTS  # in a step
VOCAB = 97
PROMPT, OUTPUT = [3, 3, 7, 20], [4, 4, 4, 9, 20]
KINDS = {
    "temperature": SamplingParams(1.7),
    "cold": SamplingParams(0.4),
    "top_k": SamplingParams(0.9, top_k=12),
    "top_p": SamplingParams(1.1, top_p=0.8),
    "min_p": SamplingParams(1.0, min_p=0.15),
    "all three": SamplingParams(1.2, top_p=0.9, top_k=30, min_p=0.05),
    "penalties": SamplingParams(
        1.0, presence_penalty=0.8, frequency_penalty=0.6, repetition_penalty=1.4
    ),
    "bias": SamplingParams(1.0, logit_bias={4: 2.0, 9: -3.0}),
    "penalties and top_k": SamplingParams(1.0, top_k=9, presence_penalty=1.5),
}


def expected(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities [V] of the next token behind PROMPT and OUTPUT."""
    values = logits.double().clone()
    for token_id, bias in params.logit_bias.items():
        values[token_id] += bias
    for token_id in set(PROMPT + OUTPUT):
        factor = params.repetition_penalty
        values[token_id] = (
            values[token_id] / factor if values[token_id] > 0 else values[token_id] * factor
        )
    for token_id in set(OUTPUT):
        values[token_id] -= params.presence_penalty
        values[token_id] -= params.frequency_penalty * OUTPUT.count(token_id)
    values /= params.temperature
    if params.top_k > 0:
        values[values < values.topk(params.top_k).values[-1]] = -math.inf
    if params.top_p < 1.0:
        order = values.argsort(descending=True)
        before = values[order].softmax(0).cumsum(0) - values[order].softmax(0)
        values[order[before >= params.top_p]] = -math.inf
    if params.min_p > 0.0:
        probabilities = values.softmax(0)
        values[probabilities < params.min_p * probabilities.max()] = -math.inf
    return values.softmax(0)


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Of Pearson's statistic over the classes expected 5 times or more; the rest is one class."""
    wanted = probabilities * counts.sum()
    is_large = wanted >= 5
    small = ~is_large
    got = torch.cat((counts[is_large], counts[small].sum()[None]))
    wanted = torch.cat((wanted[is_large], wanted[small].sum()[None]))
    got, wanted = got[wanted > 0], wanted[wanted > 0]
    statistic = torch.tensor(float(((got - wanted) ** 2 / wanted).sum()))
    half_freedom = torch.tensor((len(got) - 1) / 2)
    return float(torch.special.gammaincc(half_freedom, statistic / 2))


class Parts:
    """A sampler without a runner around it; its uploads are those of one step after another."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        save_model(folder / "model", "LlamaForCausalLM")
        shard = make_driver(folder / "model", folder).runner.model.shard
        self.device = device
        self.staging = Staging(device)
        self.state = SamplingState(
            num_slots=NUM_SLOTS,
            vocab_size=VOCAB,
            eos_token_ids=[1],
            device=device,
            staging=self.staging,
        )
        self.sampler = Sampler(self.state, TensorParallel(), shard, self.staging)

    @contextmanager
    def step(self) -> Iterator[None]:
        self.staging.begin()
        yield
        self.staging.end()
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@contextmanager
def small_tiles() -> Iterator[None]:
    """The interpreted kernels, small: even this vocabulary has several tiles, groups and passes."""
    import triton_interpreter  # where there is no triton there is nothing to interpret

    from nvserve.kernels import sampling_select, sampling_triton

    triton_interpreter.mend(checks_overflow=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_triton, "scan_tile", lambda num_rows: 64)
        patch.setattr(sampling_triton, "GROUP", 32)
        patch.setattr(sampling_select, "GROUP", 32)
        patch.setattr(sampling_select, "TILE", 64)
        yield


DEVICES = ["cpu"] if INTERPRETED else ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def parts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Parts]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    with small_tiles() if INTERPRETED else nullcontext():
        yield Parts(tmp_path_factory.mktemp("statistics"), torch.device(request.param))


INTERPRETED_KINDS = ["temperature", "top_k", "top_p", "min_p", "all three", "penalties"]


@pytest.mark.parametrize("kind", INTERPRETED_KINDS if INTERPRETED else KINDS)
def test_draws_follow_the_exact_distribution(parts: Parts, kind: str) -> None:
    state, sampler, device = parts.state, parts.sampler, parts.device
    params = KINDS[kind]
    state.clear()
    slots = list(range(NUM_SLOTS))
    histories = [pack_ids(PROMPT)] * NUM_SLOTS, [pack_ids(OUTPUT)] * NUM_SLOTS
    with parts.step():
        seeds = [1000 + slot for slot in slots]
        state.add(NewRows(slots, [params] * NUM_SLOTS, seeds, *histories))
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 2
    counts = torch.zeros(VOCAB, dtype=torch.float64)
    num_positions = -(-NUM_DRAWS // NUM_SLOTS)
    for first in range(0, num_positions, MAX_ROWS // NUM_SLOTS):
        end = min(num_positions, first + MAX_ROWS // NUM_SLOTS)
        host_slots = slots * (end - first)
        rows = torch.tensor(host_slots, device=device)
        positions = torch.arange(first, end, device=device).repeat_interleave(NUM_SLOTS)
        with parts.step():
            if state.penalties is not None:  # every draw is the one behind OUTPUT
                for slot in slots:
                    state.penalties.set(slot, pack_ids(PROMPT), pack_ids(OUTPUT), parts.staging)
            table = logits.to(device).repeat(len(rows), 1)
            sampled = (
                sampler.full(table, rows, positions, host_slots, None)
                if params.needs_full_tail
                else sampler.plain(table, rows, positions)
            )
        counts += torch.bincount(sampled.ids, minlength=VOCAB).cpu()
    probabilities = expected(logits, params)
    assert counts.sum() >= NUM_DRAWS
    assert not counts[probabilities == 0].any(), "a token was drawn that is cut off"
    found = p_value(counts, probabilities)
    print(f"{kind}: p = {found:.3f} of {int(counts.sum())} draws")
    assert found > 0.001


def test_the_p_value_tells_a_wrong_distribution() -> None:
    right = torch.full((10,), 0.1, dtype=torch.float64)
    counts = torch.tensor([2000.0] * 9 + [2000.0], dtype=torch.float64)
    assert p_value(counts, right) > 0.9
    counts[0], counts[1] = 2250.0, 1750.0
    assert p_value(counts, right) < 0.001


@pytest.mark.slow
@pytest.mark.timeout(7200)  # all draws of a scale of 1
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_interpreted_kernels_draw_from_the_same_distributions() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rP", "-p", "no:cacheprovider", __file__],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=7200,
    )
    print("\n".join(re.findall(r"^.*: p = .*$", run.stdout, re.MULTILINE)))
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) == len(INTERPRETED_KINDS) + 1, run.stdout[-2000:]
