"""Lark text for the compiler, from every form of grammar, with the limits applied.

All forms become Lark, because only there the compiler takes an order not to force tokens: forcing
narrows the mask to one tokenization of a text that must follow, and names a special token for text
that merely looks like one, which the compiler itself then refuses. Pure: text in, text out.
"""

import json
import re
from typing import Any, Final

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from nvserve.core.grammar_limits import (
    MAX_RULES,
    check_choices,
    check_regex,
    check_repeats,
    check_schema,
    check_string,
    parse_json,
)
from nvserve.protocol.grammars import BadGrammar, check_depth, check_size, split_grammar

PREAMBLE: Final = '%llguidance {"no_forcing": true}\n'
# Enough for a line end and its indentation, and no way to fill max_tokens with blanks.
JSON_OPTIONS: Final = {"whitespace_pattern": r"[ \t\r\n]{1,32}"}

_DIRECTIVES: Final = frozenset({"json", "import", "ignore"})
_PIECE: Final = re.compile(
    r"""
      (?P<string>  "(?:[^"\\\n]|\\.)*"i?          )
    | (?P<comment> (?://|\#)[^\n]*                )
    | (?P<regex>   /(?:[^/\\\n]|\\.)+/[a-z]*      )
    | (?P<directive> %\s*[a-zA-Z_]+               )
    | (?P<ranges>  <\s*\[                         )
    | (?P<setting> \btemperature\s*=              )
    | (?P<rule>    ::=|:                          )
    """,
    re.VERBOSE,
)
_UNSUPPORTED: Final = {
    "ranges": "token ids by number are not supported",
    "setting": "temperature is not supported inside a grammar",
}


def to_lark(grammar: str) -> str:
    """The compiler's input for a grammar in the form of protocol.grammars, or BadGrammar."""
    check_size(grammar)
    form, text = split_grammar(grammar)
    if form == "json":
        if text:
            raise BadGrammar("the form json takes no text")
        return f"{PREAMBLE}start: {_inline({'type': 'object'})}"
    if form == "json_schema":
        return f"{PREAMBLE}start: {_inline(parse_json(text))}"
    if form == "regex":
        check_regex(text)
        return f"{PREAMBLE}start: /{regex_to_lark(text, '')}/"
    if form == "choice":
        choices = check_choices(parse_json(text))
        return f"{PREAMBLE}start: " + " | ".join(json.dumps(choice) for choice in choices)
    return PREAMBLE + _checked_lark(text)


def _inline(schema: Any) -> str:
    """A schema as a Lark term."""
    check_schema(schema)
    if isinstance(schema, bool):
        if not schema:
            raise BadGrammar("the schema false allows nothing")
        schema = {}
    return "%json " + json.dumps(schema | {"x-guidance": JSON_OPTIONS})


def _checked_lark(text: str) -> str:
    """A client's Lark or EBNF with limits and options applied to what it embeds."""
    text = _from_ebnf(text)
    checked = []
    end = num_rules = num_embedded = 0
    while (match := _PIECE.search(text, end)) is not None:
        checked.append(text[end : match.start()])
        end = match.end()
        piece, kind = match.group(), match.lastgroup
        assert kind is not None, "every branch has a name"
        if kind in _UNSUPPORTED:
            raise BadGrammar(_UNSUPPORTED[kind])
        if kind == "directive" and _directive(piece) == "json":
            schema, end = _embedded_schema(text, end)
            piece = schema
            num_embedded += 1
        elif kind == "string":
            check_string(piece)
        elif kind == "regex":
            check_regex(piece)
        num_rules += kind == "rule"
        checked.append("" if kind == "comment" else piece)
    checked.append(text[end:])
    if num_rules > MAX_RULES:
        raise BadGrammar(f"has {num_rules} rules, at most {MAX_RULES} are allowed")
    # Text and numbers between the pieces: repetitions of rules.
    check_repeats("".join(checked[::2]))
    if text.count("%json") > num_embedded:
        raise BadGrammar("%json is only taken as a directive")  # never past the limits unseen
    return "".join(checked)


def _directive(piece: str) -> str:
    name = piece[1:].strip()
    if name not in _DIRECTIVES:
        raise BadGrammar(f"the directive %{name[:40]} is not supported")
    return name


def _embedded_schema(text: str, start: int) -> tuple[str, int]:
    """The schema behind `%json`, checked, and the index behind it."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        schema, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise BadGrammar("%json must be followed by a schema") from error
    check_depth(schema)
    if not isinstance(schema, dict):
        raise BadGrammar("%json must be followed by an object")
    return _inline(schema), end


def _from_ebnf(text: str) -> str:
    """Lark for a grammar in the `root ::= ...` form; other text as it is."""
    bare = re.sub(r'"(?:[^"\\\n]|\\.)*"', "", text)
    if "::=" not in bare:
        return text
    if bare.count("::=") > MAX_RULES:  # the converter is slow where rules are many
        raise BadGrammar(f"has {bare.count('::=')} rules, at most {MAX_RULES} are allowed")
    try:
        return str(any_to_lark(text)).replace("%llguidance {}", "", 1)
    except Exception as error:  # the converter documents none and raises several
        raise BadGrammar(f"is not valid EBNF: {str(error)[:200]}") from error
