"""uvicorn's HTTP/1.1 protocol with the limits it lacks, and a server that leaves signals alone.

Adds: bounds on header bytes (431) and on connections (503), a time limit for headers (408), one for
readers that take nothing, errors in OpenAI's form, and the connection's transport in
scope["extensions"], so that a step's fan-out can write to it. Of a request that asks for another
protocol, as HTTP/2's clients do, only the wish is ignored: it has its body and its answer.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Final

import httptools
import uvicorn
from starlette.routing import Router
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from nvserve.frontend.errors import ApiError
from nvserve.protocol.descriptors import most_clients

TRANSPORT: Final = "nvserve.transport"
MAX_HEADER_BYTES: Final = 64 << 10  # of one request, names and values and the path
HEADER_LIMIT_S: Final = 15.0  # from the connection's start, or a request's first byte
KEEP_ALIVE_S: Final = 75
REST_LIMIT_S: Final = 60.0  # for the rest of a body that nobody reads
STALL_LIMIT_S: Final = 30.0  # for a reader to take what waits for it
SHARE: Final = 0.75  # of the connections that the process has room for; the rest is the ZMQ door's
PROBE_S: Final = 0.3  # between looks at a connection that is not read
ESTABLISHED: Final = b"\x01"  # the first byte of TCP_INFO while neither side has closed

_REASONS: Final = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}
_TOO_LARGE: Final = f"headers of more than {MAX_HEADER_BYTES} bytes"


class _HeadersTooLarge(Exception):
    """Ends the parser's work on this connection."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    _num_header_bytes = 0  # of the request being parsed
    _num_unparsed_bytes = 0  # received while its headers are incomplete
    _header_timer: asyncio.TimerHandle | None = None
    _rest_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _probe_timer: asyncio.TimerHandle | None = None
    _is_refused = False
    _has_ended_one = False  # a request, in the bytes that came last: they are not all of the next
    _running: RequestResponseCycle | None = None  # `cycle` is the last one, perhaps behind it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        super().connection_made(transport)
        self._arm_header_timer()
        if len(self.connections) > most_clients(SHARE):
            self._refuse(503, "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm_header_timer()
        self._disarm_rest_timer()
        super().connection_lost(exc)
        self._disarm_stall_timer()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        self._has_ended_one = False
        self._parse(data)
        if self._header_timer is not None:  # one header may be endless
            self._num_unparsed_bytes += 0 if self._has_ended_one else len(data)
            if self._num_unparsed_bytes > MAX_HEADER_BYTES:
                self._refuse(431, _TOO_LARGE)
        elif self._rest_timer is None and (self.cycle is None or self.cycle.response_complete):
            # Bytes behind an answer that begin no request; uvicorn's timer ended with them.
            self._rest_timer = self.loop.call_later(REST_LIMIT_S, self.transport.abort)

    def _parse(self, data: bytes) -> None:
        """Feed the parser, which stops behind the headers of a request with an Upgrade.

        That request is then parsed again without it (RFC 9110, 7.8), and what follows is its body.
        """
        pieces: list[bytes | memoryview] = [memoryview(data)]
        while pieces:
            piece = pieces.pop()
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._is_upgrade:
                    self._refuse(400, "this server opens no tunnels")
                    return
                head = self._head_without_upgrade()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
                pieces += [piece[upgrade.args[0] :], head]

    @property
    def _is_upgrade(self) -> bool:
        """Whether the request just parsed asks for another protocol on its connection."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _head_without_upgrade(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_header_bytes = self._num_unparsed_bytes = 0
        self._disarm_rest_timer()
        self._arm_header_timer()
        self.scope["extensions"] = {TRANSPORT: {"transport": self.transport}}

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_header_bytes(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count_header_bytes(len(name) + len(value))

    def on_headers_complete(self) -> None:
        if self._is_upgrade:
            return
        self._disarm_header_timer()
        super().on_headers_complete()
        if self.pipeline and self._probe_timer is None:  # uvicorn stops reading here
            self._probe()

    def on_message_complete(self) -> None:
        if not self._is_upgrade:
            self._has_ended_one = True
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._arm_stall_timer()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # closing would wait for its reader for ever
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._arm_stall_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._disarm_stall_timer()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn when the parser gives up."""
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse(431, _TOO_LARGE)
        else:
            self._refuse(400, msg)

    def _count_header_bytes(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES:
            raise _HeadersTooLarge

    # -- refusals below ASGI ---------------------------------------------------------------------

    def _refuse(self, status: int, message: str) -> None:
        """Answer and close; nothing more is read from this connection."""
        self._is_refused = True
        self._disarm_header_timer()
        if self.transport.is_closing():
            return
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering and not self.cycle.more_body:
            self.cycle.keep_alive = False  # a whole request before it gets its answer, the last one
            return
        if is_answering and self.cycle is self._running and not self.cycle.response_started:
            is_answering = False  # its body is at fault, and this is its answer
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not is_answering:  # otherwise these bytes would land inside another answer
            body = ApiError(status, message).body()
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%b" % (status, _REASONS[status], len(body), body)
            )
        self.transport.close()
        self._arm_stall_timer()

    def _probe(self) -> None:
        """Look for a hang-up that nobody would read while a request waits behind another."""
        self._probe_timer = None
        if self.transport.is_closing() or not self.pipeline:
            return
        connection: socket.socket = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) != ESTABLISHED:
            self.transport.abort()
        else:
            self._probe_timer = self.loop.call_later(PROBE_S, self._probe)

    def _arm_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_LIMIT_S, self._on_header_timeout)

    def _disarm_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _arm_stall_timer(self) -> None:
        """From now on its reader has a limited time; less waiting, or the end, lifts it."""
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(STALL_LIMIT_S, self.transport.abort)

    def _disarm_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _disarm_rest_timer(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _on_header_timeout(self) -> None:
        self._refuse(408, f"no complete request within {HEADER_LIMIT_S:g} s")


class Server(uvicorn.Server):
    """Serves an ASGI application on a socket that the launcher bound."""

    def __init__(self, app: Router) -> None:
        config = uvicorn.Config(
            app,
            interface="asgi3",
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=2048,
        )
        super().__init__(config)
        self.is_serving: Final = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the launcher's."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_serving.set()
