"""Sums through peer memory, by ranks that are processes, interpreted; and which way is chosen."""

import importlib.util
from pathlib import Path

import pytest
import torch
from peer_rank import (
    EPS,
    NUM_PLACES,
    Call,
    Job,
    addend,
    residual_and_weight,
    run_ranks,
)
from step_driver import Ask, Case, greedy_reference, save_model
from step_driver import run_ranks as run_model

from nvserve.kernels import reference
from nvserve.workers.crossover import choose
from nvserve.workers.peer_memory import Crossover

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def make_calls(num_calls: int, rows: tuple[int, ...]) -> list[Call]:
    """Every number of rows in both ways, with and without the norm, at the places in turn."""
    return [
        Call(
            place=index % NUM_PLACES,
            num_rows=rows[index % len(rows)],
            is_two_shot=index // 2 % 2 == 1,
            has_norm=index % 2 == 1,
            seed=index,
        )
        for index in range(num_calls)
    ]


def expected(job: Job, call: Call) -> list[torch.Tensor]:
    addends = [addend(job, call, rank) for rank in range(job.size)]
    total = addends[0].float()
    for other in addends[1:]:
        total = total + other.float()
    summed = total.to(addends[0].dtype)
    if not call.has_norm:
        return [summed]
    residual, weight = residual_and_weight(job, call)
    normalized, residual = reference.add_rms_norm(summed, residual, weight, EPS)
    return [normalized, residual]


def check(job: Job) -> None:
    results = run_ranks(job)
    for index, call in enumerate(job.calls):
        wanted = expected(job, call)
        for rank in range(job.size):
            got = results[rank][index]
            if job.dtype == "bfloat16" and job.device == "cpu":  # the interpreter truncates
                torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.05)
            else:
                torch.testing.assert_close(got, wanted)
                assert torch.equal(got[-1], wanted[-1]), (rank, call)
            for one, other in zip(got, results[0][index], strict=True):
                assert torch.equal(one, other), "ranks differ"


@pytest.mark.parametrize(
    ("size", "width", "dtype"),
    [
        (2, 88, "bfloat16"),  # shares of 48 and 40
        (3, 16, "float16"),  # shares of 8, 8 and nothing
    ],
)
def test_every_rank_gets_the_sum_in_rank_order(
    tmp_path: Path, size: int, width: int, dtype: str
) -> None:
    check(Job(str(tmp_path), 0, size, width, dtype, make_calls(12, (1, 3, 5, 2, 7))))


def test_ranks_that_come_late_find_what_was_meant_for_their_call(tmp_path: Path) -> None:
    """A rank may be a call ahead, and writes a place again as soon as it may; counters wrap."""
    calls = make_calls(40, (2, 1, 4))
    check(
        Job(
            str(tmp_path),
            0,
            2,
            16,
            "float32",
            calls,
            first_call=2**31 - 20,
            max_pause_ms=20.0,
        )
    )


def test_abort_ends_the_wait_for_a_rank_that_never_comes(tmp_path: Path) -> None:
    job = Job(str(tmp_path), 0, 2, 16, "float32", make_calls(6, (2, 3)), late_rank=1)
    results = run_ranks(job)
    assert [len(result) for result in results] == [6, 0]


def test_a_model_whose_sums_go_through_peer_memory_generates_what_transformers_does(
    tmp_path: Path,
) -> None:
    model = save_model(tmp_path / "model", "Qwen3ForCausalLM", num_hidden_layers=2)
    prompts = [[5, 6, 7], list(range(20))]
    cases = [Case([Ask(prompt, 4) for prompt in prompts], 7)]
    expected = [greedy_reference(model, prompt, 4) for prompt in prompts]
    assert run_model(tmp_path / "model", tmp_path, 2, cases, has_peer_memory=True) == [expected]


@pytest.mark.parametrize(
    ("times", "crossover"),
    [
        ({1: (5, 7, 18), 32: (9, 8, 21), 128: (18, 13, 37), 512: (60, 40, 39)}, (1, 128)),
        ({1: (5, 7, 18), 32: (7, 8, 21), 128: (9, 13, 37)}, (128, 128)),
        ({1: (5, 4, 18), 32: (7, 8, 21)}, (0, 32)),  # one-shot again would be noise
        ({1: (19, 20, 18), 32: (7, 8, 21)}, (0, 0)),
    ],
)
def test_the_fastest_way_is_chosen_by_rows(
    times: dict[int, tuple[float, float, float]], crossover: tuple[int, int]
) -> None:
    assert choose(times) == Crossover(*crossover)
