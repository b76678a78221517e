"""One HTTP request and its response on raw ASGI: bounded reading, JSON answers, event streams.

The events of a stream are written straight to the connection from wherever they arise. A reader who
falls too far behind is cut. Knows nothing of models.
"""

import asyncio
import contextlib
import hmac
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Final

from nvserve.frontend.cors import Cors
from nvserve.frontend.errors import ApiError
from nvserve.frontend.held_bodies import HeldBody
from nvserve.frontend.http_server import TRANSPORT
from nvserve.frontend.params import resolve_timeout

MAX_BODY_BYTES: Final = 32 << 20
BODY_LIMIT_S: Final = 60.0  # for the whole body
MAX_UNSENT_BYTES: Final = 1 << 20  # of one stream, in our buffers
FLUSH_LIMIT_S: Final = 30.0  # for a reader to take what is left at the end
PIECE_BYTES: Final = 256 << 10  # of a body; the next waits until its reader took most of this one
TIMEOUT_HEADER: Final = b"x-request-timeout"
JSON: Final = b"application/json"
EVENTS: Final = b"text/event-stream; charset=utf-8"

_SECONDS: Final = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?")
_SANE_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")

Message = Any  # an ASGI event; its keys depend on its type
Scope = Any
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ClientGone(Exception):
    """The connection ended before there was anything to answer."""


