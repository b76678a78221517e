"""What one client of the ZMQ door can make the frontend hold, and who is closed for what.

The bounds of memory are measured on the process; the limits of time, made short, in this one.
"""

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import uvloop
import zmq
from api.conftest import start
from api.fake_core import FakeCore
from api.frontend_process import FrontendProcess

from nvserve.frontend import zmq_wire
from nvserve.frontend.client import Client
from nvserve.frontend.zmq_wire import Listener, Wire
from nvserve.frontend.zmtp import GREETING
from nvserve.protocol.client_messages import (
    CLIENT_PROTOCOL,
    MAX_CLIENT_FRAME_BYTES,
    Error,
    Hello,
    Submit,
    decode_to_client,
    encode_client,
)
from nvserve.protocol.messages import Abort

READY_BODY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
READY = b"\x04" + bytes([len(READY_BODY)]) + READY_BODY
HELLO = encode_client(Hello(version=CLIENT_PROTOCOL))
BIG = b"x" * (15 << 20)
NUM_BIG = 20
MAX_GROWTH_MB = 150.0  # half of what is sent at least
LIMIT_S = 60.0


@pytest.fixture
def frontend() -> Iterator[FrontendProcess]:
    """Fresh for each test: the most memory that one ever had, and its totals, are read."""
    process = start()
    try:
        process.new_core()
        yield process
    finally:
        process.close()


def most_mb(frontend: FrontendProcess) -> float:
    """The most memory that the frontend ever had."""
    text = Path(f"/proc/{frontend.process.pid}/status").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def message(body: bytes, flags: int = 0) -> bytes:
    return bytes([flags | 2]) + struct.pack(">Q", len(body)) + body


def connect(endpoint: str) -> socket.socket:
    """A connection behind its handshake, without libzmq, which sends whole messages only."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=LIMIT_S)
    connection.sendall(GREETING + READY)
    return connection


def is_served(frontend: FrontendProcess) -> None:
    with Client(frontend.endpoint) as client:
        assert client.generate([5], max_tokens=2).num_output_tokens == 2


def test_a_message_without_end_is_not_kept(frontend: FrontendProcess) -> None:
    is_served(frontend)
    before = most_mb(frontend)
    with connect(frontend.endpoint) as connection:
        connection.sendall(message(HELLO))
        for _ in range(NUM_BIG):
            connection.sendall(message(BIG, flags=1))
        is_served(frontend)
        assert most_mb(frontend) - before < MAX_GROWTH_MB
        connection.sendall(message(b""))
    frontend.wait_metric("nvserve:frontend_zmq_dropped_frames_total", 1)  # one message, dropped


@pytest.mark.parametrize("field", ["prompt_ids", "emitted", "prompt"])
def test_submits_that_are_too_long_are_refused_one_by_one(
    shared: FrontendProcess, field: str
) -> None:
    is_served(shared)
    before = most_mb(shared)
    submits = {
        "prompt_ids": Submit(id=1, prompt_ids=BIG),
        "emitted": Submit(id=1, prompt="x", emitted=BIG),
        "prompt": Submit(id=1, prompt=BIG.decode()),
    }
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(shared.endpoint)
        dealer.send(HELLO)
        for number in range(NUM_BIG):
            submit = msgspec.structs.replace(submits[field], id=number)
            dealer.send(encode_client(submit), copy=False)
        errors: list[Error] = []
        while len(errors) < NUM_BIG:
            assert dealer.poll(30_000)
            answer = decode_to_client(dealer.recv())
            if isinstance(answer, Error):
                errors.append(answer)
        param = "emitted" if field == "emitted" else "prompt"
        assert {(error.status, error.param) for error in errors} == {(400, param)}
        assert {error.id for error in errors} == set(range(NUM_BIG))
    finally:
        context.destroy(linger=0)
    assert most_mb(shared) - before < MAX_GROWTH_MB
    is_served(shared)


def test_the_door_opens_at_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    frontend = FrontendProcess(zmq_endpoint="tcp://[::1]:*")
    try:
        frontend.endpoint = frontend.ready().zmq_endpoint
        assert frontend.endpoint.startswith("tcp://[::1]:")
        frontend.new_core()
        is_served(frontend)
    finally:
        frontend.close()


def test_a_stranger_has_room_for_a_greeting_only(shared: FrontendProcess) -> None:
    before = most_mb(shared)
    # It may be refused while we are still sending.
    with connect(shared.endpoint) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(message(BIG))
        while connection.recv(65536):
            pass
    assert most_mb(shared) - before < MAX_CLIENT_FRAME_BYTES / (2 << 20)
    is_served(shared)


def test_a_message_of_several_frames_is_dropped_and_its_connection_goes_on(
    frontend: FrontendProcess,
) -> None:
    with Client(frontend.endpoint) as client:
        client.generate([5], max_tokens=1)
        assert client._link is not None
        client._link.socket.send_multipart([b"", encode_client(Submit(id=7, prompt="x"))])
        assert client.generate([5], max_tokens=2).num_output_tokens == 2
        frontend.wait_metric("nvserve:frontend_zmq_dropped_frames_total", 1)


def test_requests_of_a_connection_that_is_reset_are_aborted(
    frontend: FrontendProcess, core: FakeCore
) -> None:
    core.is_held.set()
    with connect(frontend.endpoint) as connection:
        connection.sendall(message(HELLO) + message(encode_client(Submit(id=1, prompt="x"))))
        core.wait_until(lambda core: bool(core.running))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    core.wait_until(lambda core: bool(core.of_type(Abort)))


# -- time limits, in this process ------------------------------------------------------------------


class Host:
    """Welcomes everybody, and notes who has left and what was said."""

    def __init__(self) -> None:
        self.listener = Listener(self.take, self.lose)
        self.said: list[bytes | None] = []
        self.wires: list[Wire] = []
        self.gone = asyncio.Event()

    def take(self, wire: Wire, frame: bytes | None) -> None:
        if frame == HELLO:
            wire.welcome()
            self.wires.append(wire)
        self.said.append(frame)

    def lose(self, wire: Wire) -> None:
        self.gone.set()


def hosted(ask: Callable[[Host, socket.socket], Awaitable[None]], *, greets: bool = True) -> None:
    """Run this with a connection that has said Hello, or only shaken hands."""

    async def run() -> None:
        host = Host()
        endpoint = await host.listener.open("tcp://127.0.0.1:*")
        connection = await asyncio.to_thread(connect, endpoint)
        try:
            async with asyncio.timeout(LIMIT_S):
                if greets:
                    connection.sendall(message(HELLO))
                    while not host.wires:
                        await asyncio.sleep(0.01)
                await ask(host, connection)
        finally:
            connection.close()
            host.listener.close()

    uvloop.run(run())


def test_who_does_not_answer_heartbeats_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_wire, "HEARTBEAT_S", 0.1)

    async def ask(host: Host, connection: socket.socket) -> None:
        await host.gone.wait()

    hosted(ask)


def test_who_answers_heartbeats_stays() -> None:
    """libzmq answers by itself, whatever its program does."""

    async def run() -> None:
        host = Host()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            dealer = context.socket(zmq.DEALER)
            dealer.connect(await host.listener.open("tcp://127.0.0.1:*"))
            dealer.send(HELLO)
            async with asyncio.timeout(LIMIT_S):
                while not host.wires:
                    await asyncio.sleep(0.01)
                [wire] = host.wires
                for _ in range(2 * zmq_wire.MAX_SILENT_BEATS):
                    wire.beat()
                    while wire._num_silent_beats:
                        await asyncio.sleep(0.01)
            assert not wire.is_closed
        finally:
            context.destroy(linger=0)
            host.listener.close()

    uvloop.run(run())


def test_who_never_says_hello_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_wire, "STRANGER_LIMIT_S", 0.2)

    async def ask(host: Host, connection: socket.socket) -> None:
        await host.gone.wait()

    hosted(ask, greets=False)


class Stuck(asyncio.Transport):
    """The transport of a peer that reads nothing, and whose kernel takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.is_aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.num_bytes += len(data)

    def get_write_buffer_size(self) -> int:
        return self.num_bytes

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted


