"""The demo model that ships with us: greedy ids equal those of transformers, at tp 1, 2 and 4."""

from pathlib import Path

import pytest
import torch
import transformers
from step_driver import Ask, Case, greedy_reference, make_driver, run_ranks

from nvserve.scripts.model_facts import DEMO_MODEL

TEXTS = ["To be, or", "ROMEO:\n", "\n", "What light through yonder window breaks? " * 3]
NUM_NEW = 24


@pytest.fixture(scope="module")
def expected() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what transformers puts behind them in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    return prompts, [greedy_reference(model.eval(), prompt, NUM_NEW) for prompt in prompts]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_demo_model_generates_what_transformers_does(
    expected: tuple[list[list[int]], list[list[int]]], tmp_path: Path, size: int
) -> None:
    prompts, outputs = expected
    cases = [Case([Ask(prompt, NUM_NEW) for prompt in prompts], chunk) for chunk in (1, 7, 16)]
    assert run_ranks(Path(DEMO_MODEL), tmp_path, size, cases) == [outputs] * 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_demo_model_runs_in_sixteen_bits_close_to_its_float32_logits(
    expected: tuple[list[list[int]], list[list[int]]], tmp_path: Path, dtype: str
) -> None:
    """Most first tokens agree: rounding may turn a near tie, nothing more."""
    prompts, outputs = expected
    driver = make_driver(Path(DEMO_MODEL), tmp_path, dtype=dtype)
    generated = driver.generate([Ask(prompt, NUM_NEW) for prompt in prompts])
    same = [
        next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), NUM_NEW)
        for pair in zip(generated, outputs, strict=True)
    ]
    assert sum(same) >= NUM_NEW * len(prompts) // 2
