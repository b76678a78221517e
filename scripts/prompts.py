"""The forms in which `LLM.generate` takes prompts, made one: a list of texts and columns of ids.

What is no prompt is refused by its number before anything is sent. Knows no tokenizer.
"""

from array import array
from collections.abc import Sequence
from typing import SupportsIndex

from nvserve.frontend.client_submit import as_sequence, token_ids

Prompt = str | Sequence[int]


def check_prompts(prompts: object) -> "list[str | array[int]]":
    """One prompt or many, in order; TypeError for what is none, ValueError for an unusable one.

    Only what has an order is a list of prompts: neither a set, nor a mapping, nor an iterator.
    """
    if isinstance(prompts, str | bytes | bytearray | memoryview):
        prompts = [prompts]  # bytes are refused below
    given = as_sequence(prompts)
    if given is None:
        raise TypeError(
            "prompts are a string, a list of token ids, or a list of these, "
            f"not {type(prompts).__name__}: {prompts!r:.60}"
        )
    if given and _is_number(given[0]):
        given = [given]
    return [_check(prompt, f"prompt {number}") for number, prompt in enumerate(given)]


def _is_number(item: object) -> bool:
    """Arrays have an index too, if only to say that they have none."""
    return isinstance(item, SupportsIndex) and as_sequence(item) is None


def _check(prompt: object, name: str) -> "str | array[int]":
    checked = prompt if isinstance(prompt, str) else token_ids(prompt, name)
    if not len(checked):
        raise ValueError(f"{name} is empty")
    if isinstance(checked, str):
        check_unicode(checked, name)
    return checked


def check_unicode(text: str, name: str) -> None:
    """ValueError for half a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(
            f"{name} is not valid Unicode: a lone {half!r} at character {error.start}"
        ) from error
