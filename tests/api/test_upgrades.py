"""Requests that ask for another protocol, as HTTP/2's clients do over plain text, and HEAD."""

import json
import shutil
import socket
import subprocess

import pytest
from api.fake_core import tokens_of
from api.frontend_process import FrontendProcess
from api.test_raw_input import POST, exchange

UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
BODY = b'{"prompt":[9],"max_tokens":3,"temperature":0,"return_token_ids":true}'
LENGTH = b"content-length: %d\r\n" % len(BODY)
HEAD = POST + UPGRADE + LENGTH + b"\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
LAST = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
IDS = b'"token_ids":%b' % json.dumps(tokens_of([9], 3), separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "raw",
    [
        HEAD + BODY + LAST,
        POST + UPGRADE + CHUNKED + LAST,
        HEAD.replace(b"h2c", b"websocket\r\nupgrade: h2c") + BODY + LAST,
        HEAD.replace(b"Upgrade,", b"upgrade, close,") + BODY,
        HEAD.replace(b"Upgrade,", b"upgrade, close,").replace(b"P/1.1", b"P/1.0") + BODY,
    ],
    ids=["length", "chunked", "two", "close", "old"],
)
@pytest.mark.parametrize("num_bytes", [1, 7, 1 << 20])
def test_an_upgrade_is_ignored_and_the_body_read(
    shared: FrontendProcess, raw: bytes, num_bytes: int
) -> None:
    with socket.create_connection(("127.0.0.1", shared.port), timeout=60.0) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(raw), num_bytes):
            connection.sendall(raw[start : start + num_bytes])
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    assert answer.count(b"HTTP/1.1 200 ") == 1 + (LAST in raw)
    assert IDS in answer
    assert (b'{"version":' in answer) == (LAST in raw)


def test_upgrades_in_a_row_are_answered_in_order(shared: FrontendProcess) -> None:
    bare = b"GET /health HTTP/1.1\r\nhost: x\r\n" + UPGRADE + b"\r\n"
    answer = exchange(shared, (HEAD + BODY + bare) * 20 + bare * 2000 + LAST)
    assert answer.count(b"HTTP/1.1 200 ") == 20 + 20 + 2000 + 1
    assert answer.count(IDS) == 20
    assert answer.find(IDS) < answer.find(b'{"status":') < answer.rfind(IDS)


def test_an_upgrade_may_wait_for_a_100(shared: FrontendProcess) -> None:
    waiting = HEAD.replace(b"\r\nhost", b"\r\nexpect: 100-continue\r\nhost", 1)
    with socket.create_connection(("127.0.0.1", shared.port), timeout=60.0) as connection:
        connection.sendall(waiting)
        assert connection.recv(65536).startswith(b"HTTP/1.1 100 ")
        connection.sendall(BODY)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_huge_headers_are_a_431_with_an_upgrade_too(shared: FrontendProcess) -> None:
    head = b"GET /health HTTP/1.1\r\nhost: x\r\n" + UPGRADE + b"a: b\r\n" * 30_000 + b"\r\n"
    answer = exchange(shared, head)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(("target", "status"), [(b"x:80", 400), (b"/health", 405)])
def test_a_tunnel_is_refused_and_its_bytes_are_no_request(
    shared: FrontendProcess, target: bytes, status: int
) -> None:
    answer = exchange(shared, b"CONNECT " + target + b" HTTP/1.1\r\nhost: x\r\n\r\n" + LAST)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.skipif(shutil.which("curl") is None, reason="not installed")
def test_curl_with_http2(shared: FrontendProcess) -> None:
    header = "content-type: application/json"
    command = ["curl", "-sS", "--http2", "-H", header, "-d", "@-", f"{shared.url}/v1/completions"]
    done = subprocess.run(command, input=BODY, capture_output=True, timeout=60, check=True)
    assert IDS in done.stdout


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/metrics", "/openapi.json"])
def test_head_has_the_headers_of_get_and_no_body(shared: FrontendProcess, path: str) -> None:
    shared.wait_connected()
    status, body = shared.get(path)
    length = shared.last_headers["content-length"]
    assert (status, int(length)) == (200, len(body))
    assert shared.request("HEAD", path) == (200, b"")
    if path != "/metrics":  # counts requests
        assert shared.last_headers["content-length"] == length
    kept = b"HEAD " + path.encode() + b" HTTP/1.1\r\nhost: x\r\n\r\n"
    answer = exchange(shared, kept + LAST)
    assert answer.count(b"HTTP/1.1 200 ") == 2, "no body may stand before the next answer"


def test_a_405_names_what_is_allowed(shared: FrontendProcess) -> None:
    for method, path, allowed in (
        ("HEAD", "/v1/completions", "POST"),
        ("GET", "/v1/chat/completions", "POST"),
        ("POST", "/health", "GET, HEAD"),
        ("DELETE", "/v1/models/demo", "GET, HEAD"),
    ):
        assert shared.request(method, path)[0] == 405
        assert shared.last_headers["allow"] == allowed
    status, body = shared.request("HEAD", "/no/such/path")
    assert (status, body) == (404, b"")
