"""Which JSON schemas are refused before the compiler sees them; the limits are in grammar_limits.

Looks at each object by itself and never resolves a reference, so what it counts is an upper bound.
Pure: decoded JSON only.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final, TypeGuard

from nvserve.core.grammar_limits import (
    MAX_ALL_OF,
    MAX_COUNT,
    MAX_INTERSECTED,
    MAX_JOINED_REFERENCES,
    MAX_MULTIPLE,
    MAX_MULTIPLES,
    MAX_PATTERN_PROPERTIES,
    MAX_PATTERN_PROPERTY_CHARS,
    MAX_PROPERTIES,
    check_escape,
    check_regex,
    check_repeats,
    check_string,
)
from nvserve.protocol.grammars import BadGrammar

_COUNTS: Final = (
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minProperties",
    "maxProperties",
)
_SIDES: Final = (  # a sign, the bound that may exclude 0 there, those on the other side
    (1, "exclusiveMinimum", ("maximum", "exclusiveMaximum")),
    (-1, "exclusiveMaximum", ("minimum", "exclusiveMinimum")),
)
_ZERO_LET_THROUGH: Final = (
    "exclusiveMinimum 0 with a maximum under 1, or exclusiveMaximum 0 with a minimum above -1, is"
    " not supported: set minimum or maximum to the value nearest to 0 instead"
)
_ON_TEXT: Final = ("pattern", "format", "minLength", "maxLength")
_JOINING: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
_ANNOTATIONS: Final = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("discriminator", "nullable", "$schema", "$id", "$comment", "$defs", "definitions"),
}


@dataclass(slots=True)
class SchemaCosts:
    """What the schemas of one grammar add up to; `check` refuses a sum over its limit."""

    num_properties: int = 0
    num_all_of: int = 0
    num_joined_references: int = 0
    num_pattern_properties: int = 0
    multiples: list[Fraction] = field(default_factory=list)

    def add(self, schema: Any) -> None:
        """Count a schema, which passed `check_depth`; BadGrammar for what is wrong by itself."""
        if not isinstance(schema, dict | bool):
            raise BadGrammar("a schema must be an object or a boolean")
        if isinstance(schema, dict) and "x-guidance" in schema:
            raise BadGrammar("x-guidance is not supported")  # it turns checks of the compiler off
        texts: set[str] = set()  # distinct conditions on strings
        excluding: set[int] = set()  # signs of the bounds that exclude 0,
        near: set[int] = set()  # and of those on the other side that are less than 1 from it
        can_join = lets_zero_through = False
        for part in _objects(schema):
            self._count(part)
            own_excluding, own_near = _around_zero(part)
            lets_zero_through |= bool(own_excluding & own_near)
            excluding |= own_excluding
            near |= own_near
            texts |= {f"{name} {part[name]}" for name in _ON_TEXT if _is_plain(part.get(name))}
            can_join |= _joins(part)
        if lets_zero_through or (can_join and excluding & near):
            raise BadGrammar(_ZERO_LET_THROUGH)
        if can_join and len(texts) > MAX_INTERSECTED:
            raise BadGrammar(
                "a schema that joins others with allOf, anyOf or $ref may set at most"
                f" {MAX_INTERSECTED} different patterns, formats and lengths, this one has"
                f" {len(texts)}"
            )

    def check(self) -> None:
        """BadGrammar for the first sum over its limit."""
        for name, count, limit in (
            ("properties", self.num_properties, MAX_PROPERTIES),
            ("entries of allOf", self.num_all_of, MAX_ALL_OF),
            ("references joined by allOf", self.num_joined_references, MAX_JOINED_REFERENCES),
            ("patternProperties", self.num_pattern_properties, MAX_PATTERN_PROPERTIES),
            ("values of multipleOf", len(self.multiples), MAX_MULTIPLES),
        ):
            if count > limit:
                raise BadGrammar(f"has {count} {name}, at most {limit} are allowed")
        unit = math.lcm(*(multiple.denominator for multiple in self.multiples))
        if math.lcm(*(int(multiple * unit) for multiple in self.multiples)) > MAX_MULTIPLE:
            raise BadGrammar(
                f"the values of multipleOf have a common multiple above {MAX_MULTIPLE} of their"
                " unit"
            )

    def _count(self, part: dict[str, Any]) -> None:
        """Look at one object, which may as well be a constant or a map of properties.

        A false alarm there needs keywords' names with values that hardly occur together.
        """
        if isinstance(pattern := part.get("pattern"), str) and pattern:
            check_regex(pattern)
        for name in _COUNTS:
            count = part.get(name)
            if isinstance(count, int | float) and not 0 <= count <= MAX_COUNT:
                raise BadGrammar(f"{name} must be from 0 to {MAX_COUNT}")
        names = (part.get("properties"), part.get("required"))
        self.num_properties += max(
            len(n) for n in (*names, ()) if isinstance(n, dict | list | tuple)
        )
        self.num_all_of += _size(part.get("allOf"))
        num_references = _num_joined_references(part)
        self.num_joined_references += num_references if num_references > 1 else 0
        multiple = part.get("multipleOf")
        if _is_number(multiple):
            self.multiples.append(_multiple(multiple))
        patterns = part.get("patternProperties")
        if isinstance(patterns, dict):
            self.num_pattern_properties += len(patterns)
            for pattern in patterns:
                _check_key_pattern(pattern)


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object inside, itself included; strings and names on the way are checked."""
    pending: list[Any] = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
            pending += value.values()
            pending += value
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, str):
            check_string(value)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, dict | list) else 0


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _joins(part: dict[str, Any]) -> bool:
    """May the conditions of this object meet those of another one on the same text?"""
    if isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1:
        return True
    names = part.keys()
    joining = names & _JOINING
    return bool(joining) and len(names - _ANNOTATIONS) > 1


def _num_joined_references(part: dict[str, Any]) -> int:
    """How many conditions that hold here together lead to references."""
    entries = part["allOf"] if isinstance(part.get("allOf"), list) else []
    choices = [part.get("anyOf"), part.get("oneOf")]
    return ("$ref" in part) + sum(_refers(condition) for condition in [*entries, *choices])


def _refers(condition: Any) -> bool:
    """Does this schema, or list of schemas, lead to a reference for the same value?"""
    pending = [condition]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            if "$ref" in value:
                return True
            pending += [value.get(name) for name in ("allOf", "anyOf", "oneOf")]
    return False


def _check_key_pattern(pattern: str) -> None:
    check_escape(pattern)
    check_repeats(pattern)
    if len(pattern) > MAX_PATTERN_PROPERTY_CHARS:
        raise BadGrammar(
            f"a pattern of patternProperties has {len(pattern)} characters, at most"
            f" {MAX_PATTERN_PROPERTY_CHARS} are allowed"
        )


def _around_zero(part: dict[str, Any]) -> tuple[set[int], set[int]]:
    """Of which sign are the numbers whose 0 a bound excludes, and that a bound under 1 ends.

    With both, in one object or in two that hold together, the compiler lets 0 through.
    """
    excluding: set[int] = set()
    near: set[int] = set()
    for sign, low, highs in _SIDES:
        bound = part.get(low)
        if _is_number(bound) and bound == 0:
            excluding.add(sign)
        others = [part.get(high) for high in highs]
        if any(_is_number(other) and 0 < sign * other < 1 for other in others):
            near.add(sign)
    return excluding, near


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _multiple(value: float) -> Fraction:
    if not 1e-9 <= value <= MAX_MULTIPLE:
        raise BadGrammar(f"multipleOf must be positive and at most {MAX_MULTIPLE}")
    return Fraction(repr(value))
