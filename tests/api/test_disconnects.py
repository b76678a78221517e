"""A client that hangs up frees its request within a second, in whatever state that is."""

import json
import socket
import struct
import time
from collections.abc import Callable

import pytest
from api.fake_core import FakeCore
from api.frontend_process import FrontendProcess

from nvserve.frontend.client import Client
from nvserve.protocol.messages import Abort, Submit

LIMIT_S = 1.0
NUM_TRIES = 3  # a machine that stands still for a moment hits one of them, but not all


def post(frontend: FrontendProcess, *, stream: bool, max_tokens: int = 400) -> socket.socket:
    body = json.dumps({"prompt": "x", "max_tokens": max_tokens, "stream": stream}).encode()
    connection = socket.create_connection(("127.0.0.1", frontend.port), timeout=60)
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    return connection


def hang_up(connection: socket.socket, *, reset: bool) -> None:
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def num_aborts(core: FakeCore) -> int:
    return len(core.of_type(Abort))


def assert_freed_in_time(
    core: FakeCore, leave: Callable[[], None], num_requests: int, limit_s: float = LIMIT_S
) -> None:
    """Let requests be left again and again, until they are freed in time once."""
    took_s = []
    for _ in range(NUM_TRIES):
        expected = num_aborts(core) + num_requests
        leave()
        begun = time.monotonic()
        core.wait_until(lambda core, count=expected: num_aborts(core) == count)  # type: ignore[misc]
        took_s.append(time.monotonic() - begun)
        assert not core.running
        if took_s[-1] < limit_s:
            return
    pytest.fail(f"freed after {took_s} s")


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("state", ["unanswered", "queued", "running"])
def test_a_hang_up_aborts(
    frontend: FrontendProcess, core: FakeCore, state: str, stream: bool, reset: bool
) -> None:
    core.is_silent = state == "unanswered"
    core.most_tokens = 100
    if state == "queued":
        core.is_held.set()

    def leave() -> None:
        expected = len(core.of_type(Submit)) + 4
        connections = [post(frontend, stream=stream) for _ in range(4)]
        core.wait_until(lambda core: len(core.of_type(Submit)) == expected)
        if state == "running" and stream:
            assert b" 200 " in connections[0].recv(4096)
        for connection in connections:
            hang_up(connection, reset=reset)

    assert_freed_in_time(core, leave, 4)


def test_a_hang_up_behind_a_pipelined_request_aborts_the_running_one(
    frontend: FrontendProcess, core: FakeCore
) -> None:
    core.most_tokens = 100

    def leave() -> None:
        expected = len(core.of_type(Submit)) + 1
        connection = post(frontend, stream=False)
        core.wait_until(lambda core: len(core.of_type(Submit)) == expected)
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        time.sleep(0.1)  # it is queued behind the first, and nothing tells
        hang_up(connection, reset=True)

    assert_freed_in_time(core, leave, 1, LIMIT_S + 1.0)


def test_a_hang_up_while_core_is_down_leaves_nothing_to_submit(
    frontend: FrontendProcess, core: FakeCore
) -> None:
    core.is_silent = True
    connection = post(frontend, stream=False)
    core.wait_until(lambda core: bool(core.of_type(Submit)))
    core.kill()
    hang_up(connection, reset=True)
    frontend.wait_metric("nvserve:frontend_open_requests", 0)
    core = frontend.new_core()
    frontend.wait_connected()
    assert not core.of_type(Submit)


def test_others_are_not_disturbed(frontend: FrontendProcess, core: FakeCore) -> None:
    core.most_tokens = 50
    kept = post(frontend, stream=True, max_tokens=60)
    left = post(frontend, stream=True)
    core.wait_until(lambda core: len(core.running) == 2)
    hang_up(left, reset=True)
    core.wait_until(lambda core: num_aborts(core) == 1)
    core.most_tokens = None
    answer = b""
    while b"[DONE]" not in answer:
        data = kept.recv(65536)
        assert data, "the stream broke"
        answer += data
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
    core.wait_until(lambda core: num_aborts(core) == 128, 120.0)
    assert not core.running
    connection.close()


def test_a_zmq_client_that_leaves_is_aborted(frontend: FrontendProcess, core: FakeCore) -> None:
    core.is_held.set()

    def leave() -> None:
        expected = len(core.of_type(Submit)) + 3
        client = Client(frontend.endpoint)
        for _ in range(3):
            client.submit("x", max_tokens=400)
        core.wait_until(lambda core: len(core.of_type(Submit)) == expected)
        client.close()

    assert_freed_in_time(core, leave, 3, LIMIT_S + 0.5)


def test_an_abort_over_zmq_and_one_for_nothing(frontend: FrontendProcess, core: FakeCore) -> None:
    core.is_held.set()
    with Client(frontend.endpoint) as client:
        request = client.submit("x", max_tokens=400)
        core.wait_until(lambda core: bool(core.of_type(Submit)))
        client.abort(request)
        client.abort(request)
        core.wait_until(lambda core: num_aborts(core) == 1)
        core.is_held.clear()
        assert client.generate("x", max_tokens=2).num_output_tokens == 2
    assert num_aborts(core) == 1
