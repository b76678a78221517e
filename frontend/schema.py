"""The HTTP request bodies, validated: every field is honoured or refused, none is ignored.

An unknown field is a 400 that names it, and so is a known one that this server cannot honour. The
exceptions change no answer and are accepted as notes: `user`, `metadata`, `store`,
`safety_identifier`, `prompt_cache_key`. Of a key given twice the last one counts. null means the
default everywhere, in a message also for fields that are not known; there, what OpenAI's client has
read out of an answer is a note as well.
"""

import contextlib
import gc
import re
from collections.abc import Iterator
from typing import Any, Final, TypeVar

import msgspec

from nvserve.frontend.bulk import MAX_PROMPTS, check_bulk
from nvserve.frontend.errors import ApiError, invalid
from nvserve.frontend.schema_nulls import are_worth_a_look, without_nulls
from nvserve.protocol.client_messages import SamplingFields

T = TypeVar("T", bound=msgspec.Struct)

MAX_N: Final = 128
# Characters of all calls' arguments together, which are decoded for chat templates.
MAX_ARGUMENTS: Final = 1 << 20
MAX_TURNS: Final = 8192  # messages with the parts and calls in them
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
FORMATS: Final = ("text", "json_object", "json_schema")

Prompt = str | list[str | int | list[int]]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream carries beside its text."""

    include_usage: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A schema as OpenAI wraps it; the output follows it whether `strict` or not."""

    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`text`, `json_object` or `json_schema`."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class Body(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat share."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionBody(Body, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


class ContentPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One part of a message; only text is served."""

    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What an assistant called; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call in an assistant's turn."""

    id: str
    function: CalledFunction
    type: str = "function"
    index: int | None = None


class FunctionSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One entry of `tools`."""

    type: str
    function: FunctionSpec


class ChosenFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The function that must be called."""

    name: str


class NamedChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`tool_choice` as an object."""

    function: ChosenFunction
    type: str = "function"


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class ChatBody(Body, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedChoice | None = None
    parallel_tool_calls: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


_DECODERS: Final = {
    body: msgspec.json.Decoder(body)
    for body in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
}


def parse(body_type: type[T], raw: bytes, max_ids: int | None = None) -> T:
    """A validated body, or a 400 that names the field at fault.

    `max_ids`: the context's length, if known; of more ids a large body is not decoded.
    """
    decoder: msgspec.json.Decoder[T] = _DECODERS[body_type]  # type: ignore[index, assignment]  # keyed by its own type
    try:
        check_bulk(body_type, raw, max_ids)
        with _no_collections():
            try:
                return decoder.decode(raw)
            except msgspec.ValidationError as error:
                if not are_worth_a_look(error):
                    raise
                return decoder.decode(without_nulls(raw))
    except msgspec.ValidationError as error:
        raise explain(str(error)) from error
    except (msgspec.DecodeError, ValueError) as error:
        raise ApiError(400, "the body is not valid JSON in UTF-8", code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """A decoder makes no garbage: to look for it again and again takes longer than the decoding."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_PLACE: Final = re.compile(r"^(.*?)(?: - at (?:`key` in )?`\$\.?(.*)`)?$", re.DOTALL)
_FIELD: Final = re.compile(r"^Object (contains unknown|missing required) field `(.*)`$", re.DOTALL)
_TYPE_NAMES: Final = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}


def explain(message: str) -> ApiError:
    """A validation message in the words of JSON, with the field's path as `param`."""
    match = _PLACE.match(message)
    assert match is not None, "the pattern matches any text"
    what, path = match.group(1), match.group(2) or ""
    field = _FIELD.match(what)
    if field is not None:
        name = field.group(2)[:100]
        param = f"{path}.{name}" if path else name
        if field.group(1) == "missing required":
            return invalid(param, "is required", "missing_required_parameter")
        return invalid(param, "this field is not supported", "unsupported_parameter")
    words = re.sub(r"\b(str|int|float|bool)\b", lambda found: _TYPE_NAMES[found.group()], what)
    words = words.replace("`", "")
    return invalid(path or None, words[:1].lower() + words[1:], "invalid_type")


# -- checks beyond types ---------------------------------------------------------------------------


def check_body(body: Body) -> None:
    """Refuse what types cannot say, for both endpoints."""
    if body.n is not None and not 1 <= body.n <= MAX_N:
        raise invalid("n", f"must be from 1 to {MAX_N}, not {_shown(body.n)}")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "is only allowed with stream")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "is not available with stream", "unsupported_parameter")


def check_completion(body: CompletionBody) -> None:
    """Refuse what /v1/completions cannot honour."""
    check_body(body)
    if body.best_of is not None and body.best_of != 1:
        raise _unsupported("best_of")
    if body.suffix:
        raise _unsupported("suffix")


