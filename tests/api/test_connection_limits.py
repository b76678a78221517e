"""Connections that send or take too slowly end in time, and cost the others nothing.

In this process, with the limits made short; what a connection is asked is answered by a stand-in.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop
from starlette.routing import Route, Router

from nvserve.frontend import exchange, http_server
from nvserve.frontend.cors import Cors
from nvserve.frontend.errors import ApiError
from nvserve.frontend.exchange import ClientGone, Exchange, Receive, Scope, Send
from nvserve.frontend.held_bodies import HeldBodies
from nvserve.frontend.http_server import Server

NUM_SLOW = 500
BIG = b"x" * (48 << 20)  # more than any kernel buffers
SMALL = b"y" * (48 << 10)  # less than what makes a transport pause
REQUEST = b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n"
MARGIN_S = 20.0  # for a loaded machine; an unlimited wait has no end at all


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADER_LIMIT_S", 1.0)
    monkeypatch.setattr(exchange, "BODY_LIMIT_S", 1.0)
    monkeypatch.setattr(http_server, "REST_LIMIT_S", 0.5)
    monkeypatch.setattr(http_server, "STALL_LIMIT_S", 0.5)
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 1)


class App:
    """An answer of the size that the path names. (A plain function would be no ASGI app here.)"""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Exchange(scope, receive, send, Cors([]))
        body = {"/big": BIG, "/small": SMALL}.get(scope["path"], b"ok")
        try:
            if request.method == "POST":
                with HeldBodies().one() as held:
                    await request.read_json(held)
            await request.respond(body)
        except ApiError as error:
            await request.respond_error(error)
        except ClientGone:
            return


def serve(ask: Callable[[int], Awaitable[None]]) -> None:
    """Run this with the port of a server."""

    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        server = Server(Router([Route("/{any}", App())]))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await server.is_serving.wait()
        try:
            async with asyncio.timeout(120):
                await ask(listener.getsockname()[1])
        finally:
            server.force_exit = server.should_exit = True
            await serving

    uvloop.run(run())


async def connect(port: int, receive_bytes: int = 0) -> socket.socket:
    """A connection that reads only when told to."""
    connection = socket.socket()
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    return connection


async def read_to_end(connection: socket.socket) -> bytes:
    answer = b""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(MARGIN_S):
            while data := await loop.sock_recv(connection, 1 << 20):
                answer += data
    except ConnectionResetError:
        pass
    connection.close()
    return answer


@pytest.mark.parametrize(
    ("start", "rest"),
    [
        (b"", b"GET /x HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 100_000),
        (
            b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 10000\r\n\r\n",
            b" " * 10_000,
        ),
    ],
    ids=["headers", "bodies"],
)
def test_five_hundred_slow_clients_end_in_time_and_stop_nobody(start: bytes, rest: bytes) -> None:
    async def ask(port: int) -> None:
        loop = asyncio.get_running_loop()
        slow = [await connect(port) for _ in range(NUM_SLOW)]

        async def drip(connection: socket.socket) -> bytes:
            await loop.sock_sendall(connection, start)
            for byte in rest:
                try:
                    await loop.sock_sendall(connection, bytes([byte]))
                except OSError:
                    break
                await asyncio.sleep(0.25)
            return await read_to_end(connection)

        begun = time.monotonic()
        dripping = asyncio.gather(*map(drip, slow))
        others = 0
        while not dripping.done():
            good = await connect(port)
            await loop.sock_sendall(good, REQUEST % b"x")
            # One that this machine keeps standing here for too long is told so.
            others += b" 200 " in await loop.sock_recv(good, 4096)
            good.close()
            await asyncio.sleep(0.02)
        answers = await dripping
        assert time.monotonic() - begun < 1.0 + MARGIN_S
        assert others > 5
        assert all(not answer or answer.startswith(b"HTTP/1.1 408 ") for answer in answers)
        assert sum(bool(answer) for answer in answers) > NUM_SLOW // 2

    serve(ask)


@pytest.mark.parametrize(
    ("path", "closing"),
    [(b"big", b""), (b"small", b""), (b"big", b"connection: close\r\n")],
    ids=["big", "small", "big and last"],
)
def test_a_reader_that_takes_nothing_is_cut(path: bytes, closing: bytes) -> None:
    """`small` fits the kernel's buffers only in part, and pauses no transport."""

    async def ask(port: int) -> None:
        loop = asyncio.get_running_loop()
        connection = await connect(port, receive_bytes=2048)
        await until(port, connection, is_open=True)
        request = (REQUEST % path).replace(b"\r\n\r\n", b"\r\n" + closing + b"\r\n")
        with contextlib.suppress(ConnectionError):  # cut already, when this machine stood still
            for _ in range(1 if closing else 200):  # until the kernel takes no more
                await loop.sock_sendall(connection, request)
        await until(port, connection, is_open=False)
        connection.close()

    serve(ask)


async def until(port: int, connection: socket.socket, *, is_open: bool) -> None:
    """Until the server's end of a connection is there, or gone, in the kernel's table."""
    mine = f"{connection.getsockname()[1]:04X}"

    def is_there() -> bool:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return any(
            row[1].endswith(f":{port:04X}") and row[2].endswith(f":{mine}") and row[3] == "01"
            for row in rows
        )

    async with asyncio.timeout(MARGIN_S):
        while is_there() != is_open:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "behind",
    [b"\r\n", b"GET /x HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\nhello"],
    ids=["blank", "unread body"],
)
def test_bytes_that_begin_no_request_keep_no_connection(behind: bytes) -> None:
    async def ask(port: int) -> None:
        loop = asyncio.get_running_loop()
        connection = await connect(port)
        await loop.sock_sendall(connection, REQUEST % b"x")
        assert b" 200 " in await loop.sock_recv(connection, 4096)
        await loop.sock_sendall(connection, behind)

        async def drip() -> None:
            while True:
                await asyncio.sleep(0.1)
                await loop.sock_sendall(connection, behind[-1:])

        dripping = asyncio.create_task(drip())
        assert len(await read_to_end(connection)) < 1000
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)

    serve(ask)


def test_a_large_answer_arrives_whole_at_a_slow_reader() -> None:
    async def ask(port: int) -> None:
        loop = asyncio.get_running_loop()
        connection = await connect(port, receive_bytes=1 << 20)
        await loop.sock_sendall(connection, REQUEST % b"big")
        num_bytes, begun = 0, time.monotonic()
        while num_bytes < len(BIG):
            try:
                data = await loop.sock_recv(connection, 1 << 20)
            except ConnectionResetError:
                data = b""
            if not data:
                break
            num_bytes += len(data)
            if time.monotonic() - begun < 1.0:  # twice the limit of one that takes nothing
                await asyncio.sleep(0.05)
        connection.close()
        arrived.append(num_bytes)

    arrived: list[int] = []
    for _ in range(3):  # this machine may stand still in one of them
        serve(ask)
        if arrived[-1] >= len(BIG):
            return
    pytest.fail(f"cut after {arrived} bytes")
