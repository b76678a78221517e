"""The written form of a grammar in SamplingParams, and the checks cheap enough for any process.

A grammar is one string: a form, a colon and a text. `json:` (no text: any JSON object),
`json_schema:` a JSON schema, `regex:` an expression the whole output matches, `choice:` a JSON list
of strings, `lark:` a Lark or EBNF (`root ::= ...`) grammar. The frontend checks size and depth
before it does anything else with a client's grammar, and core again, since no peer is trusted.
"""

from typing import Any, Final

# Compiling costs memory, stack and time in proportion to the text: the worst that we found for this
# size takes well under a second. A schema of 300 properties is about 20 KB.
MAX_GRAMMAR_BYTES: Final = 128 << 10
# Every level is a few frames of recursion in the parsers of both languages; serde_json stops at 128
# and a level of a schema is two of JSON ("properties" and the name).
MAX_SCHEMA_DEPTH: Final = 100
MAX_GRAMMAR_PARTS: Final = MAX_GRAMMAR_BYTES // 2  # objects and arrays: no text of one is shorter

FORMS: Final = ("json", "json_schema", "regex", "choice", "lark")


class BadGrammar(ValueError):
    """A grammar that is not taken; the message says what is wrong with it."""


def split_grammar(grammar: str) -> tuple[str, str]:
    """(form, text) of a grammar; BadGrammar for an unknown form."""
    form, colon, text = grammar.partition(":")
    if not colon or form not in FORMS:
        raise BadGrammar(f"must start with one of {', '.join(FORMS)} and a colon")
    return form, text


def check_size(text: str) -> None:
    """Refuse what is too long, or is no text that UTF-8 can carry."""
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise BadGrammar("holds half of a surrogate pair") from error
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise BadGrammar(f"has {num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are allowed")


def check_depth(value: Any) -> int:
    """Refuse decoded JSON that is nested too deeply, or certainly too large; never recurses.

    Returns how many objects and arrays are in it.
    """
    level, num_parts = [value], 0
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return num_parts
        num_parts += len(level)
        if num_parts > MAX_GRAMMAR_PARTS:
            raise BadGrammar(f"is larger than {MAX_GRAMMAR_BYTES} bytes")
    raise BadGrammar(f"is nested more than {MAX_SCHEMA_DEPTH} levels deep")


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [child for child in value.values() if isinstance(child, dict | list)]
    if isinstance(value, list):
        return [child for child in value if isinstance(child, dict | list)]
    return []
