"""The OpenAPI document: made from the very structs that decode the bodies, so it cannot go stale.

Adds what types do not say: ranges, and what each route answers.
"""

from typing import Any, Final

import msgspec

from nvserve.frontend.bulk import MAX_PROMPTS
from nvserve.frontend.params import (
    MAX_BAD_WORDS,
    MAX_PRIORITY,
    MAX_SALT_CHARS,
    MAX_TIMEOUT_S,
)
from nvserve.frontend.schema import (
    FORMATS,
    MAX_N,
    ROLES,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from nvserve.frontend.schema_nulls import READINGS
from nvserve.protocol.sampling import MAX_LIST, MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS

Document = dict[str, Any]

# Of fields wherever they are, or of one object's.
RANGES: Final[dict[str, Document]] = {
    "n": {"minimum": 1, "maximum": MAX_N},
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "temperature": {"minimum": 0, "maximum": 65536},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1, "not": {"const": 0}},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"minimum": 0.001, "maximum": 1000},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "priority": {"minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
    "top_logprobs": {"minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    "prompt_logprobs": {"minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    "logit_bias": {"maxProperties": MAX_LOGIT_BIAS},
    "bad_words": {"maxItems": MAX_BAD_WORDS},
    "stop_token_ids": {"maxItems": MAX_LIST},
    "allowed_token_ids": {"minItems": 1, "maxItems": MAX_LIST},
    "cache_salt": {"maxLength": MAX_SALT_CHARS},
    "best_of": {"const": 1},
    "CompletionBody.logprobs": {"minimum": 0, "maximum": MAX_TOP_LOGPROBS},  # of a chat: a boolean
    "ChatMessage.role": {"enum": ROLES},
    "ContentPart.type": {"const": "text"},
    "ResponseFormat.type": {"enum": FORMATS},
    "NamedChoice.type": {"const": "function"},
    "Tool.type": {"const": "function"},
    "ToolCall.type": {"const": "function"},
    "ToolCall.id": {"minLength": 1},
    "CalledFunction.name": {"minLength": 1},
}
OF_MESSAGES: Final = frozenset({"ChatMessage", "ContentPart", "ToolCall", "CalledFunction"})
NOTES: Final[Document] = {name: {} for name in READINGS}

ERROR: Final[Document] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
GENERATED: Final[Document] = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices", "usage"],
    "properties": {
        "id": {"type": "string"},
        "object": {"type": "string"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "minItems": 1, "items": {"type": "object"}},
        "usage": {"type": "object"},
    },
}
ANY_OBJECT: Final[Document] = {"type": "object"}

BODY_ERRORS: Final = {
    400: "The body, or the request it asks for, is refused; `param` names the field.",
    404: "There is no such model.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not declared as JSON in UTF-8.",
}
LOAD_ERRORS: Final = {
    429: "Too many requests wait; try again after `Retry-After` seconds.",
    500: "This request alone makes the engine fail, or the server has a fault.",
    503: "The server is loading, draining, full or has failed.",
    504: "The request's own deadline passed.",
}


def document(version: str) -> bytes:
    """The whole document as JSON."""
    bodies = [CompletionBody, ChatBody, TokenizeBody, DetokenizeBody]
    _, components = msgspec.json.schema_components(
        bodies, ref_template="#/components/schemas/{name}"
    )
    for name, component in components.items():
        for field, schema in component.get("properties", {}).items():
            _narrow(schema, RANGES.get(field, {}))
            _narrow(schema, RANGES.get(f"{name}.{field}", {}))
            if field == "prompt" and name == "CompletionBody":
                schema["maxItems"] = MAX_PROMPTS
        if name in OF_MESSAGES:
            component["additionalProperties"] = {"type": "null"}
            component["properties"] |= NOTES
    components["Error"] = ERROR
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "nvserve", "version": version},
            "paths": _paths(),
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{"key": []}, {}],
        }
    )


def _narrow(schema: Document, limits: Document) -> None:
    """Put limits on the alternatives of a field that are not null."""
    for alternative in schema.get("anyOf", [schema]):
        if alternative.get("type") != "null":
            alternative.update(limits)


def _paths() -> Document:
    generate = BODY_ERRORS | LOAD_ERRORS
    return {
        "/v1/completions": {"post": _post("CompletionBody", GENERATED, generate, is_timed=True)},
        "/v1/chat/completions": {"post": _post("ChatBody", GENERATED, generate, is_timed=True)},
        "/v1/embeddings": {"post": _operation(None, {400: "Embeddings are not supported."})},
        "/v1/models": {"get": _operation(ANY_OBJECT, {})},
        "/v1/models/{name}": {
            "get": _operation(ANY_OBJECT, {404: "There is no such model."})
            | {
                "parameters": [
                    {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
                ]
            }
        },
        "/tokenize": {"post": _post("TokenizeBody", ANY_OBJECT, BODY_ERRORS)},
        "/detokenize": {"post": _post("DetokenizeBody", ANY_OBJECT, BODY_ERRORS)},
        "/version": {"get": _operation(ANY_OBJECT, {})},
        "/metrics": {"get": _operation(None, {}, text="Prometheus text format.")},
        "/openapi.json": {"get": _operation(ANY_OBJECT, {})},
        "/health": {"get": _operation(ANY_OBJECT, {503: "The server has failed."}, is_open=True)},
        "/ready": {"get": _operation(ANY_OBJECT, {503: "Not ready."}, is_open=True)},
    }


def _post(
    body: str, answer: Document, errors: dict[int, str], *, is_timed: bool = False
) -> Document:
    operation = _operation(answer, errors)
    reference = {"$ref": f"#/components/schemas/{body}"}
    operation["requestBody"] = {
        "required": True,
        "content": {"application/json": {"schema": reference}},
    }
    if is_timed:
        # A media type whose form 3.1 cannot describe: chunks as OpenAI's clients read them.
        operation["responses"]["200"]["content"]["text/event-stream"] = {}
        seconds = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S}
        operation["parameters"] = [
            {"name": "X-Request-Timeout", "in": "header", "required": False, "schema": seconds}
        ]
    return operation


def _operation(
    answer: Document | None, errors: dict[int, str], *, text: str = "", is_open: bool = False
) -> Document:
    responses: Document = {}
    if answer is not None:
        content = {"application/json": {"schema": answer}}
        responses["200"] = {"description": "Done.", "content": content}
    if text:
        content = {"text/plain": {"schema": {"type": "string"}}}
        responses["200"] = {"description": text, "content": content}
    reasons = errors if is_open else errors | {401: "The API key is missing or wrong."}
    health = {200: ANY_OBJECT, 503: ANY_OBJECT} if is_open else {}
    for status, reason in sorted(reasons.items()):
        schema = health.get(status, {"$ref": "#/components/schemas/Error"})
        content = {"application/json": {"schema": schema}}
        responses[str(status)] = {"description": reason, "content": content}
    return {"responses": responses}
