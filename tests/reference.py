"""Ground truth: greedy answers of `transformers` in float32 on the CPU, with their margins."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

MIN_GAP = 1e-3  # between the two best logits: below it, rounding could pick either


@dataclass(frozen=True)
class Reference:
    """A greedy continuation; `gap` is the smallest margin between its two best logits."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    gap: float


class ReferenceModel:
    """A model folder run by `transformers`; the answer to what any engine should have said."""

    def __init__(self, folder: Path) -> None:
        # Any: the library's own types do not fit together.
        self._model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
        self._model.train(False)
        # Its own defaults would mix with what greedy() asks for.
        self._model.generation_config = GenerationConfig()

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int, stop_ids: frozenset[int]) -> Reference:
        """Up to num_tokens ids after the prompt; ends with the first of stop_ids."""
        output = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            generation_config=GenerationConfig(
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=sorted(stop_ids) or None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            ),
        )
        best = torch.stack(output.logits)[:, 0].topk(2).values
        ids = output.sequences[0, len(prompt) :].tolist()
        return Reference(tuple(prompt), tuple(ids), float((best[:, 0] - best[:, 1]).min()))

    def clear_references(
        self, prompts: list[list[int]], num_tokens: int, stop_ids: frozenset[int], count: int
    ) -> list[Reference]:
        """The first `count` prompts whose continuations keep MIN_GAP; fails if there are fewer."""
        references: list[Reference] = []
        for prompt in prompts:
            reference = self.greedy(prompt, num_tokens, stop_ids)
            if reference.gap >= MIN_GAP:
                references.append(reference)
            if len(references) == count:
                return references
        raise AssertionError(f"only {len(references)} of {count} prompts keep a gap of {MIN_GAP}")