class EventStream:
    """Server-sent events of one response; none before `open`."""

    def __init__(
        self, transport: asyncio.Transport, send: Send, on_cut: Callable[[], None]
    ) -> None:
        self._transport: Final = transport
        self._send: Final = send
        self._on_cut: Final = on_cut

    async def open(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send the status line."""
        start = [(b"content-type", EVENTS), (b"cache-control", b"no-cache"), *headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": start})

    def write(self, event: bytes) -> None:
        """Send one event now; cut the connection when too much is unsent."""
        transport = self._transport
        if transport.is_closing():
            return
        transport.write(b"%x\r\n%b\r\n" % (len(event), event))  # one HTTP chunk
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.cut()

    async def send(self, event: bytes) -> None:
        """Send one event of any size, no faster than its reader takes it."""
        for start in range(0, len(event), PIECE_BYTES):
            piece = event[start : start + PIECE_BYTES]
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def close(self) -> None:
        """End the response, giving the reader a limited time to take the rest."""
        try:
            async with asyncio.timeout(FLUSH_LIMIT_S):
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            self.cut()

    def cut(self) -> None:
        """Drop the connection with all that is unsent."""
        self._transport.abort()
        self._on_cut()


class Exchange:
    """A request and the one response to it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, cors: Cors) -> None:
        self.scope: Final = scope
        self.is_started = False
        self._receive: Final = receive
        self._send: Final = send
        # Of several with one name the first counts.
        self._headers: Final[dict[bytes, bytes]] = dict(reversed(scope["headers"]))
        given = self.header(b"x-request-id")
        is_sane = given is not None and _SANE_ID.fullmatch(given)
        self.request_id: Final = given if given and is_sane else os.urandom(16).hex().encode()
        self._cors: Final = cors

    @property
    def method(self) -> str:
        return str(self.scope["method"])

    @property
    def is_preflight(self) -> bool:
        is_asking = self.header(b"access-control-request-method") is not None
        return self.method == "OPTIONS" and is_asking and self._cors.is_on

    def header(self, name: bytes) -> bytes | None:
        """The first header of this lower-case name."""
        return self._headers.get(name)

    # -- request ---------------------------------------------------------------------------------

    def timeout_s(self) -> float | None:
        """What X-Request-Timeout says in seconds; None without one."""
        given = self.header(TIMEOUT_HEADER)
        if given is None:
            return None
        name = "X-Request-Timeout"
        if not _SECONDS.fullmatch(given):
            raise ApiError(400, f"{name}: must be a number of seconds", param=name)
        return resolve_timeout(float(given), name)

    def check_key(self, api_key: str) -> None:
        """A 401 unless the request carries the key; in time that does not depend on it."""
        scheme, _, given = (self.header(b"authorization") or b"").partition(b" ")
        is_right = hmac.compare_digest(given.strip(), api_key.encode())
        if not (is_right and scheme.lower() == b"bearer"):
            raise ApiError(401, "a valid API key is required", code="invalid_api_key")

    def check_client(self) -> None:
        """ClientGone when it has hung up."""
        if self.transport.is_closing():
            raise ClientGone

    async def read_json(self, held: HeldBody) -> bytes:
        """The body, within the limits of size and time; 415 when it does not claim to be JSON.

        `held` is its room, which may be refused, or be given to others when it comes slowly.
        """
        self._check_content_type()
        announced = self.header(b"content-length") or b"0"
        if announced.isdigit() and int(announced[:20]) > MAX_BODY_BYTES:
            raise _too_large()
        try:
            async with asyncio.timeout(BODY_LIMIT_S) as limit:
                with held.arriving(partial(_expire, limit)):
                    return await self._read_body(held)
        except TimeoutError:
            held.check()
            raise ApiError(408, f"no complete body within {BODY_LIMIT_S:g} s") from None

    def _check_content_type(self) -> None:
        content_type, *parameters = (self.header(b"content-type") or b"").lower().split(b";")
        if content_type.strip() != JSON:
            raise ApiError(415, "content-type must be application/json")
        for parameter in parameters:
            name, _, value = parameter.partition(b"=")
            if name.strip() == b"charset" and value.strip(b' "') not in (b"utf-8", b"utf8"):
                raise ApiError(415, "the charset must be utf-8")

    async def _read_body(self, held: HeldBody) -> bytes:
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientGone
            body += message.get("body", b"")
            if len(body) > MAX_BODY_BYTES:
                raise _too_large()
            held.grow(len(body))
            if not message.get("more_body", False):
                return bytes(body)

    @contextlib.asynccontextmanager
    async def watching(self, on_gone: Callable[[], None]) -> AsyncIterator[None]:
        """While inside, call back when the client hangs up, in whatever state its request is."""
        watcher = asyncio.create_task(self._watch(on_gone))
        try:
            yield
        finally:
            watcher.cancel()

    async def _watch(self, on_gone: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass  # the end of a body; whatever follows belongs to the next request
        on_gone()

    # -- response --------------------------------------------------------------------------------

    def own_headers(self) -> list[tuple[bytes, bytes]]:
        """What every response carries."""
        return [(b"x-request-id", self.request_id), *self._cors.headers(self.header(b"origin"))]

    async def respond_preflight(self) -> None:
        """Answer a browser that asks whether a page of another origin may go on."""
        asked = self.header(b"access-control-request-headers")
        headers = self._cors.preflight(self.header(b"origin"), asked)
        if headers is None:
            raise ApiError(403, "this origin is not allowed", code="origin_not_allowed")
        await self.respond(b"", status=204, headers=headers)

    async def respond(
        self,
        body: bytes,
        *,
        status: int = 200,
        content_type: bytes = JSON,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """Send a whole response."""
        self.is_started = True
        start = [*headers, *self.own_headers()]
        if status != 204:  # which has no content to speak of (RFC 9110, 8.6)
            length = b"%d" % len(body)
            start = [(b"content-type", content_type), (b"content-length", length), *start]
        await self._send({"type": "http.response.start", "status": status, "headers": start})
        num_sent = 0
        while len(body) - num_sent > PIECE_BYTES:
            piece = body[num_sent : num_sent + PIECE_BYTES]
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            num_sent += PIECE_BYTES
        await self._send({"type": "http.response.body", "body": body[num_sent:]})

    async def respond_error(self, error: ApiError) -> None:
        """Send an error. One that left a body unread closes the connection, as its rest follows."""
        headers = []
        if error.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, round(error.retry_after_s))))
        if error.status in (408, 413, 415):
            headers.append((b"connection", b"close"))
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await self.respond(error.body(), status=error.status, headers=headers)

    def event_stream(self, on_cut: Callable[[], None]) -> EventStream:
        """A response of events; not begun until `open`."""
        if self.scope["http_version"] == "1.0":
            raise ApiError(400, "stream: needs HTTP/1.1", param="stream")
        return EventStream(self.transport, self._send, on_cut)

    @property
    def transport(self) -> asyncio.Transport:
        """The connection itself, for direct writes and for cutting it."""
        transport: asyncio.Transport = self.scope["extensions"][TRANSPORT]["transport"]
        return transport


def _expire(limit: asyncio.Timeout) -> None:
    if not limit.expired():
        limit.reschedule(0.0)  # of the loop's clock: long ago


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
