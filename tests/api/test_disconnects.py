"""A client that hangs up frees its request within a second, in whatever state that is."""

import json
import socket
import struct
import time

import pytest
from api.fake_core import FakeCore
from api.frontend_process import FrontendProcess

from nvserve.frontend.client import Client
from nvserve.protocol.messages import Abort, Submit

LIMIT_S = 1.0


def post(frontend: FrontendProcess, *, stream: bool, max_tokens: int = 400) -> socket.socket:
    body = json.dumps({"prompt": "x", "max_tokens": max_tokens, "stream": stream}).encode()
    connection = socket.create_connection(("127.0.0.1", frontend.port), timeout=10)
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    return connection


def hang_up(connection: socket.socket, *, reset: bool) -> None:
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("state", ["unanswered", "queued", "running"])
def test_a_hang_up_aborts(
    frontend: FrontendProcess, core: FakeCore, state: str, stream: bool, reset: bool
) -> None:
    core.is_silent = state == "unanswered"
    core.step_s = 0.01
    if state == "queued":
        core.is_held.set()
    connections = [post(frontend, stream=stream) for _ in range(4)]
    core.wait_until(lambda core: len(core.of_type(Submit)) == 4)
    if state == "running" and stream:
        assert b" 200 " in connections[0].recv(4096)
    for connection in connections:
        hang_up(connection, reset=reset)
    core.wait_until(lambda core: len(core.of_type(Abort)) == 4, LIMIT_S)
    assert not core.running


def test_a_hang_up_behind_a_pipelined_request_aborts_the_running_one(
    frontend: FrontendProcess, core: FakeCore
) -> None:
    core.step_s = 0.01
    connection = post(frontend, stream=False)
    core.wait_until(lambda core: len(core.of_type(Submit)) == 1)
    connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    time.sleep(0.1)  # it is queued behind the first, and nothing tells
    hang_up(connection, reset=True)
    core.wait_until(lambda core: len(core.of_type(Abort)) == 1, LIMIT_S + 1.0)
    assert not core.running


def test_a_hang_up_while_core_is_down_leaves_nothing_to_submit(frontend: FrontendProcess) -> None:
    assert frontend.core is not None
    frontend.core.is_silent = True
    connection = post(frontend, stream=False)
    frontend.core.wait_until(lambda core: bool(core.of_type(Submit)))
    frontend.core.kill()
    hang_up(connection, reset=True)
    time.sleep(0.1)  # the hang-up has no answer to wait for
    core = frontend.new_core()
    frontend.wait_connected()
    assert not core.of_type(Submit)


def test_others_are_not_disturbed(frontend: FrontendProcess, core: FakeCore) -> None:
    core.step_s = 0.01
    kept = post(frontend, stream=True, max_tokens=60)
    left = post(frontend, stream=True)
    core.wait_until(lambda core: len(core.running) == 2)
    hang_up(left, reset=True)
    core.wait_until(lambda core: bool(core.of_type(Abort)), LIMIT_S)
    answer = b""
    while b"[DONE]" not in answer:
        answer += kept.recv(65536)
    assert answer.count(b'"text"') == 60
    kept.close()


def test_a_reader_who_falls_behind_is_cut_and_freed(
    frontend: FrontendProcess, core: FakeCore
) -> None:
    """Its kernel buffers fill, then ours to their bound; the generation ends with an abort."""
    core.step_s = 0.0
    core.script = [5] * 100_000
    body = json.dumps(
        {"prompt": "x", "max_tokens": 500, "stream": True, "n": 128, "logprobs": 20}
    ).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", frontend.port))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    core.wait_until(lambda core: len(core.of_type(Abort)) == 128, 30.0)
    assert not core.running
    connection.close()


def test_a_zmq_client_that_leaves_is_aborted(frontend: FrontendProcess, core: FakeCore) -> None:
    core.is_held.set()
    client = Client(frontend.endpoint)
    for _ in range(3):
        client.submit("x", max_tokens=400)
    core.wait_until(lambda core: len(core.of_type(Submit)) == 3)
    client.close()
    core.wait_until(lambda core: len(core.of_type(Abort)) == 3, LIMIT_S + 0.5)


def test_an_abort_over_zmq_and_one_for_nothing(frontend: FrontendProcess, core: FakeCore) -> None:
    core.is_held.set()
    with Client(frontend.endpoint) as client:
        request = client.submit("x", max_tokens=400)
        core.wait_until(lambda core: bool(core.of_type(Submit)))
        client.abort(request)
        client.abort(request)
        core.wait_until(lambda core: len(core.of_type(Abort)) == 1)
        core.is_held.clear()
        assert client.generate("x", max_tokens=2).num_output_tokens == 2
    assert len(core.of_type(Abort)) == 1
