"""Reasoning and tool calls come out of text the same however it is cut."""

import json
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvserve.frontend.chat_parts import (
    BareCalls,
    ForcedCall,
    MarkedCalls,
    Part,
    Plain,
    Reasoning,
    Splitter,
)


def split(splitter: Splitter, pieces: list[str]) -> list[Part]:
    parts = [part for piece in pieces for part in splitter.feed(piece)]
    return parts + list(splitter.flush())


def summary(parts: list[Part]) -> dict[str, Any]:
    """Reasoning, content and calls, each joined."""
    calls: dict[int, list[Any]] = {}
    for part in parts:
        if part.name is not None:
            assert part.call == len(calls), "calls begin in order"
            calls[part.call] = [part.name, ""]
        if part.call >= 0:
            calls[part.call][1] += part.text
    return {
        "reasoning": "".join(part.text for part in parts if part.is_reasoning),
        "content": "".join(p.text for p in parts if p.call < 0 and not p.is_reasoning),
        "calls": [tuple(call) for call in calls.values()],
    }


def make(kind: str) -> Splitter:
    match kind:
        case "marked":
            return MarkedCalls(9)
        case "bare":
            return BareCalls(9)
        case "bare of tools":
            return BareCalls(9, names={"look_up", "add"})
        case "list":
            return BareCalls(9, is_list=True)
        case "think":
            return Reasoning(Plain(), is_open=False)
        case "open think":
            return Reasoning(Plain(), is_open=True)
        case "think marked":
            return Reasoning(MarkedCalls(9), is_open=False)
    raise AssertionError(kind)


A = '{"name": "look_up", "arguments": {"word": "a {\\"b\\"} \\\\"}}'
B = '{"arguments": {"x": [1, {"y": 2}]}, "name": "add"}'
CALL_A, CALL_B = ("look_up", '{"word": "a {\\"b\\"} \\\\"}'), ("add", '{"x": [1, {"y": 2}]}')
CASES: list[tuple[str, str, str, str, list[tuple[str, str]]]] = [
    ("marked", "Hello there.\n ", "", "Hello there.\n ", []),
    ("marked", f"<tool_call>\n{A}\n</tool_call>", "", "", [CALL_A]),
    ("marked", f"Wait.\n<tool_call>{A}</tool_call>\n<tool_call>\n{B}\n</tool_call>\n", "", "Wait.",
     [CALL_A, CALL_B]),
    ("marked", f"<tool_call>{A}</tool_call> Done.", "", "Done.", [CALL_A]),
    ("marked", f"<tool_call>{A} <tool_call>{B}", "", "", [CALL_A, CALL_B]),
    ("marked", "a <tool_call> not json", "", "a <tool_call> not json", []),
    ("marked", '<tool_call>{"x": 1}</tool_call>', "", '<tool_call>{"x": 1}</tool_call>', []),
    ("marked", '<tool_call>{"name": "f", "arguments": {"a": ', "", "", [("f", '{"a": ')]),
    ("marked", "a <tool_cal", "", "a <tool_cal", []),
    ("bare", A, "", "", [CALL_A]),
    ("bare", f"<|python_tag|>{A}; {B}", "", "", [CALL_A, CALL_B]),
    ("bare", '{"name": "f", "parameters": {}}', "", "", [("f", "{}")]),
    ("bare", '{"name": "f", "parameters": "{\\"a\\": 1}"}', "", "", [("f", '{"a": 1}')]),
    ("bare", '{"name": "f"}', "", "", [("f", "{}")]),
    ("bare", '{"name": "f", "arguments": null}', "", "", [("f", "{}")]),
    ("bare", '{"name": "f", "arguments": ""}', "", "", [("f", "{}")]),
    ("bare", '{"name": "f", "arguments": [1]}', "", "", [("f", "[1]")]),
    ("bare", '{"arguments": {"a": 1}, "parameters": {"b": 2}, "name": "f"}', "", "",
     [("f", '{"a": 1}')]),
    ("bare", '{"name": "f", ', "", "", [("f", "")]),
    ("marked", '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}', "", "",
     [("f", "{}"), ("g", "{}")]),
    ("marked", "a \n <tool_call>{}</tool_call>", "", "a \n <tool_call>{}</tool_call>", []),
    ("bare", " <|python_tag|> and", "", " <|python_tag|> and", []),
    ("bare", f"{A}; and", "", "; and", [CALL_A]),
    ("think", " \n no", "", " \n no", []),
    ("think", " \n ", "", " \n ", []),
    ("bare", " {not a call}", "", " {not a call}", []),
    ("bare", "Plain {text}", "", "Plain {text}", []),
    ("bare", '{"answer": 5} and more', "", '{"answer": 5} and more', []),
    ("bare", "  ", "", "  ", []),
    ("bare of tools", f"{A}; {B}", "", "", [CALL_A, CALL_B]),
    ("bare of tools", ' {"name": "Bob", "age": 3} ', "", ' {"name": "Bob", "age": 3} ', []),
    ("bare of tools", '{"age": 3, "arguments": {"a": 1}, "name": "Bob"}\n', "",
     '{"age": 3, "arguments": {"a": 1}, "name": "Bob"}\n', []),
    ("bare of tools", f'{A}; {{"name": "Bob"}}', "", '; {"name": "Bob"}', [CALL_A]),
    ("bare of tools", '<|python_tag|>{"name": "Bob"}', "", "", [("Bob", "{}")]),
    ("list", f"[{A}, {B}]", "", "", [CALL_A, CALL_B]),
    ("list", f" [\n{A}\n]\n", "", "", [CALL_A]),
    ("think", "<think>\nHm.\n</think>\n\nYes.", "\nHm.\n", "Yes.", []),
    ("think", "No <think>x</think>", "", "No <think>x</think>", []),
    ("think", "<think>cut of", "cut of", "", []),
    ("think", "<think>a</thin", "a</thin", "", []),
    ("think", "<thi", "", "<thi", []),
    ("open think", "Hm.</think>Yes.", "Hm.", "Yes.", []),
    ("think marked", f"<think>Hm. <tool_call></think> <tool_call>{A}</tool_call>",
     "Hm. <tool_call>", "", [CALL_A]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "reasoning", "content", "calls"), CASES)
