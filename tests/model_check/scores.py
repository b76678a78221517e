"""Logprobs of the fake worker: a hash of the tokens up to the scored one, so all can be checked.

Output rows and prompt positions alike; alternative i is the id i, i below the token itself.
"""

import zlib
from array import array
from collections.abc import Sequence

from nvserve.protocol.messages import Emits, Logprobs, Submit, unpack_ids


def score(tokens: Sequence[int]) -> float:
    """Of the last of these tokens behind the others."""
    return float(zlib.crc32(array("i", tokens).tobytes()) % 1000)


def logprobs(rows: list[int], texts: Sequence[Sequence[int]], num_tops: list[int]) -> Logprobs:
    """A column whose rows are the scores of the last tokens of these texts."""
    chosen = [score(text) for text in texts]
    ids = [top for count in num_tops for top in range(count)]
    values = [
        own - top for own, count in zip(chosen, num_tops, strict=True) for top in range(count)
    ]
    columns = (
        array("f", chosen).tobytes(),
        array("i", ids).tobytes(),
        array("f", values).tobytes(),
    )
    return Logprobs(rows, columns[0], num_tops, columns[1], columns[2])


def check(emits: Emits, index: int, submit: Submit, emitted: list[int], num_scored: int) -> int:
    """What an emit says of one request, which has `emitted` by now and so many known positions.

    Returns how many are known now. A core that follows another may send some again.
    """
    prompt, sampling = unpack_ids(submit.prompt), submit.sampling
    of_output = emits.logprobs[index] if emits.logprobs is not None else None
    _check_output(of_output, prompt + emitted, emits.counts[index], sampling.logprobs)
    of_prompt = emits.prompt_logprobs[index] if emits.prompt_logprobs is not None else None
    if of_prompt is not None:
        num_scored = _check_prompt(of_prompt, prompt, num_scored, sampling.prompt_logprobs)
    if emitted and sampling.prompt_logprobs >= 0:
        assert max(1, num_scored) == len(prompt), "an output, but not all scores of the prompt"
    return num_scored


def _check_output(found: Logprobs | None, text: list[int], num_new: int, num_tops: int) -> None:
    """Of the last num_new tokens of this text; num_tops is -1 where none are wanted."""
    if num_tops < 0 or num_new == 0:
        assert found is None
        return
    texts = [text[: len(text) - num_new + 1 + row] for row in range(num_new)]
    assert found == logprobs(list(range(num_new)), texts, [num_tops] * num_new)


def _check_prompt(found: Logprobs, prompt: list[int], num_scored: int, num_tops: int) -> int:
    assert num_tops >= 0, "nobody asked"
    first, end = found.rows[0], found.rows[-1] + 1
    assert 1 <= first <= max(1, num_scored), f"{num_scored} were known, then comes {first}"
    positions = list(range(first, end))
    texts = [prompt[: position + 1] for position in positions]
    assert found == logprobs(positions, texts, [num_tops] * len(positions))
    return max(num_scored, end)
