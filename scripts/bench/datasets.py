"""What `bench serve` asks: prompts with their output lengths, drawn at random or read from a file.

Deterministic by seed. Prompts are token ids wherever they can be, so no tokenizer is needed here.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

DEFAULT_MAX_ID = 1000  # below the vocabulary of every model, the demo model included


class BadDataset(ValueError):
    """A data file or length that cannot be used; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request to send: the prompt as ids or text, and how many tokens to ask for."""

    prompt: list[int] | str
    max_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        """0 for a text, which only the server can count."""
        return 0 if isinstance(self.prompt, str) else len(self.prompt)


def random_questions(
    num_prompts: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    max_id: int = DEFAULT_MAX_ID,
    seed: int = 0,
) -> list[Question]:
    """Prompts of random ids below `max_id`, lengths uniform in len * (1 -+ range_ratio)."""
    if not 0 <= range_ratio < 1:
        raise BadDataset(f"the range ratio must be in [0, 1), not {range_ratio:g}")
    rng = Random(seed)

    def length(mean: int) -> int:
        return rng.randint(max(1, math.floor(mean * (1 - range_ratio))), _ceil(mean, range_ratio))

    shapes = [(length(input_len), length(output_len)) for _ in range(num_prompts)]
    return [
        Question([rng.randrange(max_id) for _ in range(num_in)], num_out)
        for num_in, num_out in shapes
    ]


def _ceil(mean: int, range_ratio: float) -> int:
    return max(1, math.ceil(mean * (1 + range_ratio)))


def read_questions(path: Path, num_prompts: int, *, output_len: int, seed: int) -> list[Question]:
    """`num_prompts` drawn from a file, again from its start when it has fewer.

    Either a JSON list of ShareGPT conversations, whose first human turn is the prompt, or JSON
    lines with `prompt` (text or ids) and, if wanted, `output_tokens`.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadDataset(f"cannot read {path}: {error}") from error
    found = list(_parse(text, path, output_len))
    if not found:
        raise BadDataset(f"{path} holds no prompt")
    Random(seed).shuffle(found)
    return [found[i % len(found)] for i in range(num_prompts)]


def _parse(text: str, path: Path, output_len: int) -> Iterable[Question]:
    is_list = text.lstrip().startswith("[")
    try:
        entries: list[Any] = (
            json.loads(text) if is_list else [json.loads(x) for x in text.splitlines() if x.strip()]
        )
    except ValueError as error:
        raise BadDataset(f"{path} is neither a JSON list nor JSON lines: {error}") from error
    for place, entry in enumerate(entries):
        prompt = _prompt(entry)
        if prompt is not None:
            length = entry.get("output_tokens") or output_len
            yield Question(prompt, _positive(length, f"{path}, entry {place + 1}: output_tokens"))
        elif not is_list:  # a conversation may well start with the assistant; a line may not
            raise BadDataset(f'{path}, entry {place + 1}: no "prompt"')


def _prompt(entry: object) -> list[int] | str | None:
    if not isinstance(entry, dict):
        return None
    turns = entry.get("conversations") or entry.get("conversation")
    prompt = entry.get("prompt")
    first = turns[0] if isinstance(turns, list) and turns else None
    if isinstance(first, dict) and first.get("from") in ("human", "user"):
        prompt = first.get("value")
    return prompt if isinstance(prompt, str | list) and prompt else None


def _positive(value: object, name: str) -> int:
    if isinstance(value, float) and value.is_integer():  # as tables write integers
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadDataset(f"{name} must be a positive integer, not {value!r:.60}")
    return value


def arrivals_s(num_requests: int, rate: float, burstiness: float, rng: Random) -> list[float]:
    """Seconds after the start at which each request arrives; an infinite rate is all at once.

    Intervals follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, less comes
    in bursts, infinity is even. Scaled to end at num_requests / rate whatever the seed.
    """
    if math.isinf(rate):
        return [0.0] * num_requests
    if math.isinf(burstiness):
        return [i / rate for i in range(num_requests)]
    gaps = [rng.gammavariate(burstiness, 1.0) for _ in range(num_requests)]
    scale = num_requests / rate / (math.fsum(gaps) or 1.0)  # 0: one burst
    times, now = [], 0.0
    for gap in gaps:
        now += gap * scale
        times.append(now)
    return times
