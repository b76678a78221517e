"""A16 of the list of bug reports: stop strings at both doors, whole and streamed, all the same."""

import json
from typing import Any

import pytest
from api.frontend_process import DEMO_MODEL, FrontendProcess
from tokenizers import Tokenizer

from nvserve.frontend.client import Client

TOKENIZER = Tokenizer.from_file(f"{DEMO_MODEL}/tokenizer.json")
LETTERS, SIGNS = "ABCDEFGHIJ", "a👩\u200d👧b한 the end"
Answer = tuple[str, str, int]  # text, reason, output tokens


def right(
    text: str, stops: list[str], num_tokens: int, *, include: bool, min_tokens: int = 0
) -> Answer:
    """What the first `num_tokens` of a text and its end amount to, found the obvious way."""
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    is_cut = num_tokens <= len(ids)
    for count in range(1, min(num_tokens, len(ids)) + 1):
        so_far = TOKENIZER.decode(ids[:count])
        if count < num_tokens:  # the last one is flushed: what is no character then is U+FFFD
            so_far = so_far.rstrip("\ufffd")
        num_uncounted = len(TOKENIZER.decode(ids[: min(count, min_tokens)]).rstrip("\ufffd"))
        for end in range(num_uncounted + 1, len(so_far) + 1):
            ended = [stop for stop in stops if so_far[:end].endswith(stop)]
            if ended:
                start = end if include else end - max(map(len, ended))
                return so_far[:start], "stop", count
    if is_cut:
        return TOKENIZER.decode(ids[:num_tokens]), "length", num_tokens
    return text, "stop", len(ids) + 1  # the end-of-sequence token counts, unseen


def answers(frontend: FrontendProcess, body: dict[str, Any]) -> dict[str, Answer]:
    status, whole = frontend.post("/v1/completions", {"prompt": "x", **body})
    assert status == 200, whole
    choice = whole["choices"][0]
    count = whole["usage"]["completion_tokens"]
    found = {"whole": (choice["text"], choice["finish_reason"], count)}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    raw = json.dumps({"prompt": "x", **body, **options}).encode()
    headers = {"content-type": "application/json"}
    _, events = frontend.request("POST", "/v1/completions", raw, headers)
    chunks = [json.loads(event[6:]) for event in events.decode().split("\n\n")[:-2]]
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    text = "".join(choice["text"] for choice in choices)
    usage = chunks[-1]["usage"]["completion_tokens"]
    found["streamed"] = (text, choices[-1]["finish_reason"], usage)
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    with Client(frontend.endpoint) as client:
        result = client.generate("x", **body)
        found["zmq"] = (result.text, result.finish_reason, result.num_output_tokens)
        assert len(result.token_ids) == result.num_output_tokens
    return found


def check(
    frontend: FrontendProcess, text: str, stops: list[str], num_tokens: int, min_tokens: int = 0
) -> None:
    core = frontend.core
    assert core is not None
    core.script = TOKENIZER.encode(text, add_special_tokens=False).ids
    for include in (False, True):
        body = {"stop": stops, "max_tokens": num_tokens, "include_stop_str_in_output": include}
        body |= {"min_tokens": min_tokens} if min_tokens else {}
        expected = right(text, stops, num_tokens, include=include, min_tokens=min_tokens)
        got = answers(frontend, body)
        assert got == dict.fromkeys(got, expected), (stops, num_tokens, include)


@pytest.mark.parametrize(
    "stops",
    [
        ["DEFGHIJ"],
        ["DEFGHIJK"],
        ["A"],
        ["J"],
        ["BC"],
        ["FGH", "FG"],
        ["FGHIX", "GHI"],
        ["EFG", "FG"],
        ["CX", "XD", "DEX"],
        [LETTERS],
    ],
    ids=str,
)
def test_letters(shared: FrontendProcess, stops: list[str]) -> None:
    check(shared, LETTERS, stops, 50)


@pytest.mark.parametrize("stop", ["👩", "👧", "\u200d", "\u200d👧b", "한", "한 t", "e e", "end!"])
def test_stops_inside_and_across_characters_of_many_bytes(
    shared: FrontendProcess, stop: str
) -> None:
    check(shared, SIGNS, [stop], 50)


@pytest.mark.parametrize("num_tokens", range(1, 1 + len(TOKENIZER.encode(LETTERS).ids)))
def test_a_stop_around_the_last_token_of_all(shared: FrontendProcess, num_tokens: int) -> None:
    check(shared, LETTERS, ["DEF"], num_tokens)


@pytest.mark.parametrize("num_tokens", range(1, 1 + len(TOKENIZER.encode(SIGNS).ids)))
def test_a_character_cut_by_the_last_token(shared: FrontendProcess, num_tokens: int) -> None:
    check(shared, SIGNS, ["👧b", "한 "], num_tokens)


@pytest.mark.parametrize("min_tokens", range(8))
@pytest.mark.parametrize("stops", [[","], ["ab,"], ["a", ",b,"], [",ab,ab,ab,"]], ids=str)
def test_no_stop_string_ends_the_text_before_min_tokens(
    shared: FrontendProcess, stops: list[str], min_tokens: int
) -> None:
    check(shared, "a,b,ab,ab,ab,ab", stops, 12, min_tokens)


def test_a_stop_string_may_begin_before_min_tokens(shared: FrontendProcess) -> None:
    num_tokens = len(TOKENIZER.encode("ABC", add_special_tokens=False).ids)
    check(shared, LETTERS, ["BCDEF"], 12, num_tokens)
    assert right(LETTERS, ["BCDEF"], 12, include=False, min_tokens=num_tokens)[:2] == ("A", "stop")


def test_a_text_as_short_as_min_tokens_has_no_stop_string(shared: FrontendProcess) -> None:
    check(shared, SIGNS, ["👧b"], 6, 6)