def test_parts(
    kind: str, text: str, reasoning: str, content: str, calls: list[tuple[str, str]]
) -> None:
    whole = summary(split(make(kind), [text]))
    assert whole["reasoning"] == reasoning
    assert whole["calls"] == calls
    assert whole["content"] == content
    assert summary(split(make(kind), list(text))) == whole


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(
        ["marked", "bare", "bare of tools", "list", "think", "open think", "think marked"]
    ),
    seed=st.integers(0, 2**32),
)
def test_cuts_change_nothing(kind: str, seed: int) -> None:
    draw = random.Random(seed)
    words = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        A,
        B,
        "[",
        "]",
        "{",
        "}",
        " ",
        "\n",
    ]
    words += ["a", '"', ";", ",", "<", "</", "<|python_tag|>", '{"name": "f"}', "\\", ":", '"name"']
    text = "".join(draw.choice(words) for _ in range(draw.randrange(12)))
    whole = summary(split(make(kind), [text]))
    cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(1, 9)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert summary(split(make(kind), pieces)) == whole


def test_only_as_many_calls_as_are_wanted() -> None:
    text = f"<tool_call>{A}</tool_call><tool_call>{B}</tool_call>"
    assert summary(split(MarkedCalls(1), [text]))["calls"] == [CALL_A]


def test_a_forced_call_is_all_arguments() -> None:
    parts = split(ForcedCall("add"), ["", '{"x"', ": 1}"])
    assert summary(parts) == {"reasoning": "", "content": "", "calls": [("add", '{"x": 1}')]}
    assert json.loads(summary(parts)["calls"][0][1]) == {"x": 1}


LONG: list[tuple[str, str, str]] = [
    ("marked", "", " "),
    ("marked", "a", "\n"),
    ("marked", f"<tool_call>{A}", " "),
    ("bare", "", " "),
    ("bare", "<|python_tag|>", " "),
    ("bare", A, " ;"),
    ("list", "[", " "),
    ("think", "", " "),
    ("think marked", "<think>a</think>", "\n"),
    ("open think", "", "<"),
    ("bare", '{"name": "f", "arguments": {"a": "', "b"),
    ("bare", '{"arguments": {"a": "', "b"),
    ("bare", '{"arguments": "', "b"),
    ("bare", '{"other": [', "1,"),
    ("bare", '{"', "b"),
]


NUM_TRIES = 5  # other work on the same core may make one dear, but not all


def seconds_for(kind: str, start: str, piece: str, num_pieces: int) -> float:
    splitter = make(kind)
    begun = time.process_time()
    split(splitter, [start, *[piece] * num_pieces])
    return time.process_time() - begun


@pytest.mark.parametrize(("kind", "start", "piece"), LONG)
def test_a_piece_costs_no_more_behind_a_long_text(kind: str, start: str, piece: str) -> None:
    """Text of many pieces that stays undecided: sixteen times as much may not cost 256 times."""
    few = min(seconds_for(kind, start, piece, 1_500) for _ in range(3))
    assert any(
        seconds_for(kind, start, piece, 24_000) < 50 * max(few, 0.001) for _ in range(NUM_TRIES)
    )


def test_many_calls_in_one_piece_of_text_cost_no_more_each() -> None:
    def seconds(num_calls: int) -> float:
        text = f"<tool_call>{A}</tool_call>\n" * num_calls
        begun = time.process_time()
        split(MarkedCalls(9), [text])
        return time.process_time() - begun

    few = min(seconds(300) for _ in range(3))
    assert any(seconds(4_800) < 80 * few for _ in range(NUM_TRIES))
