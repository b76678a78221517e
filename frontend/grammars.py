"""What a client asks of the form of its output -> the one grammar string that core compiles.

`response_format`, `structured_outputs` and the older `guided_*` fields say the same things; at most
one of them counts. Size and depth are checked here, everything else by core's compiler.
"""

from typing import Any, Final

import msgspec

from nvserve.frontend.errors import ApiError, invalid
from nvserve.frontend.schema import FORMATS, Body
from nvserve.protocol.client_messages import SamplingFields, StructuredOutputs
from nvserve.protocol.grammars import BadGrammar, check_depth, check_size

CORE_PARAM: Final = "grammar"  # how core calls it when it refuses one


class Grammar(msgspec.Struct, frozen=True):
    """A grammar and the client's name of the field it came from."""

    param: str
    text: str


def resolve_grammar(fields: SamplingFields) -> Grammar | None:
    """The grammar asked for, if any, or a 400 naming the field."""
    given = list(_structured(fields.structured_outputs))
    if isinstance(fields, Body):
        given += _guided(fields) + _response_format(fields)
    if len(given) > 1:
        raise invalid(given[1].param, f"cannot be combined with {given[0].param}")
    return given[0] if given else None


def json_grammar(param: str, schema: Any) -> Grammar:
    """A JSON schema, decoded or as text."""
    if schema == "":  # core takes no text for any object
        raise invalid(param, "must not be empty")
    try:
        if not isinstance(schema, str):
            check_depth(schema)
        text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
        check_size(text)
    except BadGrammar as error:
        raise invalid(param, str(error)) from error
    except TypeError as error:  # over ZMQ, as msgpack knows more than JSON
        raise invalid(param, "is not JSON") from error
    return Grammar(param, f"json_schema:{text}")


def named_by_client(error: ApiError, grammar: Grammar | None) -> ApiError:
    """Core's refusal of a grammar, with the client's own name for the field."""
    if grammar is None or error.param != CORE_PARAM:
        return error
    return invalid(grammar.param, error.message.removeprefix(f"{CORE_PARAM}: "))


def broken_grammar(grammar: Grammar | None) -> ApiError:
    """The end of an output whose grammar fails in the middle: the client's to mend, as no other."""
    return invalid(
        grammar.param if grammar is not None else CORE_PARAM,
        "the output cannot go on: the grammar exceeds a limit, or other parameters forbid all that"
        " it allows",
        "grammar_error",
    )


def _structured(asked: StructuredOutputs | None) -> list[Grammar]:
    if asked is None:
        return []
    found = _each(
        "structured_outputs.",
        {
            "json": asked.json,
            "regex": asked.regex,
            "choice": asked.choice,
            "grammar": asked.grammar,
        },
    )
    if asked.json_object:
        found.append(Grammar("structured_outputs.json_object", "json:"))
    if not found:
        raise invalid("structured_outputs", "names no form of output")
    return found


def _guided(body: Body) -> list[Grammar]:
    return _each(
        "guided_",
        {
            "json": body.guided_json,
            "regex": body.guided_regex,
            "choice": body.guided_choice,
            "grammar": body.guided_grammar,
        },
    )


def _response_format(body: Body) -> list[Grammar]:
    asked = body.response_format
    if asked is None:
        return []
    if asked.type not in FORMATS:
        raise invalid("response_format.type", "must be text, json_object or json_schema")
    if asked.type != "json_schema" and asked.json_schema is not None:
        raise invalid("response_format.json_schema", "needs the type json_schema")
    if asked.type == "text":
        return []
    if asked.type == "json_object":
        return [Grammar("response_format", "json:")]
    if asked.json_schema is None or asked.json_schema.schema is None:
        raise invalid("response_format.json_schema.schema", "is required")
    return [json_grammar("response_format.json_schema.schema", asked.json_schema.schema)]


def _each(prefix: str, values: dict[str, Any]) -> list[Grammar]:
    """Those that were given, each as a grammar."""
    found = []
    for name, value in values.items():
        param = prefix + name
        if value is None:
            continue
        if name == "json":
            found.append(json_grammar(param, value))
        else:
            form = "lark" if name == "grammar" else name
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            if not text:
                raise invalid(param, "must not be empty")
            found.append(_sized(Grammar(param, f"{form}:{text}")))
    return found


def _sized(grammar: Grammar) -> Grammar:
    try:
        check_size(grammar.text)
    except BadGrammar as error:
        raise invalid(grammar.param, str(error)) from error
    return grammar
