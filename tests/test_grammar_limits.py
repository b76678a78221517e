"""Grammars made to hurt (A10): compiled or refused within a second of CPU time, and never a crash.

Every family is cut to the largest size that MAX_GRAMMAR_BYTES lets through, and what compiles is
also run, since a grammar may be cheap to compile and dear to follow.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from grammar_rig import EOS_ID, allowed, compiled, ids_of, new_compiler, schema_grammar
from process.server import environment

from nvserve.core.errors import RequestRefused
from nvserve.core.grammar import GrammarMatcher
from nvserve.core.grammar_limits import MAX_TOKEN_S
from nvserve.protocol.grammars import MAX_GRAMMAR_BYTES

COMPILE_LIMIT_S = 1.0
NOISE = 2  # CPU time on a machine whose cores are shared
NUM_TRIES = 3  # which may make one try still dearer, but not all


def compile_in_time(grammar: str) -> GrammarMatcher | RequestRefused:
    """The outcome of a fresh compiler, its tokenizer loaded, within the limit."""
    spent_s: list[float] = []
    while len(spent_s) < NUM_TRIES:
        compiler = new_compiler()
        compiler.load_tokenizer()
        started_s = time.process_time()
        try:
            outcome: GrammarMatcher | RequestRefused = compiler.compile(grammar)
        except RequestRefused as refusal:
            outcome = refusal
        spent_s.append(time.process_time() - started_s)
        if spent_s[-1] < COMPILE_LIMIT_S * NOISE:
            return outcome
    raise AssertionError(f"{spent_s} s")


def run(matcher: GrammarMatcher, num_tokens: int) -> None:
    """Follow a grammar at random; but for single ones no token may cost more than the limit."""
    draw = Random(1)
    num_dear = 0
    for _ in range(num_tokens):
        if matcher.is_over:
            break
        started_s = time.thread_time()
        matcher.advance(draw.choice(sorted(allowed(matcher))))
        num_dear += time.thread_time() - started_s > MAX_TOKEN_S * NOISE * 2
    assert num_dear < NUM_TRIES


def largest(make: Callable[[int], str]) -> str:
    """A family's member just below the size limit."""
    low, high = 1, 1 << 4
    while len(make(high)) <= MAX_GRAMMAR_BYTES and high < 1 << 16:
        low, high = high, 2 * high
    while low < high:
        middle = (low + high + 1) // 2
        if len(make(middle)) <= MAX_GRAMMAR_BYTES:
            low = middle
        else:
            high = middle - 1
    return make(low)


def chain(link: Callable[[dict[str, str]], Any], num_links: int) -> str:
    """Definitions that each refer to the next."""
    definitions = {str(i): link({"$ref": f"#/$defs/{i + 1}"}) for i in range(num_links)}
    definitions[str(num_links)] = {"type": "string"}
    return schema_grammar({"$ref": "#/$defs/0", "$defs": definitions})


def wrapped(inner: Any, keyword: str, times: int) -> Any:
    for _ in range(times):
        inner = {keyword: [inner]}
    return inner


def properties(count: int) -> dict[str, Any]:
    return {f"p{i}": {} for i in range(count)}


def rules(letter: str, body: str, count: int) -> str:
    """Rules, or with a capital letter terminals, that each use the next one, `^` in the body."""
    lines = [f"{letter}{i}: " + body.replace("^", f"{letter}{i + 1}") for i in range(count)]
    return "\n".join([f"lark:start: {letter}0", *lines, f'{letter}{count}: "a"'])


