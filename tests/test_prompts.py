"""What `LLM.generate` and the clients take for prompts and ids, and how they refuse the rest."""

from array import array
from collections import deque
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from nvserve.frontend.client_submit import token_ids
from nvserve.scripts.prompts import check_prompts, check_unicode

NO_PROMPT = "neither a string nor a list of token ids"


def plain(prompts: object) -> list[str | list[int]]:
    checked = check_prompts(prompts)
    return [one if isinstance(one, str) else one.tolist() for one in checked]


def test_every_form_of_prompts_becomes_a_list_of_prompts() -> None:
    assert plain("text") == ["text"]
    assert plain([1, 2]) == [[1, 2]]
    assert plain(["a", "b"]) == ["a", "b"]
    assert plain([[1, 2], [3]]) == [[1, 2], [3]]
    assert plain(["a", [3]]) == ["a", [3]]
    assert plain([]) == []


@pytest.mark.parametrize(
    "ids",
    [(5, 6, 7), range(5, 8), array("q", [5, 6, 7]), deque([5, 6, 7]), np.arange(5, 8)],
    ids=lambda ids: type(ids).__name__,
)
def test_every_sequence_of_integers_is_a_prompt(ids: Any) -> None:
    assert plain(ids) == [[5, 6, 7]]
    assert plain([ids, "a", list(ids)]) == [[5, 6, 7], "a", [5, 6, 7]]
    assert plain(list(ids)) == [[5, 6, 7]]  # whatever the items are


def test_the_rows_of_an_array_are_prompts() -> None:
    assert plain(np.array([[1, 2], [3, 4]], dtype=np.int64)) == [[1, 2], [3, 4]]
    assert plain([np.array([5])]) == [[5]]


@pytest.mark.parametrize(
    "prompts",
    [
        (one for one in ["first", "second"]),
        iter(["first"]),
        {"prompt": "To be"},
        MappingProxyType({"prompt": "To be"}),
        {"a", "b"},
        frozenset({1, 2}),
        {"a": 1}.keys(),
        np.array(5),
        7,
        None,
    ],
    ids=lambda prompts: type(prompts).__name__,
)
def test_what_has_no_order_is_no_list_of_prompts(prompts: object) -> None:
    with pytest.raises(TypeError, match=f"not {type(prompts).__name__}: "):
        check_prompts(prompts)


@pytest.mark.parametrize(
    "prompts",
    [
        *([1, "a"], [1.5], [["a"]], [None], b"abc", bytearray(b"abc"), memoryview(b"abc")),
        *([{"prompt": "To be"}], [{1, 2}], [iter([1])], [[1, [2]]], np.array([1.5])),
    ],
    ids=repr,
)
def test_what_is_no_prompt_is_refused_by_its_number(prompts: object) -> None:
    with pytest.raises(TypeError, match=f"prompt 0 is {NO_PROMPT}"):
        check_prompts(prompts)


def test_half_a_surrogate_pair_is_told_with_its_place() -> None:
    check_unicode("", "text")
    with pytest.raises(ValueError, match=r"^text is not valid Unicode: .*ud800.* character 1$"):
        check_unicode("a\ud800", "text")


def test_bytes_are_no_token_ids_and_the_error_names_them() -> None:
    with pytest.raises(TypeError, match=rf"prompt 1 is {NO_PROMPT}, but bytes: b'abc'"):
        check_prompts(["fine", b"abc"])


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 2**80])
def test_ids_beyond_32_bits_are_refused_by_the_prompts_number(token: int) -> None:
    with pytest.raises(ValueError, match=r"prompt 1 holds a token id .* 32 bits"):
        check_prompts([[5], [6, token]])
    with pytest.raises(ValueError, match="emitted holds a token id"):
        token_ids([token], "emitted")


@pytest.mark.parametrize("ids", [b"abc", "12", ["5"], [1.5], {1, 2}, iter([1]), None], ids=repr)
def test_a_client_takes_the_same_for_ids(ids: object) -> None:
    with pytest.raises(TypeError, match=f"^prompt is {NO_PROMPT}"):
        token_ids(ids, "prompt")
