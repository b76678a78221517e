"""A small HTTP client for the terminal commands: the model's name, and text as it is generated."""

import http.client
import json
import os
from collections.abc import Generator, Iterator
from typing import Any, Final
from urllib.parse import urlsplit

from nvserve.scripts.children import API_KEY_VARIABLE

CONNECT_LIMIT_S: Final = 10.0
SILENCE_LIMIT_S: Final = 300.0  # a queued request or a recovery may pause a stream


class RequestFailed(RuntimeError):
    """The server answered with an error, or not at all; the message is for the user."""


def first_model(endpoint: str) -> str:
    """The first name the server serves."""
    with_body = _request(endpoint, "GET", "/v1/models", None)
    try:
        name: str = json.loads(with_body.read())["data"][0]["id"]
    except (ValueError, LookupError, TypeError) as error:
        raise RequestFailed(f"{endpoint}/v1/models gave no model") from error
    finally:
        with_body.close()
    return name


def stream_completion(endpoint: str, body: dict[str, Any]) -> Generator[str]:
    """Pieces of text that continue `body["prompt"]`."""
    for choice in _stream(endpoint, "/v1/completions", body):
        yield choice.get("text") or ""


def stream_chat(endpoint: str, body: dict[str, Any]) -> Generator[str]:
    """Pieces of the assistant's reply to `body["messages"]`."""
    for choice in _stream(endpoint, "/v1/chat/completions", body):
        yield choice.get("delta", {}).get("content") or ""


def _stream(endpoint: str, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """First choices of the server-sent events; closing the iterator ends the request."""
    response = _request(endpoint, "POST", path, body | {"stream": True})
    try:
        for raw in response:
            name, _, value = raw.decode().rstrip("\r\n").partition(":")
            if name != "data":
                continue
            if value.strip() == "[DONE]":
                return
            event = json.loads(value)
            if "error" in event:
                raise RequestFailed(event["error"].get("message", "the request failed"))
            yield from event.get("choices", [])[:1]
    except (OSError, http.client.HTTPException) as error:
        raise RequestFailed(f"the stream broke: {error}") from error
    finally:
        response.close()
    raise RequestFailed("the stream ended early")


def _request(
    endpoint: str, method: str, path: str, body: dict[str, Any] | None
) -> http.client.HTTPResponse:
    """A response with status 200, its body unread; it owns the connection."""
    parts = urlsplit(endpoint)
    assert parts.hostname, f"{endpoint} is no address: the flag's type lets none pass"
    make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = make(parts.hostname, parts.port, timeout=CONNECT_LIMIT_S)
    key = os.environ.get(API_KEY_VARIABLE)
    headers = {"Connection": "close"} | ({"Authorization": f"Bearer {key}"} if key else {})
    if body is not None:
        headers["Content-Type"] = "application/json"
    try:
        connection.connect()
        connection.sock.settimeout(SILENCE_LIMIT_S)
        data = None if body is None else json.dumps(body)
        connection.request(method, parts.path.rstrip("/").removesuffix("/v1") + path, data, headers)
        response = connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        raise RequestFailed(f"{endpoint}: {error}") from error
    if response.status != 200:
        text = response.read(65536)
        response.close()
        raise RequestFailed(_message(response.status, text))
    return response


def _message(status: int, text: bytes) -> str:
    try:
        message: str = json.loads(text)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = text.decode(errors="replace")[:200]
    hint = f" (set {API_KEY_VARIABLE})" if status == 401 else ""
    return f"status {status}: {message}{hint}"
