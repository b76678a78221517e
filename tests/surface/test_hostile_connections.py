"""Connections that send too much, too slowly or nonsense (A37, A40 of the reports).

Everything against one server, whose memory, processes and other clients must not notice.
"""

import concurrent.futures
import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from process.server import wait_for
from process.sockets import listeners_of
from surface.asking import Asker
from surface.zmq_peer import Peer

from nvserve.frontend.client import Client
from nvserve.frontend.exchange import MAX_BODY_BYTES
from nvserve.frontend.held_bodies import MAX_HELD_BYTES
from nvserve.frontend.http_server import HEADER_LIMIT_S
from nvserve.protocol.client_messages import MAX_CLIENT_FRAME_BYTES

NUM_SLOW = 500
MAX_GROWTH_MB = 100.0  # of the frontend while one client sends gigabytes
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = b'{"prompt":[9],"max_tokens":1}'


def frontend_mb(asker: Asker) -> float:
    text = Path(f"/proc/{asker.pids['frontend']}/status").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


@contextlib.contextmanager
def others_served(asker: Asker) -> Iterator[list[float]]:
    """While inside, another client asks all the time; how long each answer took."""
    is_over = threading.Event()
    waits: list[float] = []

    def ask() -> None:
        while not is_over.is_set():
            begun = time.monotonic()
            assert asker.complete(prompt=[9], max_tokens=1)["usage"]["completion_tokens"] == 1
            waits.append(time.monotonic() - begun)
            is_over.wait(0.05)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield waits
        finally:
            is_over.set()
            asking.result(60)
    assert waits


def exchange(asker: Asker, *parts: bytes, is_half_closed: bool = False) -> bytes:
    """Send raw bytes, and read until the server closes or resets."""
    answer = b""
    with socket.create_connection(("127.0.0.1", asker.port), timeout=60) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            if is_half_closed:
                connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(65536):
                answer += data
        except ConnectionError:  # refused while we were still sending
            pass
    return answer


# -- A40 -------------------------------------------------------------------------------------------


