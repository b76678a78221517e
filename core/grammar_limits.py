"""Which grammars are refused before the compiler sees them, and every limit with its reason.

The compiler has limits of its own (`COMPILER_LIMITS`); what is checked here it would answer with
seconds of work, hundreds of MB, a stack overflow, or not at all. Pure: text and JSON only.
"""

import json
import re
from typing import Any, Final, NoReturn

from llguidance import LLParserLimits

from nvserve.protocol.grammars import BadGrammar, check_depth

# Lexer work is 1 ms per 1 000-3 000 units of fuel at worst, so these bound most compilations to
# about 0.3 s and a mask, which is made in core's loop, to a few ms.
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
# CPU time of one token, and of all of them; ordinary grammars stay far below. Ambiguous rules cost
# more with every token and no limit of the compiler counts that: such an output ends in an error.
MAX_TOKEN_S: Final = 0.1
FREE_S: Final = 0.5
MAX_MEAN_TOKEN_S: Final = 0.002  # beyond FREE_S
NUM_TRIAL_TOKENS: Final = 8  # tried while compiling, so that most such grammars are refused

MAX_REGEX_CHARS: Final = 8 << 10  # a mask costs time in proportion to the text a lexeme is made of
MAX_STRING_CHARS: Final = 8 << 10  # the same for a constant, a choice or a literal
MAX_REPEAT: Final = 1_000  # one {n,m} of a regex or a rule: it multiplies the text

# Of a Lark grammar without the schemas in it. Alternatives and optional parts of one rule cost the
# product of their numbers (1 000 alternatives "e e": 2 s), nested terminals their depth (300: 1 s).
MAX_LARK_BYTES: Final = 16 << 10
MAX_RULES: Final = 200
MAX_OPERATORS: Final = 512  # | ? * +

# Of all schemas of one grammar.
MAX_PROPERTIES: Final = 2_000  # an object's are compared in pairs (3 000: 1 s, 12 000: 11 s)
MAX_ALL_OF: Final = 64  # entries of allOf, merged one by one
# References that meet others in one allOf: a chain of them doubles with every link (2**24: 30 s and
# 4 GB), so this many allow at most 3**4 copies.
MAX_JOINED_REFERENCES: Final = 12
MAX_PATTERN_PROPERTIES: Final = 32  # all pairs are intersected (100: 0.1 s, 1 000: minutes)
MAX_PATTERN_PROPERTY_CHARS: Final = 256  # of each of those patterns
# Texts that must match several expressions at once: 20 took 2 s, 30 more than a minute and 4 GB.
MAX_INTERSECTED: Final = 8
# multipleOf becomes an automaton with one state a remainder, and several of them meet in their
# least common multiple: 100 003 took 0.3 s, 1 000 003 6 s and 300 MB.
MAX_MULTIPLE: Final = 20_000
MAX_MULTIPLES: Final = 256
MAX_COUNT: Final = 100_000  # minItems, maxLength and the like

_REPEAT: Final = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}|~\s*(\d+)(?:\s*\.\.\s*(\d+))?")


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
    """Refuse a long expression, an empty one, half an escape at its end, and large repetitions."""
    if not pattern:
        raise BadGrammar("the expression is empty")
    if len(pattern) > MAX_REGEX_CHARS:
        raise BadGrammar(
            f"an expression has {len(pattern)} characters, at most {MAX_REGEX_CHARS} are allowed"
        )
    check_escape(pattern)
    check_repeats(pattern)


def check_escape(pattern: str) -> None:
    """Refuse a backslash at the end that escapes nothing: the compiler would drop it."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise BadGrammar("an expression ends in a backslash that escapes nothing")


def check_repeats(text: str) -> None:
    """Refuse `{n,m}` and `~ n..m` with a large number; also where it is only quoted."""
    for match in _REPEAT.finditer(text):
        for digits in match.groups():
            if digits and (len(digits) > 9 or int(digits) > MAX_REPEAT):
                raise BadGrammar(f"a repetition exceeds {MAX_REPEAT}: {match.group()[:40]}")
