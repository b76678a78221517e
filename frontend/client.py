"""Python clients of the ZMQ door, sync and async: submit, stream, abort, resume.

    with Client("tcp://127.0.0.1:8001") as client:
        for piece in client.stream("To be, or", max_tokens=64):
            print(piece.text, end="")

When the server (or the connection) is replaced, open requests are submitted again with the ids they
hold and go on without a repeated or missing token. No wait is without a limit. A client is not
shared between threads: the second one to use it at a time gets a RuntimeError.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Self

import zmq
import zmq.asyncio

from nvserve.frontend.client_link import Link
from nvserve.frontend.client_session import Piece, Request, Result, Session
from nvserve.frontend.client_submit import open_request, resubmit_frames
from nvserve.frontend.one_thread import OneThread
from nvserve.protocol.client_messages import (
    CLIENT_PROTOCOL,
    Hello,
    decode_to_client,
    encode_client,
)

CONNECT_LIMIT_S: Final = 30.0  # for the server's Welcome, restarts of the server included
TICK_S: Final = 0.1  # between looks at the clock while waiting
MAX_FRAMES_AT_ONCE: Final = 256  # then the caller gets its pieces and its clock is looked at
CLOSED: Final = "this client is closed"


class ServerGone(ConnectionError):
    """No server answered within the limit, or it has ended for good."""


class Client:
    """A synchronous client: one thread, any number of open requests.

    `has_ended` may tell that no server will come back: then a wait ends within TICK_S, once what
    has arrived is taken.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        api_key: str = "",
        connect_limit_s: float = CONNECT_LIMIT_S,
        has_ended: Callable[[], bool] | None = None,
    ) -> None:
        self._endpoint: Final = endpoint
        self._hello: Final = Hello(version=CLIENT_PROTOCOL, api_key=api_key)
        self._connect_limit_s: Final = connect_limit_s
        self._has_ended: Final = has_ended
        self._context: Final = zmq.Context()
        self._is_closed = False
        self._session: Final = Session()
        self._thread: Final = OneThread("this client")
        self._link: Link | None = None
        self._lost_since = time.monotonic()

    # -- requests --------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Requests at the server, as far as is known."""
        return len(self._session.requests)

    def submit(
        self, prompt: str | Sequence[int], *, emitted: Sequence[int] = (), **params: Any
    ) -> Request:
        """Send a request; read it with `pieces` or `result`. Returns without waiting.

        With `emitted` (and the seed it had) a request of an earlier client goes on. What cannot be
        sent is a TypeError or ValueError by name, or a RequestError when it is too large.
        """
        with self._thread:
            link = self._connect()
            request, frame = open_request(self._session, prompt, emitted, params)
            link.note(is_waiting=True)
            try:
                self._send(frame)
            except BaseException:
                self._session.close(request)
                raise
        return request

    def pieces(self, request: Request, limit_s: float = 600.0) -> Iterator[Piece]:
        """The request's output as it comes. Leaving the loop early aborts the request."""
        deadline = time.monotonic() + limit_s
        try:
            while request.has_piece or not request.is_over:
                while request.has_piece:
                    yield request.take_piece()
                if not request.is_over:
                    self._pump(deadline)
            if request.error is not None:
                raise request.error
        finally:
            self.abort(request)

    def result(self, request: Request, limit_s: float = 600.0) -> Result:
        """Wait for the end of the request."""
        for _ in self.pieces(request, limit_s):
            pass
        return request.result()

    def stream(
        self, prompt: str | Sequence[int], *, limit_s: float = 600.0, **params: Any
    ) -> Iterator[Piece]:
        """Submit, and yield the output as it comes."""
        return self.pieces(self.submit(prompt, **params), limit_s)

    def generate(
        self, prompt: str | Sequence[int], *, limit_s: float = 600.0, **params: Any
    ) -> Result:
        """Submit, and wait for the whole output."""
        return self.result(self.submit(prompt, **params), limit_s)

    def abort(self, request: Request) -> None:
        """End a request; harmless when it is over."""
        with self._thread:
            message = self._session.close(request)
            if self._link is None:
                return
            self._link.note(bool(self._session.requests))
            if message is not None:
                self._send(encode_client(message))

    # -- connection ------------------------------------------------------------------------------

    def close(self, *, limit_s: float = 0.0) -> None:
        """Leave; the server aborts what is open. RuntimeError if another thread is still using it.

        A signal handler may do so within a call of its own thread: the sockets go as that ends.
        """
        with self._thread.within(limit_s):
            self._is_closed = True
            self._thread.at_end(self._destroy)

    def _destroy(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _connect(self) -> Link:
        """Have a connection that was welcomed, and was not silent since."""
        if self._is_closed:
            raise RuntimeError(CLOSED)
        if self._link is None:
            self._lost_since = time.monotonic()
            self._relink()
        assert self._link is not None, "just opened"
        while not self._link.is_welcome or self._link.is_lost(bool(self._session.requests)):
            self._pump(time.monotonic() + self._connect_limit_s)
        return self._link

    def _relink(self) -> None:
        if self._link is not None:
            self._link.close()
        self._session.lose()
        self._link = Link(self._context, self._endpoint, self._hello)
        self._link.socket.send(self._link.hello)

    def _send(self, frame: bytes) -> None:
        assert self._link is not None, "requests follow a connection"
        if self._link.is_welcome:  # otherwise the Welcome brings everything open
            self._link.socket.send(frame)

    def _pump(self, deadline: float) -> None:
        """Wait a moment for messages and apply them; replace a lost connection."""
        with self._thread:
            self._pump_alone(deadline)

    def _pump_alone(self, deadline: float) -> None:
        if self._is_closed:
            raise RuntimeError(CLOSED)
        link = self._link
        assert link is not None, "requests follow a connection"
        if time.monotonic() > deadline:
            raise TimeoutError("no answer within the limit")
        poller = zmq.Poller()
        poller.register(link.socket, zmq.POLLIN)
        poller.register(link.monitor, zmq.POLLIN)
        ready = dict(poller.poll(int(TICK_S * 1000)))
        if link.socket in ready:
            self._receive(link)
        elif self._has_ended is not None and self._has_ended():
            raise ServerGone(f"the server at {self._endpoint} has ended")
        elif link.monitor in ready or link.is_lost(bool(self._session.requests)):
            if link.is_welcome:
                self._lost_since = time.monotonic()
            self._check_lost_time()
            self._relink()

    def _receive(self, link: Link) -> None:
        for _ in range(MAX_FRAMES_AT_ONCE):
            try:
                frame = link.socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            link.hear()
            self._session.take(decode_to_client(frame))
            if self._session.welcome is not None and not link.is_welcome:
                link.is_welcome = True
                for resubmitted in resubmit_frames(self._session):
                    self._send(resubmitted)

    def _check_lost_time(self) -> None:
        lost_s = time.monotonic() - self._lost_since
        if lost_s > self._connect_limit_s:
            raise ServerGone(f"no server at {self._endpoint} for {lost_s:.0f} s")


class AsyncClient:
    """The same on asyncio: one task reads, every request is awaited on its own."""

    def __init__(
        self, endpoint: str, *, api_key: str = "", connect_limit_s: float = CONNECT_LIMIT_S
    ) -> None:
        self._endpoint: Final = endpoint
        self._hello: Final = Hello(version=CLIENT_PROTOCOL, api_key=api_key)
        self._connect_limit_s: Final = connect_limit_s
        self._context: Final = zmq.asyncio.Context()
        self._session: Final = Session()
        self._link: Link | None = None
        self._news: dict[int, asyncio.Event] = {}
        self._welcome: Final = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    async def submit(
        self, prompt: str | Sequence[int], *, emitted: Sequence[int] = (), **params: Any
    ) -> Request:
        """Send a request; read it with `pieces` or `result`. Errors are those of Client.submit."""
        await self._connect()
        request, frame = open_request(self._session, prompt, emitted, params)
        self._news[request.submit.id] = asyncio.Event()
        if self._link is not None:
            self._link.note(is_waiting=True)
        try:
            await self._send(frame)
        except BaseException:  # a cancelled task among them
            self._session.close(request)
            del self._news[request.submit.id]
            raise
        return request

    async def pieces(self, request: Request, limit_s: float = 600.0) -> AsyncIterator[Piece]:
        """The request's output as it comes. Closing the iterator early aborts the request."""
        news = self._news[request.submit.id]
        try:
            async with asyncio.timeout(limit_s):
                while request.has_piece or not request.is_over:
                    while request.has_piece:
                        yield request.take_piece()
                    if request.is_over:
                        continue
                    if self._failure is not None:
                        raise self._failure
                    await news.wait()
                    news.clear()
            if request.error is not None:
                raise request.error
        finally:
            await self.abort(request)

    async def result(self, request: Request, limit_s: float = 600.0) -> Result:
        """Wait for the end of the request."""
        async for _ in self.pieces(request, limit_s):
            pass
        return request.result()

    async def stream(
        self, prompt: str | Sequence[int], *, limit_s: float = 600.0, **params: Any
    ) -> AsyncIterator[Piece]:
        """Submit, and yield the output as it comes."""
        request = await self.submit(prompt, **params)
        async for piece in self.pieces(request, limit_s):
            yield piece

    async def generate(
        self, prompt: str | Sequence[int], *, limit_s: float = 600.0, **params: Any
    ) -> Result:
        """Submit, and wait for the whole output."""
        return await self.result(await self.submit(prompt, **params), limit_s)

    async def abort(self, request: Request) -> None:
        """End a request; harmless when it is over."""
        self._news.pop(request.submit.id, None)
        message = self._session.close(request)
        if self._link is not None:
            self._link.note(bool(self._session.requests))
        if message is not None:
            await self._send(encode_client(message))

    # -- connection ------------------------------------------------------------------------------

    async def close(self) -> None:
        """Leave; the server aborts what is open."""
        self._failure = self._failure or RuntimeError(CLOSED)
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._context.destroy(linger=0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self.close()

    async def _connect(self) -> None:
        if self._reader is None and self._failure is None:
            self._reader = asyncio.create_task(self._read())
        async with asyncio.timeout(self._connect_limit_s):
            while self._failure is None and self._session.welcome is None:
                self._welcome.clear()
                await self._welcome.wait()
        if self._failure is not None:
            raise self._failure

    async def _send(self, frame: bytes) -> None:
        link = self._link
        if link is not None and link.is_welcome:  # otherwise the Welcome brings everything open
            await link.socket.send(frame)

    async def _read(self) -> None:
        """One connection after another, until none can be had or the server refuses us."""
        try:
            lost_since = time.monotonic()
            while time.monotonic() - lost_since < self._connect_limit_s:
                if await self._serve_link():
                    lost_since = time.monotonic()
            self._failure = ServerGone(
                f"no server at {self._endpoint} for {self._connect_limit_s:g} s"
            )
        except Exception as error:  # the edge of this task: who waits is told
            self._failure = error
        finally:
            self._wake_all()

    async def _serve_link(self) -> bool:
        """Open a connection and read it until it is lost; whether it was welcomed."""
        self._session.lose()
        link = self._link = Link(self._context, self._endpoint, self._hello)
        try:
            await link.socket.send(link.hello)
            poller = zmq.asyncio.Poller()
            poller.register(link.socket, zmq.POLLIN)
            poller.register(link.monitor, zmq.POLLIN)
            while True:
                ready = dict(await poller.poll(int(TICK_S * 1000)))
                if link.socket in ready:
                    await self._receive(link)
                elif link.monitor in ready or link.is_lost(bool(self._session.requests)):
                    return link.is_welcome
        finally:
            self._link = None
            link.close()

    async def _receive(self, link: Link) -> None:
        frame = await link.socket.recv()
        link.hear()
        request = self._session.take(decode_to_client(frame))
        if request is not None and request.submit.id in self._news:
            self._news[request.submit.id].set()
        if self._session.welcome is not None and not link.is_welcome:
            link.is_welcome = True
            for resubmitted in resubmit_frames(self._session):
                await self._send(resubmitted)
            self._wake_all()  # a request may have ended here

    def _wake_all(self) -> None:
        self._welcome.set()
        for news in self._news.values():
            news.set()