def test_a40_five_hundred_slow_clients_have_a_time_limit_and_stop_nobody(asker: Asker) -> None:
    before = frontend_mb(asker)
    slow = []
    try:
        for _ in range(NUM_SLOW):
            connection = socket.create_connection(("127.0.0.1", asker.port), timeout=60)
            connection.setblocking(False)
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: ")
            slow.append(connection)
        begun = time.monotonic()
        is_open = dict.fromkeys(slow, True)
        answers: list[bytes] = []
        with others_served(asker) as waits:
            while any(is_open.values()):
                for connection in slow:
                    if is_open[connection]:
                        is_open[connection] = _drip(connection, answers)
                assert time.monotonic() - begun < HEADER_LIMIT_S + 30
                time.sleep(0.5)  # a byte of each in this time
        assert time.monotonic() - begun > HEADER_LIMIT_S / 2, "they were not slow"
        assert sum(answer.startswith(b"HTTP/1.1 408 ") for answer in answers) > NUM_SLOW // 2
        assert sorted(waits)[len(waits) // 2] < 1.0
    finally:
        for connection in slow:
            connection.close()
    assert frontend_mb(asker) - before < MAX_GROWTH_MB
    asker.check_alive()


def _drip(connection: socket.socket, answers: list[bytes]) -> bool:
    """Send one byte; False once the server has answered or closed."""
    with contextlib.suppress(ConnectionError):  # it is reset; an answer can be read all the same
        connection.send(b"y")
    try:
        answers.append(connection.recv(4096))
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


@pytest.mark.parametrize("kind", ["one header", "many headers", "path", "chunked body"])
def test_a40_gigabytes_are_cut_at_the_limit(asker: Asker, kind: str) -> None:
    piece = {
        "many headers": b"a: b\r\n" * 10_000,
        "chunked body": b"10000\r\n" + b"x" * 65536 + b"\r\n",
    }
    start = {
        "one header": b"GET /health HTTP/1.1\r\nhost: x\r\na: ",
        "many headers": b"GET /health HTTP/1.1\r\nhost: x\r\n",
        "path": b"GET /",
        "chunked body": POST + b"transfer-encoding: chunked\r\n\r\n",
    }[kind]
    before = frontend_mb(asker)
    with others_served(asker):
        answer = exchange(asker, start, *[piece.get(kind, b"x" * 65536)] * 32_768)
    status = b"413" if kind == "chunked body" else b"431"
    assert answer == b"" or answer.startswith(b"HTTP/1.1 " + status)
    assert frontend_mb(asker) - before < MAX_GROWTH_MB
    asker.check_alive()


def test_a40_many_bodies_at_once_are_bounded_together(asker: Asker) -> None:
    """Each is within the limit of one; those for which nothing is left get a 503 in the middle.

    On a slow machine an early one has stopped for so long that it makes room for a late one.
    """
    num_bodies = 20
    size = MAX_BODY_BYTES - 1024
    head = POST + b'content-length: %d\r\n\r\n{"prompt":"' % size
    before = frontend_mb(asker)
    with contextlib.ExitStack() as stack, others_served(asker):
        opened = [
            stack.enter_context(socket.create_connection(("127.0.0.1", asker.port), timeout=60))
            for _ in range(num_bodies)
        ]
        for connection in opened:
            with contextlib.suppress(ConnectionError):
                connection.sendall(head + b"x" * (size - (1 << 20)))
        num_refused = num_bodies - MAX_HELD_BYTES // (size - (2 << 20))
        wait_for("the refusals", lambda: len(_answered(opened)) >= num_refused)
        refused = _answered(opened)
        assert len(refused) == num_refused
        statuses = {one.recv(4096)[:13] for one in refused}
        assert statuses <= {b"HTTP/1.1 503 ", b"HTTP/1.1 408 "}
        assert frontend_mb(asker) - before < MAX_HELD_BYTES / (1 << 20) + MAX_GROWTH_MB
    prompt = "a" * (8 << 20)
    wait_for("room", lambda: asker.post("/v1/completions", {"prompt": prompt})[0] == 400)
    asker.check_alive()


def _answered(connections: list[socket.socket]) -> list[socket.socket]:
    return select.select(connections, [], [], 0.0)[0]


@pytest.mark.parametrize(
    ("length", "statuses"),
    [
        (b"5", [b"400"]),  # too short: what is left is no request, and ends the connection
        (b"-1", [b"400"]),
        (b"1x", [b"400"]),
        (b"99999999999999999999999", [b"400"]),
        (b"3000000000", [b"413"]),
        (b"29\r\ncontent-length: 5", [b"400"]),
        (b"29\r\ntransfer-encoding: chunked", [b"400"]),
        (b"1000", []),  # too long: the client has gone before its body is whole
    ],
)
def test_a40_lengths_that_are_wrong(asker: Asker, length: bytes, statuses: list[bytes]) -> None:
    head = POST + b"content-length: " + length + b"\r\n\r\n"
    answer = exchange(asker, head + BODY, is_half_closed=not statuses)
    found = [line.split()[1] for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1")]
    assert found[:1] == statuses
    asker.check_alive()


# -- A37 -------------------------------------------------------------------------------------------


def test_a37_frames_without_end_stop_nobody(asker: Asker) -> None:
    is_over = threading.Event()

    def flood(frame: bytes) -> None:
        with Peer(asker.zmq_endpoint, is_greeting=False) as peer:
            while not is_over.is_set():
                if peer.socket.poll(100, zmq.POLLOUT):
                    peer.socket.send(frame)

    before = frontend_mb(asker)
    floods = [threading.Thread(target=flood, args=[frame]) for frame in (b"\xc1", b"x" * 100_000)]
    for thread in floods:
        thread.start()
    try:
        for _ in range(4):
            assert asker.complete(prompt=[9], max_tokens=1)["usage"]["completion_tokens"] == 1
            with Client(asker.zmq_endpoint) as client:
                assert client.generate([5, 6], max_tokens=2, ignore_eos=True).num_output_tokens == 2
    finally:
        is_over.set()
        for thread in floods:
            thread.join()
    assert frontend_mb(asker) - before < MAX_GROWTH_MB
    asker.check_alive()


def test_a37_a_frame_over_the_limit_ends_its_connection_alone(asker: Asker) -> None:
    before = frontend_mb(asker)
    huge = bytes(1 << 30)
    with Client(asker.zmq_endpoint) as kept:
        request = kept.submit([5], max_tokens=30, ignore_eos=True)
        with Peer(asker.zmq_endpoint) as peer:
            monitor = peer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            peer.socket.send(huge, copy=False)
            assert monitor.poll(30_000), "the connection stays"
            peer.socket.disable_monitor()
            monitor.close(linger=0)
            largest = frontend_mb(asker)
        assert kept.result(request).num_output_tokens == 30
    assert largest - before < MAX_CLIENT_FRAME_BYTES / (1 << 20) + MAX_GROWTH_MB
    asker.check_alive()


def test_a37_a_thousand_connections_to_every_listening_socket(asker: Asker) -> None:
    ports = {port for _, port in listeners_of({asker.server.pid, *asker.pids.values()})}
    assert len(ports) >= 2
    opened = []
    try:
        for port in ports:
            for number in range(1000):
                connection = socket.create_connection(("127.0.0.1", port), timeout=60)
                opened.append(connection)
                connection.sendall(bytes([number % 256]) * (number % 3))
        assert asker.complete(prompt=[9], max_tokens=1)["usage"]["completion_tokens"] == 1
        with Client(asker.zmq_endpoint) as client:
            assert client.generate([5, 6], max_tokens=2, ignore_eos=True).num_output_tokens == 2
    finally:
        for connection in opened:
            connection.close()
    wait_for("descriptors back", lambda: _num_descriptors(asker) < 200)
    asker.check_alive()


def _num_descriptors(asker: Asker) -> int:
    return len(list(Path(f"/proc/{asker.pids['frontend']}/fd").iterdir()))


def test_a37_nothing_that_is_sent_or_loaded_is_unpickled() -> None:
    banned = ("pickle", "marshal", "shelve", "pyobj", "weights_only=False", "dill", "joblib")
    root = Path(__file__).parents[2]
    sources = [
        path
        for folder in ("protocol", "core", "frontend", "workers", "kernels", "scripts")
        for path in (root / folder).rglob("*.py")
    ]
    assert len(sources) > 100
    for path in sources:
        text = path.read_text()
        assert not [word for word in banned if word in text], path
        assert "torch.load(" not in text, path
