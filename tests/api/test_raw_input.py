"""Bytes that are no good HTTP, JSON or frames: refused in words, and no harm to anybody else."""

import json
import socket

import msgspec
import pytest
from api.bad_bodies import CHAT, CLASS_NAMES, COMPLETIONS
from api.fake_core import tokens_of
from api.frontend_process import FrontendProcess

from nvserve.frontend.client import Client
from nvserve.frontend.client_session import RequestError


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b"\xff\xfe",
        b'{"prompt":"\xff\xfe"}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"\\ud800 and more text behind it"}',
        b'{"prompt":"\\udc00"}',
        b'{"prompt":"x","stop":"\\ud800"}',
        b'{"prompt":"x","model":"\\ud800"}',
        b'{"prompt":"x","temperature":NaN}',
        b'{"prompt":"x","temperature":1e999}',
        b'{"prompt":"x","temperature":Infinity}',
        b"[" * 100_000,
        b'{"prompt":' + b"[" * 100_000,
        b'{"prompt":"x","metadata":' + b'{"a":' * 100_000,
    ],
    ids=lambda raw: repr(raw[:30]),
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_json_object(shared: FrontendProcess, raw: bytes, path: str) -> None:
    status, answer = shared.post(path, raw)
    assert status == 400
    assert not any(name in answer["error"]["message"] for name in CLASS_NAMES), answer


def test_deep_nesting_inside_a_free_field_is_refused(shared: FrontendProcess) -> None:
    raw = b'{"tools":[{"type":"function","function":{"name":"a","parameters":{"a":' + b"[" * 100_000
    status, answer = shared.post(CHAT, raw)
    assert (status, answer["error"]["message"]) == (400, "the body is nested too deeply")


def test_an_absurd_text_is_refused_before_it_is_tokenized(shared: FrontendProcess) -> None:
    status, answer = shared.post(COMPLETIONS, {"prompt": "a " * 2_500_000})
    assert status == 400
    assert "cannot fit in 512 tokens" in answer["error"]["message"]


def test_content_types(shared: FrontendProcess) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    for kind, status in (
        ("", 415),
        ("text/plain", 415),
        ("application/json; charset=utf-16", 415),
        ("application/json; charset=UTF-8", 200),
        ("application/json", 200),
    ):
        headers = {"content-type": kind} if kind else {}
        assert shared.request("POST", COMPLETIONS, body, headers)[0] == status


def exchange(shared: FrontendProcess, *parts: bytes, limit_s: float = 60.0) -> bytes:
    """Send raw bytes, and read until the server closes."""
    with socket.create_connection(("127.0.0.1", shared.port), timeout=limit_s) as connection:
        try:
            for part in parts:
                connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused while we were still sending
        answer = b""
        while chunk := _received(connection):
            answer += chunk
        return answer


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except ConnectionResetError:
        return b""


POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def test_a_body_announced_too_large_is_a_413_before_it_is_sent(shared: FrontendProcess) -> None:
    assert exchange(shared, POST + b"content-length: 3000000000\r\n\r\n").startswith(
        b"HTTP/1.1 413 "
    )


def test_a_chunked_body_without_end_is_a_413(shared: FrontendProcess) -> None:
    chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
    answer = exchange(shared, POST + b"transfer-encoding: chunked\r\n\r\n", *[chunk] * 40)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "headers",
    # A line that came to its end without a colon would be a 400 as well as a 431.
    [b"a: " + b"x" * 70_000 + b"\r\n\r\n", b"a: b\r\n" * 30_000 + b"\r\n", b"a" * 70_000],
    ids=["one", "many", "endless"],
)
def test_huge_headers_are_a_431(shared: FrontendProcess, headers: bytes) -> None:
    answer = exchange(shared, b"GET /health HTTP/1.1\r\nhost: x\r\n" + headers)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")


def test_a_huge_path_is_a_431(shared: FrontendProcess) -> None:
    answer = exchange(shared, b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ")


def test_garbage_is_a_400_in_openais_form(shared: FrontendProcess) -> None:
    answer = exchange(shared, b"\x00\x01\x02 not http\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"error"' in answer


@pytest.mark.parametrize("path", [COMPLETIONS, "/health", "/nowhere"])
@pytest.mark.parametrize(
    "rest",
    [
        b"transfer-encoding: identity\r\n\r\n{}",
        b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n",
        b"transfer-encoding: chunked\r\n\r\n2\r\n{}and more",
    ],
)
def test_a_body_that_is_no_http_is_a_400(shared: FrontendProcess, path: str, rest: bytes) -> None:
    head = POST.replace(COMPLETIONS.encode(), path.encode())
    answer = exchange(shared, head + rest)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b'"error"' in answer


def test_pipelined_requests_are_answered_in_order(shared: FrontendProcess) -> None:
    body = b'{"prompt":[9],"max_tokens":3,"temperature":0}'
    one = POST + b"content-length: %d\r\n\r\n" % len(body) + body
    last = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    answer = exchange(shared, one + one + last)
    assert answer.count(b"HTTP/1.1 200 ") == 3
    assert answer.rfind(b'"text_completion"') < answer.find(b'"version"')


def test_many_pipelined_requests_are_no_large_headers(shared: FrontendProcess) -> None:
    one = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    last = one.replace(b"host: x", b"connection: close")
    answer = exchange(shared, one * 6000 + last)
    assert answer.count(b"HTTP/1.1 200 ") == 6001


def test_expect_continue_and_http_1_0(shared: FrontendProcess) -> None:
    body = b'{"prompt":[9],"max_tokens":1}'
    head = POST + b"connection: close\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
    answer = exchange(shared, head % len(body) + body)
    assert answer.startswith(b"HTTP/1.1 100 ")
    assert b"HTTP/1.1 200 " in answer
    assert b" 200 " in exchange(shared, b"GET /health HTTP/1.0\r\n\r\n")
    streaming = b'{"prompt":[9],"stream":true}'
    old = POST.replace(b"HTTP/1.1", b"HTTP/1.0")
    answer = exchange(shared, old + b"content-length: %d\r\n\r\n" % len(streaming) + streaming)
    assert b" 400 " in answer.splitlines()[0]


def test_zmq_garbage_is_dropped_or_answered_and_hurts_nobody(shared: FrontendProcess) -> None:
    frames = [b"", b"\xc1", b"x" * 1000, msgspec.msgpack.encode({"type": "Submit", "id": "x"})]
    with Client(shared.endpoint) as client:
        client.generate([5], max_tokens=1)
        assert client._link is not None
        for frame in frames:
            client._link.socket.send(frame)
            with pytest.raises(RequestError, match="400"):
                client.generate([5], max_tokens=1)
        assert client.generate([5], max_tokens=2, temperature=0.0).token_ids == tokens_of([5], 2)
