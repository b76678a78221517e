"""Functions' parameters keep their references inside the list of calls that a choice forces."""

import copy
import json
from random import Random
from typing import Any

import jsonschema
import msgspec
import pytest
from grammar_rig import compiled, schema_grammar, walk

from nvserve.frontend.errors import ApiError
from nvserve.frontend.schema import ChatBody
from nvserve.frontend.tool_choice import named_parts, rebased
from nvserve.frontend.tools import resolve_tools

INTEGER = {"type": "integer", "minimum": 0, "maximum": 9}
PLAIN = {"type": "object", "properties": {"n": INTEGER}, "required": ["n"],
         "additionalProperties": False}  # fmt: skip
NESTED = {**PLAIN, "properties": {"n": {"$ref": "#/$defs/N"}}, "$defs": {"N": INTEGER}}
RECURSIVE = {**PLAIN, "properties": {"n": {"anyOf": [{"$ref": "#"}, INTEGER]}}}
SIDEWAYS = {**PLAIN, "properties": {"n": {"$ref": "#/properties/m"}, "m": INTEGER}}
NAMED = {**NESTED, "$id": "https://example.com/tool"}
KEYWORDS = {**PLAIN, "properties": {"n": INTEGER, "default": {"$ref": "#/$defs/enum"}},
            "$defs": {"enum": {"anyOf": [{"$ref": "#/$defs/N"}]}, "N": INTEGER},
            "required": ["default"]}  # fmt: skip


def forced(parameters: dict[str, Any]) -> dict[str, Any]:
    """A list of one call, with the function's schema deep inside."""
    place = "#/items/anyOf/0/properties/parameters"
    call = {
        "type": "object",
        "properties": {"name": {"const": "f"}, "parameters": rebased(parameters, place)},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    return {"type": "array", "minItems": 1, "maxItems": 1, "items": {"anyOf": [call]}}


@pytest.mark.parametrize("parameters", [PLAIN, NESTED, RECURSIVE, SIDEWAYS, NAMED, KEYWORDS])
def test_arguments_of_a_forced_call_follow_the_functions_own_schema(
    parameters: dict[str, Any],
) -> None:
    num_ended = 0
    for seed in range(10):
        text = walk(compiled(schema_grammar(forced(parameters))), Random(seed), 400)
        if text is not None:
            num_ended += 1
            (call,) = json.loads(text)
            jsonschema.validate(call["parameters"], parameters)
    assert num_ended >= 3


def test_only_references_within_the_document_move() -> None:
    schema = {
        "properties": {
            "$ref": {"$ref": "#/$defs/a~1b"},
            "other": {"$ref": "https://example.com/x#/$defs/a"},
            "anchor": {"$ref": "#name"},
            "own": {"$id": "https://example.com/y", "items": {"$ref": "#/z"}},
            "list": {"anyOf": [{"$ref": "#"}]},
        },
        "const": {"$ref": "#/data"},
        "enum": [{"$ref": "#/data"}],
    }
    before = copy.deepcopy(schema)
    moved: dict[str, Any] = rebased(schema, "#/p")
    assert schema == before, "the client's own schema goes to the template unchanged"
    properties = moved["properties"]
    assert properties["$ref"] == {"$ref": "#/p/$defs/a~1b"}
    assert properties["list"] == {"anyOf": [{"$ref": "#/p"}]}
    for name in ("other", "anchor", "own"):
        assert properties[name] == schema["properties"][name]  # type: ignore[index]  # a dict
    assert (moved["const"], moved["enum"]) == (schema["const"], schema["enum"])


def test_only_schemas_have_names() -> None:
    data = {"$id": "data", "$anchor": "data"}
    first, second = ({"$id": name, "items": {"$anchor": "x"}} for name in ("first", "second"))
    schema = {
        "$id": "https://example.com/root",
        "$anchor": "top",
        "properties": {"$id": {"$anchor": "a"}, "default": first, "enum": second},
        "default": data,
        "examples": [data],
        "anyOf": [{"const": data}, {"enum": [data]}, {"not": {"$anchor": "b"}}, True],
        "dependencies": {"const": ["a"]},
    }
    names = sorted(name for name, _ in named_parts(schema))
    assert names == ["#a", "#b", "#top", "first", "first#x", "second", "second#x"]
    assert dict(named_parts(schema))["second#x"] == {"$anchor": "x"}


def refusal(*parameters: dict[str, Any]) -> tuple[str | None, str]:
    """Of a choice of any of these functions: the field, and what is wrong with it."""
    tools = [
        {"type": "function", "function": {"name": f"f{index}", "parameters": schema}}
        for index, schema in enumerate(parameters)
    ]
    body = msgspec.convert({"messages": [], "tools": tools, "tool_choice": "required"}, ChatBody)
    with pytest.raises(ApiError) as caught:
        resolve_tools(body, "", knows_tools=True)
    return caught.value.param, caught.value.message


def test_a_name_that_means_two_things_is_told_within_one_tool_too() -> None:
    one, two = ({"$defs": {"x": {"$id": "size", "const": size}}} for size in (1, 2))
    text = "has 'size' twice, or another one than a tool before it"
    for schemas in ([one, two], [{"anyOf": [one, two]}], [PLAIN, {"anyOf": [one, two]}]):
        param = f"tools[{len(schemas) - 1}].function.parameters"
        assert refusal(*schemas) == (param, f"{param}: {text}")


def test_tools_too_large_to_be_required_are_told_so_first() -> None:
    large = {"type": "object", "description": "x" * 70_000}
    one, two = ({**large, "$defs": {"x": {"$id": "size", "const": size}}} for size in (1, 2))
    assert refusal(one, two)[0] == "tools"
