"""Tools of a chat request: checked, shown to the template, and forced by a grammar where asked.

`tool_choice` none hides them; auto leaves it to the model, whose own way of writing calls the
launch names; required and a named function are grammars. Knows requests; never output.
"""

import re
from typing import Any, Final, Literal

import msgspec

from nvserve.frontend.chat_parts import (
    CALL,
    END_CALL,
    END_THINK,
    PYTHON_TAG,
    THINK,
    BareCalls,
    ForcedCall,
    MarkedCalls,
    Plain,
    Reasoning,
    Splitter,
)
from nvserve.frontend.errors import invalid
from nvserve.frontend.grammars import Grammar, json_grammar
from nvserve.frontend.schema import ChatBody, NamedChoice, Tool
from nvserve.frontend.tool_choice import named_parts, rebased
from nvserve.protocol.grammars import MAX_GRAMMAR_PARTS, check_depth

MAX_TOOLS: Final = 128
MAX_CALLS: Final = 128
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")

Parser = Literal["", "hermes", "llama3_json"]


class ToolPlan(msgspec.Struct, frozen=True):
    """What the tools of one request come to; kept as long as it runs, and so without them."""

    mode: Literal["none", "auto", "required", "named"] = "none"
    name: str = ""  # of the one function that is forced
    names: frozenset[str] = frozenset()  # of those that the model may call by itself
    grammar: Grammar | None = None
    max_calls: int = MAX_CALLS


def resolve_tools(body: ChatBody, parser: Parser, *, knows_tools: bool) -> ToolPlan:
    """A 400 for tools that this server cannot honour; `knows_tools`: the chat template does."""
    tools, choice = body.tools or [], body.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "needs tools")
        return ToolPlan()
    _check(tools)
    max_calls = 1 if body.parallel_tool_calls is False else MAX_CALLS
    if choice == "none":
        return ToolPlan()
    is_auto = choice in (None, "auto")
    if is_auto and not parser:
        text = "auto needs a server started with --tool-call-parser; required is served"
        raise invalid("tool_choice", text, "unsupported_parameter")
    if is_auto and not knows_tools:
        raise invalid("tools", "the model's chat template shows no tools")
    if is_auto:
        names = frozenset(tool.function.name for tool in tools)
        return ToolPlan("auto", names=names, max_calls=max_calls)
    if isinstance(choice, NamedChoice):
        if choice.type != "function":
            raise invalid("tool_choice.type", "must be function")
        return _named(tools, choice.function.name)
    if choice != "required":
        raise invalid("tool_choice", "must be none, auto, required or a function")
    schema = {
        "type": "array",
        "minItems": 1,
        "maxItems": max_calls,
        "items": {"anyOf": [_call_schema(index, tool) for index, tool in enumerate(tools)]},
    }
    grammar = json_grammar("tools", schema)
    _check_named_parts(tools)
    return ToolPlan("required", grammar=grammar, max_calls=max_calls)


def shown_tools(body: ChatBody, plan: ToolPlan) -> list[dict[str, Any]]:
    """Those that the template shows the model."""
    shown: list[dict[str, Any]] = [] if plan.mode == "none" else msgspec.to_builtins(body.tools)
    return shown


def markers(parser: Parser, *, has_reasoning: bool) -> frozenset[str]:
    """What splitters look for in the text."""
    calls = {"hermes": (CALL, END_CALL), "llama3_json": (PYTHON_TAG,)}.get(parser, ())
    return frozenset(calls + ((THINK, END_THINK) if has_reasoning else ()))


def splitter(
    plan: ToolPlan, parser: Parser, *, has_reasoning: bool, is_thinking: bool
) -> Splitter | None:
    """What takes one choice's text apart; None when all of it is content.

    `has_reasoning`: the model marks it; `is_thinking`: the prompt ends with the opening marker.
    """
    if plan.mode == "named":
        return ForcedCall(plan.name)
    if plan.mode == "required":
        return BareCalls(plan.max_calls, is_list=True)
    calls: Splitter = Plain()
    if plan.mode == "auto":
        is_marked = parser == "hermes"
        most = plan.max_calls
        calls = MarkedCalls(most) if is_marked else BareCalls(most, names=plan.names)
    if has_reasoning:
        return Reasoning(calls, is_open=is_thinking)
    return calls if plan.mode == "auto" else None


def _named(tools: list[Tool], name: str) -> ToolPlan:
    for tool in tools:
        if tool.function.name == name:
            grammar = json_grammar("tools", _parameters(tool))
            return ToolPlan("named", name=name, grammar=grammar, max_calls=1)
    raise invalid("tool_choice.function.name", "is not the name of a tool")


def _check(tools: list[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"holds {len(tools)} tools, at most {MAX_TOOLS} are allowed")
    names: set[str] = set()
    num_parts = 0
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type != "function":
            raise invalid(f"{where}.type", "must be function")
        if not _NAME.fullmatch(tool.function.name):
            raise invalid(f"{where}.function.name", "must be 1 to 64 letters, digits, _ and -")
        if tool.function.name in names:
            raise invalid(f"{where}.function.name", "is the name of another tool")
        names.add(tool.function.name)
        json_grammar(f"{where}.function.parameters", _parameters(tool))  # size and depth
        num_parts += check_depth(_parameters(tool))
        if num_parts > MAX_GRAMMAR_PARTS:
            text = f"the parameters of all hold more than {MAX_GRAMMAR_PARTS} objects and arrays"
            raise invalid("tools", text)


def _check_named_parts(tools: list[Tool]) -> None:
    """In the list of calls all tools are one document, where a name cannot mean two things."""
    parts: dict[str, Any] = {}
    for index, tool in enumerate(tools):
        for name, part in named_parts(_parameters(tool)):
            if parts.setdefault(name, part) != part:
                where = f"tools[{index}].function.parameters"
                text = f"has {name[:100]!r} twice, or another one than a tool before it"
                raise invalid(where, text)


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}


def _call_schema(index: int, tool: Tool) -> dict[str, Any]:
    """The schema of a call, as entry `index` of the list's alternatives."""
    where = f"#/items/anyOf/{index}/properties/parameters"
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            "parameters": rebased(_parameters(tool), where),
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
