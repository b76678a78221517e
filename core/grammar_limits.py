"""Which grammars are refused before the compiler sees them, and every limit with its reason.

The compiler has limits of its own (`COMPILER_LIMITS`); what is checked here it would answer with
seconds of work, hundreds of MB, a stack overflow, or not at all. Pure: text and JSON only.
"""

import json
import math
import re
from fractions import Fraction
from typing import Any, Final, NoReturn

from llguidance import LLParserLimits

from nvserve.protocol.grammars import BadGrammar, check_depth

# Lexer work of the compiler is about 1 ms per 1 000-3 000 units of fuel at worst, so these bound a
# compilation to about 0.3 s and a later mask, which runs in core's loop, to a few ms; a request that
# runs into them in the middle of its output ends with an error.
COMPILER_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_lexer_fuel=50_000,
    step_max_items=50_000,
    max_items_in_row=8_000,  # an optional property takes four; 2 000 is too few for 500 of them
    max_lexer_states=20_000,  # of 1-2 KB each, for every grammar that is in use
    max_grammar_size=100_000,
    verbose_errors=False,  # they would quote the parser's state
)
# A thread's stack is reserved, not used: a chain of references costs the compiler up to 10 KB of it
# a link, and the longest one that fits in MAX_GRAMMAR_BYTES took less than a third.
STACK_BYTES: Final = 256 << 20

MAX_REGEX_CHARS: Final = 8 << 10  # a mask costs time in proportion to the text a lexeme is made of
MAX_STRING_CHARS: Final = 8 << 10  # the same for a constant, a choice or a literal
MAX_REPEAT: Final = 1_000  # one {n,m} of a regex or a rule: it multiplies the text
MAX_RULES: Final = 500  # of a Lark grammar: each may nest in the one before
MAX_PATTERN_PROPERTIES: Final = 32  # in a whole schema: all pairs are intersected (100: 0.1 s)
MAX_PATTERN_PROPERTY_CHARS: Final = 256  # of each of those patterns
# multipleOf becomes an automaton with one state a remainder, and several of them meet in their
# least common multiple: 100 003 took 0.3 s, 1 000 003 6 s and 300 MB.
MAX_MULTIPLE: Final = 20_000
MAX_COUNT: Final = 100_000  # minItems, maxLength and the like

_REPEAT: Final = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}|~\s*(\d+)(?:\s*\.\.\s*(\d+))?")
_COUNTS: Final = (
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minProperties",
    "maxProperties",
)


def parse_json(text: str) -> Any:
    """Decoded JSON that is not nested too deeply, or BadGrammar."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise BadGrammar("is nested too deeply") from error
    except BadGrammar:
        raise
    except ValueError as error:  # also an integer of thousands of digits
        raise BadGrammar(f"is not valid JSON: {error}") from error
    check_depth(value)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise BadGrammar(f"is not valid JSON: {name}")


def check_choices(choices: Any) -> list[str]:
    """A list of at least one string."""
    if not isinstance(choices, list) or not choices:
        raise BadGrammar("must be a list of at least one string")
    for choice in choices:
        if not isinstance(choice, str):
            raise BadGrammar("must hold nothing but strings")
        check_string(choice)
    return choices


def check_string(text: str) -> None:
    if len(text) > MAX_STRING_CHARS:
        raise BadGrammar(
            f"a string has {len(text)} characters, at most {MAX_STRING_CHARS} are allowed"
        )


def check_regex(pattern: str) -> None:
    """Refuse a long expression, an empty one, and large repetitions."""
    if not pattern:
        raise BadGrammar("the expression is empty")
    if len(pattern) > MAX_REGEX_CHARS:
        raise BadGrammar(
            f"an expression has {len(pattern)} characters, at most {MAX_REGEX_CHARS} are allowed"
        )
    check_repeats(pattern)


def check_repeats(text: str) -> None:
    """Refuse `{n,m}` and `~ n..m` with a large number; also where it is only quoted."""
    for match in _REPEAT.finditer(text):
        for digits in match.groups():
            if digits and (len(digits) > 9 or int(digits) > MAX_REPEAT):
                raise BadGrammar(f"a repetition exceeds {MAX_REPEAT}: {match.group()[:40]}")


# -- JSON schemas ----------------------------------------------------------------------------------


def check_schema(schema: Any) -> None:
    """Refuse schemas that would cost the compiler too much; `schema` passed `check_depth`."""
    if not isinstance(schema, dict | bool):
        raise BadGrammar("a schema must be an object or a boolean")
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise BadGrammar("x-guidance is not supported")  # it could turn checks of the compiler off
    multiples: list[Fraction] = []
    num_patterns = 0
    pending: list[Any] = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            num_patterns += _check_keywords(value, multiples)
            pending += value.values()
            pending += value  # property names are strings of the output
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, str):
            check_string(value)
    if num_patterns > MAX_PATTERN_PROPERTIES:
        raise BadGrammar(
            f"has {num_patterns} patternProperties, at most {MAX_PATTERN_PROPERTIES} are allowed"
        )
    _check_multiples(multiples)


def _check_keywords(schema: dict[str, Any], multiples: list[Fraction]) -> int:
    """Look at one object; its number of patternProperties.

    It may as well be the value of a property or a constant: a false alarm there needs a keyword's
    name with an absurd value.
    """
    if isinstance(pattern := schema.get("pattern"), str) and pattern:
        check_regex(pattern)
    for name in _COUNTS:
        count = schema.get(name)
        if isinstance(count, int | float) and not 0 <= count <= MAX_COUNT:
            raise BadGrammar(f"{name} must be from 0 to {MAX_COUNT}")
    multiple = schema.get("multipleOf")
    if isinstance(multiple, int | float) and not isinstance(multiple, bool):
        multiples.append(_multiple(multiple))
    patterns = schema.get("patternProperties")
    if not isinstance(patterns, dict):
        return 0
    for pattern in patterns:
        check_repeats(pattern)
        if len(pattern) > MAX_PATTERN_PROPERTY_CHARS:
            raise BadGrammar(
                f"a pattern of patternProperties has {len(pattern)} characters,"
                f" at most {MAX_PATTERN_PROPERTY_CHARS} are allowed"
            )
    return len(patterns)


def _multiple(value: float) -> Fraction:
    if not 1e-9 <= value <= MAX_MULTIPLE:
        raise BadGrammar(f"multipleOf must be positive and at most {MAX_MULTIPLE}")
    return Fraction(repr(value))


def _check_multiples(multiples: list[Fraction]) -> None:
    """Refuse numbers whose common remainders are too many: allOf and references may join them."""
    unit = math.lcm(*(multiple.denominator for multiple in multiples))
    together = math.lcm(*(int(multiple * unit) for multiple in set(multiples)))
    if together > MAX_MULTIPLE:
        raise BadGrammar(
            f"the values of multipleOf have a common multiple above {MAX_MULTIPLE} of their unit"
        )
