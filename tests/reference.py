"""Ground truth: greedy answers of `transformers` in float32 on the CPU, with their margins."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

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
        self._model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
        self._model.train(False)

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int, stop_ids: frozenset[int]) -> Reference:
        """Up to num_tokens ids after the prompt; ends with the first of stop_ids."""
        ids: list[int] = []
        gap = float("inf")
        cache = None
        inputs = torch.tensor([prompt])
        while len(ids) < num_tokens:
            output = self._model(inputs, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            best = output.logits[0, -1].topk(2)
            gap = min(gap, float(best.values[0] - best.values[1]))
            ids.append(int(best.indices[0]))
            if ids[-1] in stop_ids:
                break
            inputs = torch.tensor([[ids[-1]]])
        return Reference(tuple(prompt), tuple(ids), gap)

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
