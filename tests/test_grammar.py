"""Masks of compiled grammars against independent answers, on the demo model's tokenizer."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import jsonschema
import pytest
import regex
from grammar_rig import (
    EOS_ID,
    MODEL,
    NUM_TOKENS,
    VOCAB_SIZE,
    allowed,
    compiled,
    ids_of,
    new_compiler,
    schema_grammar,
    token_bytes,
    walk,
)
from process.server import environment

from nvserve.core.errors import RequestRefused
from nvserve.core.grammar import CACHE_ENTRIES, GrammarCompiler, GrammarMatcher

EXPRESSIONS = [
    "(yes|no|maybe) ?[0-9]{2,3}",
    "a*b+",
    r"[A-Z][a-z]+( [a-z]+){0,3}\.",
    r"\d+(\.\d{1,2})?",
    "(the |a )?(cat|dog)s?",
    "[^a-z]{3}x",
    r"\{\"a\": (true|false)\}",
    "x{0}|xyz",
]


def partial_texts(expression: str, text: bytes) -> bool:
    """May this text be continued to a match? Answered by another engine, on characters."""
    try:
        decoded = text.decode()
    except UnicodeDecodeError:
        pytest.skip("ends inside a character")
    return regex.fullmatch(expression, decoded, partial=True) is not None


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_mask_is_exactly_what_another_engine_allows(expression: str) -> None:
    draw = Random(expression)
    tokens = {i: value for i, value in token_bytes().items() if value.isascii()}
    for _ in range(4):
        matcher, text = compiled("regex:" + expression), b""
        for _ in range(12):
            mask = allowed(matcher)
            expected = {i for i, value in tokens.items() if partial_texts(expression, text + value)}
            assert mask & tokens.keys() == expected, text
            is_whole = regex.fullmatch(expression, text.decode()) is not None
            assert (EOS_ID in mask) == is_whole == matcher.is_complete, text
            if not expected:
                break
            token_id = draw.choice(sorted(expected))
            matcher.advance(token_id)
            text += tokens[token_id]


@pytest.mark.parametrize(
    "choices", [["a", "ab", "abc"], ["red", "green"], ["", "x"], ["é", "日本", "😀"]]
)
def test_exactly_the_choices_can_be_written(choices: list[str]) -> None:
    """All texts that the masks allow, by walking every way."""
    found, pending = set(), [(compiled("choice:" + json.dumps(choices)), b"")]
    while pending:
        matcher, text = pending.pop()
        for token_id in allowed(matcher):
            if token_id == EOS_ID:
                found.add(text.decode())
            else:
                following = matcher.copy()
                following.advance(token_id)
                pending.append((following, text + token_bytes()[token_id]))
    assert found == set(choices)


def test_a_rule_may_call_itself() -> None:
    grammar = 'lark:start: pair\npair: "(" pair ")" | "x"'
    for text, is_whole in (("((x))", True), ("((x)", False), ("x", True)):
        matcher = compiled(grammar)
        for token_id in ids_of(text):
            assert token_id in allowed(matcher)
            matcher.advance(token_id)
        assert matcher.is_complete == is_whole


def test_ids_without_a_token_and_special_ones_never_are_allowed() -> None:
    matcher = compiled(r"regex:(.|\n)*")
    mask = allowed(matcher)
    assert len(matcher.mask()) == 4 * -(-VOCAB_SIZE // 32)
    assert not mask & set(range(NUM_TOKENS, 32 * -(-VOCAB_SIZE // 32)))
    assert mask & set(range(5)) == {EOS_ID}


def test_several_ids_may_end_a_text() -> None:
    compiler = GrammarCompiler(str(MODEL), vocab_size=VOCAB_SIZE, eos_token_ids=[3, EOS_ID])
    matcher = compiler.compile("regex:a*")
    assert {3, EOS_ID} <= allowed(matcher)
    matcher.advance(3)
    assert matcher.is_over
    assert matcher.error == ""


def test_a_grammar_that_is_used_up_is_over_without_an_end_token() -> None:
    matcher = compiled('choice:["yes"]')
    for token_id in ids_of("yes"):
        assert not matcher.is_over
        matcher.advance(token_id)
    assert matcher.is_over
    assert matcher.error == ""
    assert allowed(matcher) == {EOS_ID}


def test_an_id_that_was_not_allowed_is_an_error_and_no_crash() -> None:
    for token_id in (ids_of("zebra")[0], NUM_TOKENS + 3, 2**31 - 1, 3):
        matcher = compiled('choice:["yes"]')
        matcher.advance(token_id)
        assert matcher.is_over
        assert matcher.error
        assert not matcher.is_complete
        assert allowed(matcher), "a mask is never empty"


def test_a_replay_over_emitted_ids_stands_where_the_first_run_stood() -> None:
    grammar = schema_grammar({"type": "object", "properties": {"a": {"type": "integer"}}})
    emitted: list[int] = []
    first, draw = compiled(grammar), Random(3)
    for _ in range(20):
        second = new_compiler().compile(grammar)
        for token_id in emitted:
            second.advance(token_id)
        assert second.mask() == first.mask()
        if first.is_over:
            break
        emitted.append(draw.choice(sorted(allowed(first))))
        first.advance(emitted[-1])


def test_requests_with_the_same_grammar_do_not_disturb_each_other() -> None:
    one, other = compiled('choice:["ab", "cd"]'), compiled('choice:["ab", "cd"]')
    before = other.mask()
    one.advance(ids_of("a")[0])
    assert other.mask() == before != one.mask()


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
     "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["x", 1, None, True]}, "minItems": 2, "maxItems": 4},
    {"type": "string", "pattern": "^[ab]{2,5}$"},
    {"type": "string", "maxLength": 4},
    {"type": "integer", "minimum": -5, "maximum": 1234},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    {"anyOf": [{"const": {"k": [1]}}, {"type": "null"}]},
    {"type": "object", "properties": {"kind": {"const": "s"}, "next": {"$ref": "#"}},
     "required": ["kind"], "additionalProperties": False},
    {"$ref": "#/$defs/P", "$defs": {"P": {"type": "array", "prefixItems": [{"type": "boolean"}],
                                          "items": False, "minItems": 1}}},
    {"oneOf": [
        {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"],
         "additionalProperties": False},
        {"type": "object", "properties": {"k": {"const": "b"}, "n": {"type": "integer"}},
         "required": ["k", "n"], "additionalProperties": False}]},
    {"type": "string", "format": "date"},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_whatever_the_masks_allow_follows_the_schema(schema: dict[str, Any]) -> None:
    num_ended = 0
    for seed in range(12):
        text = walk(compiled(schema_grammar(schema)), Random(seed), max_tokens=400)
        if text is not None:
            num_ended += 1
            jsonschema.validate(json.loads(text), schema)
    assert num_ended >= 3


@pytest.mark.parametrize(
    "bounds",
    [
        {"exclusiveMinimum": 0, "maximum": 0.5},
        {"exclusiveMinimum": 0.0, "exclusiveMaximum": 0.5},
        {"minimum": -0.5, "exclusiveMaximum": 0},
        {"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]},
        {"exclusiveMinimum": 0, "allOf": [{"maximum": 0.5}]},
        {"exclusiveMinimum": 0, "anyOf": [{"maximum": 0.5}, {"maximum": 0.2}]},
    ],
)
def test_a_zero_that_would_not_be_excluded_is_refused(bounds: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused, match="exclusiveMinimum 0 with a maximum under 1"):
        compiled(schema_grammar({"type": "number", **bounds}))


@pytest.mark.parametrize(
    "bounds",
    [
        {"exclusiveMinimum": 0},
        {"exclusiveMinimum": 0, "maximum": 1},
        {"minimum": 1e-9, "maximum": 0.5},
        {"exclusiveMinimum": 0.25, "maximum": 0.5},
    ],
)
def test_an_excluded_zero_cannot_be_written(bounds: dict[str, Any]) -> None:
    zero = ids_of("0")
    matcher = compiled(schema_grammar({"type": "number", **bounds}))
    for token_id in zero:
        matcher.advance(token_id)
    assert EOS_ID not in allowed(matcher)


def test_an_object_of_any_kind_is_an_object() -> None:
    for seed in range(12):
        text = walk(compiled("json:"), Random(seed), max_tokens=600)
        assert text is None or isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, {"a": 5, "more": [1, {}]}),
        ({"type": "array", "items": {"type": "string"}}, ["ü", 'a"b\\c\n', "日本"]),
        ({"type": "number"}, -1.5e-7),
        ({"type": ["string", "null"]}, None),
        (True, {"x": [None, True, 1.0, "s"]}),
    ],
)
@pytest.mark.parametrize("indent", [None, 0, 2, 4])
def test_json_may_be_written_in_the_usual_ways(schema: Any, value: Any, indent: int | None) -> None:
    matcher = compiled(schema_grammar(schema))
    for token_id in ids_of(json.dumps(value, indent=indent, ensure_ascii=False)):
        assert token_id in allowed(matcher)
        matcher.advance(token_id)
    assert matcher.is_complete


def test_blanks_between_json_values_are_bounded() -> None:
    matcher = compiled(schema_grammar({"type": "array", "items": {"type": "integer"}}))
    for token_id in ids_of("["):
        matcher.advance(token_id)
    space = ids_of(" ")[0]
    for _ in range(33):
        if space not in allowed(matcher):
            break
        matcher.advance(space)
    else:
        pytest.fail("more than 32 blanks in a row")
    assert matcher.error == ""


def test_the_cache_is_bounded_and_remembers_refusals() -> None:
    compiler = new_compiler()
    for number in range(CACHE_ENTRIES + 20):
        compiler.compile(f"regex:a{number}")
    assert len(compiler._cache) == CACHE_ENTRIES
    for _ in range(2):
        with pytest.raises(RequestRefused, match="not valid"):
            compiler.compile("regex:+")
    assert isinstance(compiler._cache["regex:+"], str)


def test_two_threads_may_compile_at_once() -> None:
    compiler = new_compiler()
    results: list[GrammarMatcher] = []

    def compile_some(first: int) -> None:
        results.extend(compiler.compile(f"regex:[ab]{{{first + n}}}") for n in range(1, 40))

    threads = [Thread(target=compile_some, args=(first,)) for first in (0, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 78
    assert all(not matcher.error for matcher in results)


def test_a_model_without_a_usable_tokenizer_refuses_grammars(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for source in (None, "{}", "no json"):
        if source is not None:
            (tmp_path / "tokenizer.json").write_text(source)
        compiler = GrammarCompiler(str(tmp_path), vocab_size=1024, eos_token_ids=[1])
        with caplog.at_level(logging.CRITICAL), pytest.raises(RequestRefused, match="tokenizer"):
            compiler.compile("json:")


def test_compiling_never_loads_torch() -> None:
    code = (
        "import sys; from nvserve.core.grammar import GrammarCompiler;"
        f"GrammarCompiler({str(MODEL)!r}, vocab_size=1024, eos_token_ids=[1]).compile('json:');"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
