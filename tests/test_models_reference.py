"""Our decoders against transformers: the same logits and greedy ids from the same weights."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from model_reference import prompt_logits
from step_driver import (
    Ask,
    Case,
    StepDriver,
    greedy_reference,
    make_driver,
    run_ranks,
    save_model,
)

ARCHITECTURES = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
EXTRAS: dict[str, dict[str, object]] = {"Qwen3ForCausalLM": {"head_dim": 16}}
NUM_NEW = 12


class Subject:
    """A tiny model: its folder, transformers' own version, prompts and what must follow them."""

    def __init__(self, folder: Path, architecture: str) -> None:
        self.folder = folder / architecture
        self.model: Any = save_model(self.folder, architecture, **EXTRAS.get(architecture, {}))
        draw = random.Random(1)
        lengths = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 30, 33, 40, 9, 12, 21]
        self.prompts = [[draw.randrange(97) for _ in range(length)] for length in lengths]
        self.expected = [greedy_reference(self.model, p, NUM_NEW) for p in self.prompts]

    def asks(self, num: int) -> list[Ask]:
        """The first prompts, each starting two steps after the one before."""
        return [Ask(p, NUM_NEW, start_step=2 * i) for i, p in enumerate(self.prompts[:num])]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(scope="module")
def driver(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> StepDriver:
    torch.set_num_threads(1)
    return make_driver(subject.folder, tmp_path_factory.mktemp("launch"))


def test_logits_are_those_of_transformers(subject: Subject, driver: StepDriver) -> None:
    for prompt in subject.prompts:
        with torch.inference_mode():
            expected = subject.model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(prompt_logits(driver, prompt), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16])
def test_greedy_ids_do_not_depend_on_the_chunks(
    subject: Subject, driver: StepDriver, chunk_tokens: int
) -> None:
    assert driver.generate(subject.asks(16), chunk_tokens=chunk_tokens) == subject.expected


@pytest.mark.parametrize("num_requests", range(1, 17))
def test_greedy_ids_are_those_of_transformers_in_every_batch(
    subject: Subject, driver: StepDriver, num_requests: int
) -> None:
    asks = [Ask(prompt, NUM_NEW) for prompt in subject.prompts[:num_requests]]
    assert driver.generate(asks) == subject.expected[:num_requests]


def test_greedy_ids_continue_behind_tokens_emitted_before(
    subject: Subject, driver: StepDriver
) -> None:
    asks = [
        Ask(prompt, NUM_NEW - 5, emitted=expected[:5])
        for prompt, expected in zip(subject.prompts, subject.expected, strict=True)
    ]
    continued = driver.generate(asks, chunk_tokens=7)
    assert continued == [expected[5:] for expected in subject.expected]


def test_two_ranks_generate_what_one_does(subject: Subject, tmp_path: Path) -> None:
    cases = [Case(subject.asks(16), chunk) for chunk in (1, 7, 16)]
    cases += [Case(subject.asks(num)) for num in (1, 5)]
    everything = run_ranks(subject.folder, tmp_path, 2, cases)
    for case, outputs in zip(cases, everything, strict=True):
        assert outputs == subject.expected[: len(case.asks)]


VARIANTS: list[tuple[str, str, dict[str, object]]] = [
    ("tied", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    ("biased", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    ("biased-qwen3", "Qwen3ForCausalLM", {"attention_bias": True, "head_dim": 24}),
    ("wide-head", "LlamaForCausalLM", {"head_dim": 16}),
    ("theta", "LlamaForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    (
        "linear",
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    (
        "llama3",
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
]


@pytest.mark.parametrize(
    ("architecture", "changes"), [v[1:] for v in VARIANTS], ids=[v[0] for v in VARIANTS]
)
def test_logits_of_config_variants_are_those_of_transformers(
    tmp_path: Path, architecture: str, changes: dict[str, object]
) -> None:
    model = save_model(tmp_path / "model", architecture, **changes)
    driver = make_driver(tmp_path / "model", tmp_path)
    prompt = [token * 7 % 97 for token in range(60)]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(prompt_logits(driver, prompt), expected, atol=1e-4, rtol=1e-5)