def check_chat(body: ChatBody) -> None:
    """Refuse what /v1/chat/completions cannot honour."""
    check_body(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    if None not in (body.max_tokens, body.max_completion_tokens) and (
        body.max_tokens != body.max_completion_tokens
    ):
        raise invalid("max_tokens", "differs from max_completion_tokens; give only one")


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as the dicts a chat template takes, text parts joined by line ends."""
    if not messages:
        raise invalid("messages", "must not be empty")
    if len(messages) > MAX_TURNS or sum(map(_num_parts, messages)) > MAX_TURNS:
        raise invalid("messages", f"hold more than {MAX_TURNS} messages, parts and calls")
    _check_arguments(messages)
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_arguments(messages: list[ChatMessage]) -> None:
    num_chars = 0
    for index, message in enumerate(messages):
        for number, call in enumerate(message.tool_calls or ()):
            num_chars += len(call.function.arguments)
            if num_chars > MAX_ARGUMENTS:
                where = f"messages[{index}].tool_calls[{number}].function.arguments"
                raise invalid(where, f"makes all arguments longer than {MAX_ARGUMENTS} characters")


def _num_parts(message: ChatMessage) -> int:
    content = message.content
    num_parts = len(content) if isinstance(content, list) else 1
    return num_parts + len(message.tool_calls or ())


def _plain(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise invalid(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        raise invalid(f"{where}.content", "is required")
    if message.role == "tool" and not message.tool_call_id:
        raise invalid(f"{where}.tool_call_id", "is required for the role tool")
    if message.tool_call_id is not None and message.role != "tool":
        raise invalid(f"{where}.tool_call_id", "belongs to the role tool")
    if message.role != "assistant":
        for name, value in (
            ("tool_calls", message.tool_calls or None),
            ("reasoning_content", message.reasoning_content),
            ("refusal", message.refusal),
        ):
            if value is not None:
                raise invalid(f"{where}.{name}", "is only for the role assistant")
    for index, call in enumerate(message.tool_calls or ()):
        _check_call(call, f"{where}.tool_calls[{index}]")
    plain: dict[str, Any] = msgspec.to_builtins(message)
    plain.pop("refusal", None)  # of an earlier answer; what was refused is not the model's affair
    for call in plain.get("tool_calls", ()):
        call["function"]["arguments"] = _decoded(call["function"]["arguments"])
        call.pop("index", None)
    if isinstance(message.content, list):
        plain["content"] = _joined(message.content, f"{where}.content")
    plain.setdefault("content", None)
    return plain


def _check_call(call: ToolCall, where: str) -> None:
    if call.type != "function":
        raise invalid(f"{where}.type", "must be function")
    for name, text in (("id", call.id), ("function.name", call.function.name)):
        if not text:
            raise invalid(f"{where}.{name}", "must not be empty")


def _decoded(arguments: str) -> Any:
    """Arguments as templates expect them: an object, where the text is one."""
    try:
        value = msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _joined(parts: list[ContentPart], where: str) -> str:
    if not parts:
        raise invalid(where, "must not be empty")
    for index, part in enumerate(parts):
        if part.type != "text":
            raise invalid(f"{where}[{index}].type", "only text is supported")
        if part.text is None:
            raise invalid(f"{where}[{index}].text", "is required")
    return "\n".join(part.text or "" for part in parts)


def split_prompts(prompt: Prompt) -> list[str] | list[list[int]]:
    """One prompt or many, text or ids: always a list of prompts of one kind, none of them empty."""
    if isinstance(prompt, str):
        return _checked([prompt])
    if not prompt:
        raise invalid("prompt", "must not be empty")
    if len({type(item) for item in prompt}) > 1:
        raise invalid("prompt", "must not mix strings, token ids and lists of token ids")
    if isinstance(prompt[0], int):
        return _checked([[item for item in prompt if isinstance(item, int)]])
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"holds {len(prompt)} prompts, at most {MAX_PROMPTS} are allowed")
    if isinstance(prompt[0], str):
        return _checked([item for item in prompt if isinstance(item, str)])
    return _checked([item for item in prompt if isinstance(item, list)])


P = TypeVar("P", str, list[int])


def _checked(prompts: list[P]) -> list[P]:
    for index, prompt in enumerate(prompts):
        if not prompt:
            where = f"prompt[{index}]" if len(prompts) > 1 else "prompt"
            raise invalid(where, "must not be empty")
    return prompts


def _unsupported(param: str) -> ApiError:
    return invalid(param, "this value is not supported", "unsupported_parameter")


def _shown(number: int) -> str:
    """A number for a message; a client may send one of hundreds of digits."""
    return str(number) if abs(number) < 10**20 else "a number of that size"