def test_who_asks_without_reading_the_answers_is_closed() -> None:
    async def run() -> None:
        host, transport = Host(), Stuck()
        await host.listener.open("tcp://127.0.0.1:*")
        wire = Wire(host.listener)
        wire.connection_made(transport)
        wire.data_received(GREETING + READY + b"\x04\x07\x04PING\0\0" * 10_000)
        async with asyncio.timeout(LIMIT_S):
            while not transport.is_aborted:
                await asyncio.sleep(0)
        assert transport.num_bytes < 2 * zmq_wire.MAX_STRANGER_BYTES
        wire.connection_lost(None)
        host.listener.close()

    uvloop.run(run())


def test_who_leaves_too_much_unread_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_wire, "MAX_UNSENT_BYTES", 1 << 20)

    async def ask(host: Host, connection: socket.socket) -> None:
        while not host.gone.is_set():
            host.wires[0].send(b"x" * 100_000)
            await asyncio.sleep(0)

    hosted(ask)


def test_a_connection_on_hold_is_not_read_and_then_goes_on() -> None:
    async def ask(host: Host, connection: socket.socket) -> None:
        [wire] = host.wires
        wire.hold()
        connection.setblocking(False)
        frame, num_sent = message(b"y" * 65536), 0
        begun = time.monotonic()
        while time.monotonic() - begun < 0.5:  # until the kernels' buffers are full
            with contextlib.suppress(BlockingIOError):
                num_sent += connection.send(frame[num_sent % len(frame) :])
            await asyncio.sleep(0)
        assert host.said == [HELLO]
        assert wire.num_unread_bytes <= 1 << 20
        wire.go_on()
        while len(host.said) < 1 + num_sent // len(frame):
            await asyncio.sleep(0.01)

    hosted(ask)


def test_the_largest_goes_when_all_hold_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_wire, "MAX_ALL_UNREAD_BYTES", 1 << 20)

    async def ask(host: Host, connection: socket.socket) -> None:
        [wire] = host.wires
        address = wire._transport.get_extra_info("sockname")
        with await asyncio.to_thread(connect, f"tcp://{address[0]}:{address[1]}") as small:
            await asyncio.to_thread(small.sendall, message(b"z" * 10_000)[:-1])
            with contextlib.suppress(OSError):
                await asyncio.to_thread(connection.sendall, message(BIG))
            await host.gone.wait()
            assert wire.is_closed
            small.sendall(b"z")
            while b"z" * 10_000 not in host.said:
                await asyncio.sleep(0.01)

    hosted(ask)
