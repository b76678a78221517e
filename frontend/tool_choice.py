"""A function's parameters as part of a larger schema: its references keep their meaning.

`#/$defs/X` counts from the root of the document; inside the list of calls that a required tool
choice forces, the function's own root lies deeper. Pure.
"""

from collections.abc import Iterator
from typing import Any, Final

# Whose values are no schemas: what looks like a reference there is data.
_DATA: Final = frozenset({"const", "enum", "default", "examples"})
# Whose values are schemas by name, which may be that of a keyword.
_MAPS: Final = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions"}
)


def rebased(schema: dict[str, Any], pointer: str) -> dict[str, Any]:
    """A copy of a whole schema, to stand at a JSON pointer (`#/items/...`) of another one.

    The nesting of `schema` was checked; a part with an `$id` is a document of its own and kept.
    """
    # The root's name would make it a document of its own, which need not be supported.
    return {
        name: _rebased_value(name, value, pointer)
        for name, value in schema.items()
        if name != "$id"
    }


def _rebased(value: Any, pointer: str) -> Any:
    """A schema, or a list of them."""
    if isinstance(value, list):
        return [_rebased(child, pointer) for child in value]
    if not isinstance(value, dict) or isinstance(value.get("$id"), str):
        return value
    return {name: _rebased_value(name, child, pointer) for name, child in value.items()}


def _rebased_value(keyword: str, value: Any, pointer: str) -> Any:
    if keyword == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
        return pointer + value[1:]
    if keyword in _MAPS and isinstance(value, dict):
        return {name: _rebased(child, pointer) for name, child in value.items()}
    return value if keyword in _DATA else _rebased(value, pointer)


def named_parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each part whose name only one part of a document may have, by that name.

    The root's `$id` does not count. The nesting of `schema` was checked.
    """
    pending: list[tuple[Any, str]] = [({k: v for k, v in schema.items() if k != "$id"}, "")]
    while pending:
        value, document = pending.pop()
        if isinstance(value, list):
            pending += [(child, document) for child in value]
        if not isinstance(value, dict):
            continue
        name, anchor = value.get("$id"), value.get("$anchor")
        if isinstance(name, str):
            document = name  # whose anchors are its own
            yield name, value
        if isinstance(anchor, str):
            yield f"{document}#{anchor}", value
        pending += [(child, document) for child in _children(value)]


def _children(schema: dict[str, Any]) -> Iterator[Any]:
    """The schemas right in this one, and lists of them."""
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            yield from value.values()
        elif keyword not in _DATA:
            yield value
