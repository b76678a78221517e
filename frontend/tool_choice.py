"""A function's parameters as part of a larger schema: its references keep their meaning.

`#/$defs/X` counts from the root of the document; inside the list of calls that a required tool
choice forces, the function's own root lies deeper. Pure.
"""

from typing import Any, Final

# Values that are no schemas: what looks like a reference there is data.
_DATA: Final = frozenset({"const", "enum", "default", "examples"})


def rebased(schema: dict[str, Any], pointer: str) -> dict[str, Any]:
    """A copy of a whole schema, to stand at a JSON pointer (`#/items/...`) of another one.

    The nesting of `schema` was checked; a part with an `$id` is a document of its own and kept.
    """
    # The root's name would make it a document of its own, which need not be supported.
    root = {name: value for name, value in schema.items() if name != "$id"}
    return {name: _rebased(name, value, pointer) for name, value in root.items()}


def _rebased(name: str, value: Any, pointer: str) -> Any:
    if name == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
        return pointer + value[1:]
    if name in _DATA or (isinstance(value, dict) and isinstance(value.get("$id"), str)):
        return value
    if isinstance(value, dict):
        return {key: _rebased(key, child, pointer) for key, child in value.items()}
    if isinstance(value, list):
        return [_rebased("", child, pointer) for child in value]
    return value
