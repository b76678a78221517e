"""What reaches the compiler: every form as Lark, with limits and options on what it embeds."""

import json
from random import Random

import pytest
from grammar_rig import allowed, compiled, ids_of, walk

from nvserve.core.errors import RequestRefused
from nvserve.core.grammar_lark import to_lark
from nvserve.core.grammar_limits import MAX_INTERSECTED, MAX_LARK_BYTES, MAX_OPERATORS, MAX_RULES
from nvserve.protocol.grammars import (
    MAX_GRAMMAR_BYTES,
    MAX_SCHEMA_DEPTH,
    BadGrammar,
    check_depth,
    check_size,
)


def accepts(grammar: str, text: str) -> bool:
    """May this whole text be written?"""
    matcher = compiled(grammar)
    for token_id in ids_of(text):
        if token_id not in allowed(matcher):
            return False
        matcher.advance(token_id)
    return matcher.is_complete


@pytest.mark.parametrize(
    ("expression", "text"),
    [("a/b", "a/b"), ('say "x"', 'say "x"'), ("a\nb", "a\nb"), (r"\/\\", "/\\"), ("#x", "#x"),
     (r"\t", "\t"), ("[/]+", "//"), ("^ab$", "ab"), ("é+", "éé")],
)  # fmt: skip
def test_an_expression_keeps_its_meaning_inside_lark(expression: str, text: str) -> None:
    assert accepts(f"regex:{expression}", text)
    assert not accepts(f"regex:{expression}", text + "!")


@pytest.mark.parametrize(
    "choice", ['"', "\\", "a/b", "\n", "%json", "// no", "\u2028", "a" * 8_000]
)
def test_a_choice_may_hold_any_character(choice: str) -> None:
    assert accepts("choice:" + json.dumps([choice, "x"]), choice)


@pytest.mark.parametrize(
    "lark",
    [
        'start: "a" b // %llguidance "\nb: /[0-9]+/ "%" "x"i',
        'start: "a" NUMBER "%x"\n%import common.INT -> NUMBER',
        '?start: "a" INT "%" ("x" | "y")\nINT: /[0-9]/+',
    ],
)
def test_lark_with_comments_imports_and_percent_signs(lark: str) -> None:
    assert accepts("lark:" + lark, "a12%x")
    assert not accepts("lark:" + lark, "a12%xx")


def test_schemas_inside_lark_are_followed_and_bounded() -> None:
    lark = 'lark:start: "<" %json {"type": "object", "required": ["a"]} ">"'
    assert accepts(lark, '<{"a": 1}>')
    assert not accepts(lark, '<{"b": 1}>')
    assert "whitespace_pattern" in to_lark(lark)
    for schema in ('{"multipleOf": 1000003}', '{"x-guidance": {}}', '{"pattern": "a{9999}"}'):
        with pytest.raises(BadGrammar):
            to_lark(f"lark:start: %json {schema}")


@pytest.mark.parametrize(
    ("ebnf", "text"),
    [
        ('root ::= "yes" | "no"', "no"),
        ('root ::= item ("," item)*\nitem ::= [a-c] | "(" root ")"', "a,(b,c)"),
        ('root ::= [0-9]{2,3} "::="', "123::="),
    ],
)
def test_ebnf_is_taken_too(ebnf: str, text: str) -> None:
    assert accepts("lark:" + ebnf, text)
    assert not accepts("lark:" + ebnf, text + "?")
    for seed in range(5):
        assert walk(compiled("lark:" + ebnf), Random(seed), 200) != ""


@pytest.mark.parametrize(
    ("lark", "reason"),
    [
        ("%llguidance {}\nstart: /a/", "%llguidance is not supported"),
        ('start: %regex {"substring_chars": "abc"}', "%regex is not supported"),
        ("start: % llguidance {}", "not supported"),
        ("start: <[1-900]>", "by number"),
        ("start: < [1]>", "by number"),
        ('start[temperature=0.5]: "a"', "temperature"),
        ("start: %json 5", "followed by an object"),
        ("start: %json {", "followed by a schema"),
        ('start: "%json"', "only taken as a directive"),
        ("start: /%json/", "only taken as a directive"),
        ('start: "a"~2000', "repetition"),
        ('start: "a"{1,2000}', "repetition"),
        ("start: " + " & ".join(["/a/"] * (MAX_INTERSECTED + 2)), "intersections"),
        ('start: "a"' + '| "a"' * (MAX_OPERATORS + 1), "operators"),
        ("\n".join(f"r{i}: /a/" for i in range(MAX_RULES + 1)), "rules"),
        ("start: /a/" + " " * MAX_LARK_BYTES, "characters"),
        ('root ::= "a"' + " " * MAX_LARK_BYTES, "characters"),
    ],
)
def test_what_lark_may_not_hold(lark: str, reason: str) -> None:
    with pytest.raises(BadGrammar, match=reason):
        to_lark("lark:" + lark)


@pytest.mark.parametrize("grammar", ["", "json", "JSON:", "yaml:x", "json:{}"])
def test_forms_that_do_not_exist(grammar: str) -> None:
    with pytest.raises(BadGrammar):
        to_lark(grammar)


def test_a_refusal_names_the_field_and_no_internals() -> None:
    with pytest.raises(RequestRefused, match=r"^grammar: ") as caught:
        compiled('json_schema:{"const": ' + json.dumps([1] * 60_000) + "}")
    assert caught.value.param == "grammar"
    assert "backtrace" not in caught.value.message
    assert "panic" not in caught.value.message


def test_size_is_counted_in_bytes_and_depth_without_recursion() -> None:
    check_size("é" * (MAX_GRAMMAR_BYTES // 2))
    with pytest.raises(BadGrammar, match="bytes"):
        check_size("é" * (MAX_GRAMMAR_BYTES // 2 + 1))
    with pytest.raises(BadGrammar, match="surrogate"):
        check_size("\ud800")
    value: object = 1
    for _ in range(MAX_SCHEMA_DEPTH):
        value = {"a": value}
    check_depth(value)
    for _ in range(100_000):
        value = [value]
    with pytest.raises(BadGrammar, match="levels deep"):
        check_depth(value)
    with pytest.raises(BadGrammar, match="larger"):
        check_depth([[]] * (MAX_GRAMMAR_BYTES // 2 + 1))
    assert check_depth([[], {"a": [1]}]) == 3
    while isinstance(value, list):  # taken apart here, so that freeing it does not recurse either
        value = value[0]
