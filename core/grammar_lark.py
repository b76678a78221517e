"""Lark text for the compiler, from every form of grammar, with the limits applied.

All forms become Lark, because only there the compiler takes an order not to force tokens: forcing
narrows the mask to one tokenization of a text that must follow, and names a special token for text
that merely looks like one, which the compiler itself then refuses. Pure: text in, text out.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from nvserve.core.grammar_limits import (
    MAX_INTERSECTED,
    MAX_LARK_BYTES,
    MAX_OPERATORS,
    MAX_RULES,
    check_choices,
    check_regex,
    check_repeats,
    check_string,
    parse_json,
)
from nvserve.core.grammar_schemas import SchemaCosts
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
    | (?P<rule>    :                              )
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
    if form == "json" and text:
        raise BadGrammar("the form json takes no text")
    if form == "regex":
        check_regex(text)
        return f"{PREAMBLE}start: /{regex_to_lark(text, '')}/"
    if form == "choice":
        choices = check_choices(parse_json(text))
        # A terminal: as alternatives of a rule each would be an item of the parser.
        return f"{PREAMBLE}start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices))
    costs = SchemaCosts()
    if form == "lark":
        lark = _checked_lark(text, costs)
    else:
        lark = "start: " + _inline(parse_json(text) if text else {"type": "object"}, costs)
    costs.check()
    return PREAMBLE + lark


def _inline(schema: Any, costs: SchemaCosts) -> str:
    """A schema as a Lark term."""
    costs.add(schema)
    if schema is False:
        raise BadGrammar("the schema false allows nothing")
    options = {"x-guidance": JSON_OPTIONS}
    return "%json " + json.dumps(options if schema is True else schema | options)


def _checked_lark(text: str, costs: SchemaCosts) -> str:
    """A client's Lark or EBNF with limits and options applied to what it embeds."""
    pieces = list(_pieces(_from_ebnf(text), costs))
    own = "".join(piece for kind, piece in pieces if kind != "schema")
    if len(own) > MAX_LARK_BYTES:
        raise BadGrammar(f"has {len(own)} characters, at most {MAX_LARK_BYTES} are allowed")
    rest = "".join(piece for kind, piece in pieces if kind == "rest")
    check_repeats(rest)
    for name, count, limit in (
        ("rules", sum(kind == "rule" for kind, _ in pieces), MAX_RULES),
        ("of the operators | ? * +", sum(map(rest.count, "|?*+")), MAX_OPERATORS),
        ("intersections and complements", sum(map(rest.count, "&~")), MAX_INTERSECTED),
    ):
        if count > limit:
            raise BadGrammar(f"has {count} {name}, at most {limit} are allowed")
    if "%json" in own:
        raise BadGrammar("%json is only taken as a directive")  # never past the limits unseen
    return "".join(piece for _, piece in pieces)


def _pieces(text: str, costs: SchemaCosts) -> Iterator[tuple[str, str]]:
    """(kind, text) of a Lark grammar's parts in order; embedded schemas ready for the compiler."""
    end = 0
    while (match := _PIECE.search(text, end)) is not None:
        yield "rest", text[end : match.start()]
        end = match.end()
        piece, kind = match.group(), match.lastgroup
        assert kind is not None, "every branch has a name"
        if kind in _UNSUPPORTED:
            raise BadGrammar(_UNSUPPORTED[kind])
        if kind == "string":
            check_string(piece)
        elif kind == "regex":
            check_regex(piece)
        elif kind == "directive" and _directive(piece) == "json":
            schema, end = _embedded_schema(text, end)
            kind, piece = "schema", _inline(schema, costs)
        if kind != "comment":
            yield kind, piece
    yield "rest", text[end:]


def _directive(piece: str) -> str:
    name = piece[1:].strip()
    if name not in _DIRECTIVES:
        raise BadGrammar(f"the directive %{name[:40]} is not supported")
    return name


def _embedded_schema(text: str, start: int) -> tuple[dict[str, Any], int]:
    """The object behind `%json` and the index behind it."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        schema, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise BadGrammar("%json must be followed by a schema") from error
    check_depth(schema)
    if not isinstance(schema, dict):
        raise BadGrammar("%json must be followed by an object")
    return schema, end


def _from_ebnf(text: str) -> str:
    """Lark for a grammar in the `root ::= ...` form; other text as it is."""
    bare = re.sub(r'"(?:[^"\\\n]|\\.)*"', "", text)
    if "::=" not in bare:
        return text
    if len(text) > MAX_LARK_BYTES:  # the converter is slow
        raise BadGrammar(f"has {len(text)} characters, at most {MAX_LARK_BYTES} are allowed")
    try:
        return str(any_to_lark(text)).replace("%llguidance {}", "", 1)
    except Exception as error:  # the converter documents none and raises several
        raise BadGrammar(f"is not valid EBNF: {str(error)[:200]}") from error