SMALL: dict[str, str] = {
    "open groups": "regex:" + "(" * 60_000,
    "nested groups": "regex:" + "(" * 4_000 + "a" + ")" * 4_000,
    "nested stars": "regex:" + "(" * 200 + "a" + "*)" * 200,
    "look-behind": "regex:(?<=x)*",
    "back-reference": r"regex:(a)\1",
    "nothing to repeat": "regex:*a",
    "plus alone": "regex:+",
    "empty": "regex:",
    "half an escape": "regex:a\\",
    "half an escape behind a whole one": "regex:\\\\\\",
    "half an escape in a pattern": '{"type": "string", "pattern": "a\\\\"}',
    "half an escape in a key": '{"type": "object", "patternProperties": {"a\\\\": {}}}',
    "nothing matches": r"regex:[^\s\S]",
    "unbalanced class": "regex:[a",
    "large repeat": "regex:a{100000}",
    "huge repeat": "regex:a{99999999999999999999}",
    "repeats of repeats": "regex:((a{1000}){1000}){1000}",
    "optional and not": "regex:" + "a?" * 2_000 + "a" * 2_000,
    "unicode": "regex:" + r"\p{L}\p{N}?" * 700,
    "any case": "regex:(?i)" + "k" * 8_000,
    "dots": "regex:" + ".*a" * 2_500,
    "odd type": '{"type": "something"}',
    "number as type": '{"type": 5}',
    "object as type": '{"type": {}}',
    "number as pattern": '{"type": "string", "pattern": 5}',
    "look-behind in a pattern": '{"type": "string", "pattern": "(?<=x)*"}',
    "self reference": '{"$ref": "#"}',
    "self reference with more": '{"allOf": [{"$ref": "#"}, {"type": "string"}]}',
    "unknown reference": '{"$ref": "#/$defs/x"}',
    "remote reference": '{"$ref": "http://localhost:1/x.json"}',
    "file reference": '{"$ref": "file:///etc/passwd"}',
    "not supported": '{"type": "array", "uniqueItems": true}',
    "options of the compiler": '{"type": "object", "x-guidance": {"lenient": true}}',
    "large multiple": '{"type": "integer", "multipleOf": 1000003}',
    "multiples together": '{"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}',
    "no multiple": '{"type": "integer", "multipleOf": 0}',
    "not a number": '{"type": "integer", "minimum": NaN}',
    "false": "false",
    "no schema": "5",
    "no json": "{",
    "deep": '{"a":' * 10_000 + "1" + "}" * 10_000,
    "deep and open": "[" * 60_000,
    "long integer": '{"const": ' + "9" * 5_000 + "}",
    "huge count": '{"type": "string", "maxLength": 1e300}',
    "negative count": '{"type": "array", "minItems": -1}',
    "rule of itself": "lark:start: start",
    "ambiguous alternatives": "lark:start: e\ne: " + "|".join(["e e"] * 500) + '|"a"',
    "nullable parts": "lark:start: " + " ".join(['("a"|"b")*'] * 250),
    "intersections": "lark:start: A\nA: " + " & ".join(f"/.*a{i}.*/" for i in range(40)),
    "nested brackets": "lark:start: " + "(" * 2_000 + '"a"' + ")" * 2_000,
    "a file": "lark:%import /etc/passwd\nstart: X",
    "no start": 'lark:a: "b"',
    "nested groups in EBNF": "lark:root ::= " + "(" * 6_000 + '"a"' + ")" * 6_000,
    "no list": 'choice:{"a": 1}',
    "no choices": "choice:[]",
    "half a pair": 'choice:["\\ud800"]',
    "unknown form": "xml:<a/>",
    "no form": "start",
}  # fmt: skip
HARMLESS = {
    "repeats of repeats", "unicode", "any case", "dots", "nullable parts",
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_a10_small_bombs(name: str) -> None:
    text = SMALL[name]
    form = text.partition(":")[0]
    is_schema = form not in ("regex", "lark", "choice", "xml") and name != "no form"
    outcome = compile_in_time(f"json_schema:{text}" if is_schema else text)
    if name in HARMLESS:
        assert isinstance(outcome, GrammarMatcher), outcome
        run(outcome, 60)
    else:
        assert isinstance(outcome, RequestRefused)
        assert outcome.param == "grammar"
        assert len(outcome.message) < 600


FAMILIES: dict[str, Callable[[int], str]] = {
    "references": lambda n: chain(lambda ref: ref, n),
    "references in arrays": lambda n: chain(
        lambda ref: {"anyOf": [{"items": ref}, {"type": "null"}]}, n
    ),
    "references in properties": lambda n: chain(lambda ref: {"properties": {"a": ref}}, n),
    "references in choices": lambda n: chain(lambda ref: wrapped(ref, "anyOf", 40), n),
    "references doubled": lambda n: chain(lambda ref: {"allOf": [ref] * 8}, min(n, 8)),
    "references with more": lambda n: chain(lambda ref: {"title": "t", **ref}, n),
    "enum": lambda n: schema_grammar({"enum": [f"v{i}" for i in range(n)]}),
    "properties": lambda n: schema_grammar({"properties": properties(n)}),
    "properties within the limit": lambda n: schema_grammar({"properties": properties(2_000)}),
    "required names": lambda n: schema_grammar({"required": list(properties(n))}),
    "objects to choose from": lambda n: schema_grammar(
        {"anyOf": [{"properties": {f"p{i}": {}}, "required": [f"p{i}"]} for i in range(n)]}
    ),
    "patterns joined": lambda n: schema_grammar(
        {"type": "string", "allOf": [{"pattern": f"a{i}"} for i in range(n)]}
    ),
    "patterns joined down a chain": lambda n: chain(
        lambda ref: {"pattern": "a" + ref["$ref"][8:], **ref}, n
    ),
    "choices joined": lambda n: schema_grammar(
        {"allOf": [{"anyOf": [{"minLength": i}, {"maxLength": i}]} for i in range(n)]}
    ),
    "pattern properties": lambda n: schema_grammar(
        {"patternProperties": {f"^a{i:05}z": {} for i in range(n)}}
    ),
    "numbers": lambda n: schema_grammar(
        {"anyOf": [{"type": "number", "minimum": i / 7, "maximum": i * 1.7 + 1} for i in range(n)]}
    ),
    "multiples": lambda n: schema_grammar(
        {"properties": {f"p{i}": {"type": "integer", "multipleOf": 20_000} for i in range(n)}}
    ),
    "formats": lambda n: schema_grammar(
        {"properties": {f"p{i}": {"type": "string", "format": "email"} for i in range(n)}}
    ),
    "constant list": lambda n: schema_grammar({"const": [1] * n}),
    "prefix items": lambda n: schema_grammar({"prefixItems": [{}] * n, "minItems": n}),
    "choices": lambda n: "choice:" + json.dumps([f"w{i}" for i in range(n)]),
    "embedded schemas": lambda n: "lark:start: " + " ".join(["%json {}"] * n),
    "alternatives": lambda n: "lark:start: " + "|".join(f'"w{i}"' for i in range(n)),
    "optional parts": lambda n: "lark:start: " + " ".join(['"a"?'] * n),
    "terminals doubled": lambda n: rules("A", "^ ^", min(n, 195)),
    "rules doubled": lambda n: rules("r", "^ ^", min(n, 195)),
    "terminals repeated": lambda n: rules("A", "^{1000}", min(n, 195)),
    "terminals nested": lambda n: rules("A", '("x" ^)* "y" | "z"', min(n, 195)),
    "rules in a chain": lambda n: rules("r", "^", n),
    "words in EBNF": lambda n: "lark:root ::= " + " | ".join(f'"w{i}"' for i in range(n)),
    "groups in EBNF": lambda n: "lark:root ::= " + " ".join(['("a" | "b")*'] * n),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a10_the_largest_of_each_family(name: str) -> None:
    outcome = compile_in_time(largest(FAMILIES[name]))
    if isinstance(outcome, GrammarMatcher):
        run(outcome, 60)


def test_a10_deep_chains_overflow_no_stack() -> None:
    """In a process of its own, since an overflow would end it."""
    code = f"""
import sys; sys.path[:0] = {sys.path!r}
from grammar_rig import new_compiler
from test_grammar_limits import FAMILIES, largest, run
compiler = new_compiler()
for name in FAMILIES:
    if "references" in name or "chain" in name or "nested" in name:
        try:
            matcher = compiler.compile(largest(FAMILIES[name]))
        except Exception as error:
            print("refused", name, error)
        else:
            run(matcher, 20)
            del matcher
            print("compiled", name)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert "compiled references\n" in done.stdout, "the chain is refused, so nothing was shown"


def test_a10_a_pattern_that_explodes_elsewhere_is_followed_in_linear_time() -> None:
    matcher = compiled("regex:(a+)+$")
    started_s = time.process_time()
    for _ in range(40):
        token_id = ids_of("a")[0]
        assert token_id in allowed(matcher)
        matcher.advance(token_id)
    assert EOS_ID in allowed(matcher)
    assert time.process_time() - started_s < COMPILE_LIMIT_S


def test_a_self_reference_is_followed_as_deep_as_the_output_goes() -> None:
    matcher = compiled(schema_grammar({"type": "array", "items": {"$ref": "#"}}))
    for token_id in ids_of("[" * 200 + "]" * 200):
        assert token_id in allowed(matcher)
        matcher.advance(token_id)
    assert matcher.is_complete


def test_a_grammar_that_gets_dearer_with_every_token_ends_in_an_error() -> None:
    matcher = compiled('lark:start: e\ne: e e | "a"')
    token_id = ids_of("a")[0]
    started_s = time.process_time()
    for _ in range(3_000):
        if matcher.is_over:
            break
        matcher.mask()
        matcher.advance(token_id)
    assert "time" in matcher.error
    assert time.process_time() - started_s < 10 * NOISE


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"p{i}": {"type": "string", "description": "d" * 40} for i in range(300)}},
        {"$defs": {f"D{i}": {"properties": {"next": {"anyOf": [{"$ref": f"#/$defs/D{(i + 1) % 90}"},
         {"type": "null"}]}, "x": {"type": "number"}}} for i in range(90)}, "$ref": "#/$defs/D0"},
        {"properties": {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i + 1}}}$"}
         for i in range(60)}},
        {"properties": {f"p{i}": {"allOf": [{"$ref": "#/$defs/B"}], "title": "t"} 
         for i in range(40)}, "$defs": {"B": {"properties": {"a": {"type": "integer"}}}}},
        {"allOf": [{"$ref": "#/$defs/B"}, {"properties": {"c": {"type": "string"}}}],
         "$defs": {"B": {"properties": {"a": {"type": "integer"}}}}},
        {"properties": {"price": {"type": "number", "multipleOf": 0.01},
                        "count": {"type": "integer", "multipleOf": 5}}},
        {"enum": [f"country {i}" for i in range(300)]},
    ],
    ids=["wide", "recursive models", "patterns", "defaults", "inheritance", "money", "enum"],
)  # fmt: skip
def test_ordinary_large_schemas_are_within_the_limits(schema: dict[str, Any]) -> None:
    outcome = compile_in_time(schema_grammar(schema))
    assert isinstance(outcome, GrammarMatcher), outcome
    run(outcome, 60)
