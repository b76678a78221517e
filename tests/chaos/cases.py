"""What the load asks for and what the answers must be: greedy references and seeded samples."""

import random
from dataclasses import dataclass, field
from typing import Any

from chaos.client import Client
from reference import ReferenceModel
from tokenizers import Tokenizer

from nvserve.scripts.model_facts import DEMO_MODEL

NUM_GREEDY = 20
NUM_SEEDED = 4
NUM_TOKENS = 96  # of the longest request
WORDS = "king queen lord love death night crown sword heaven mother brother fool honest friend"


@dataclass(frozen=True)
class Case:
    """A prompt, how to sample, and the ids that must come; a shorter request gets a beginning."""

    prompt: list[int]
    ids: list[int]
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0})

    def body(self, num_tokens: int) -> dict[str, Any]:
        return {
            "model": "demo",
            "prompt": self.prompt,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            **self.sampling,
        }


class Texts:
    """Ids to text, as the server must have done it."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids)
        return text


def prompts(texts: Texts, seed: int, count: int) -> list[list[int]]:
    """Different prompts of 10 to 60 tokens; half share a beginning, so that prefixes hit."""
    chance, words = random.Random(seed), WORDS.split()
    begin = "KING RICHARD III:\nMy lords, before I speak of war and of the crown,\n"
    return [
        texts.encode((begin if index % 2 else "") + f"The {' '.join(chance.sample(words, 6))}")
        for index in range(count)
    ]


def greedy_cases(texts: Texts) -> list[Case]:
    """Continuations by `transformers`, each with a clear choice at every position."""
    references = ReferenceModel(DEMO_MODEL).clear_references(
        prompts(texts, 0, 3 * NUM_GREEDY), NUM_TOKENS, frozenset(), NUM_GREEDY
    )
    return [Case(list(one.prompt), list(one.ids)) for one in references]


def seeded_cases(texts: Texts, client: Client) -> list[Case]:
    """Samples of fixed seeds, taken from a run that nobody disturbs."""
    cases = []
    for seed, prompt in enumerate(prompts(texts, 1, NUM_SEEDED)):
        sampling = {"temperature": 0.8, "top_p": 0.95, "seed": 1000 + seed}
        case = Case(prompt, [], sampling)
        answer = client.complete(case.body(NUM_TOKENS))
        cases.append(Case(prompt, answer.ids, sampling))
    return cases
