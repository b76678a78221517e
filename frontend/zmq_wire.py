"""TCP connections of the ZMQ door: each one's bytes in and out, and a bound on everything it holds.

Whoever has not been welcomed gets little room and little time. A connection that sends more than is
taken is not read meanwhile; one that does not answer heartbeats, or does not read, is closed. Knows
frames; what they mean is the door's affair.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

from nvserve.frontend.zmtp import (
    GREETING,
    Incoming,
    Reply,
    WireError,
    encode_frame,
    encode_ping,
)
from nvserve.protocol.client_messages import MAX_CLIENT_FRAME_BYTES
from nvserve.protocol.descriptors import most_clients

logger = logging.getLogger(__name__)

MAX_WIRES: Final = 4096  # connections, welcomed or not
SHARE: Final = 0.25  # of the connections that the process has room for; the rest is HTTP's
MAX_STRANGER_BYTES: Final = 16 << 10  # of a frame, and unsent, before the welcome
STRANGER_LIMIT_S: Final = 30.0  # to be welcomed
MAX_ALL_UNREAD_BYTES: Final = 256 << 20  # of frames not whole yet; beyond it the largest goes
# Unsent, of one connection, beyond what the kernel takes: some seconds of a whole batch, as an
# offline client with hundreds of streams needs while it looks elsewhere.
MAX_UNSENT_BYTES: Final = 32 << 20
MAX_ALL_UNSENT_BYTES: Final = 256 << 20  # of all; beyond it the connection with most is closed
MAX_FRAMES_AT_ONCE: Final = 64  # of one connection, before other callbacks get their turn
HEARTBEAT_S: Final = 2.0
MAX_SILENT_BEATS: Final = 2  # heartbeats without an answer: a dead machine, or a stopped process
COPIED_BYTES: Final = 64 << 10  # a smaller frame is joined with its header
BACKLOG: Final = 1024  # connections that the kernel accepts before we do


class Wire(asyncio.Protocol):
    """One connection. Closing it drops what is unsent; the listener's `lose` follows."""

    _transport: asyncio.Transport
    _timer: asyncio.TimerHandle

    def __init__(self, listener: "Listener") -> None:
        self._listener: Final = listener
        self._incoming: Final = Incoming(MAX_STRANGER_BYTES)
        self._max_unsent_bytes = MAX_STRANGER_BYTES
        self._is_held = False  # nothing is taken until the owner says so
        self._is_due = False  # `_work` is going to run
        self._num_silent_beats = 0

    # -- the owner's calls -----------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self._transport.is_closing()

    @property
    def num_unread_bytes(self) -> int:
        """Received, and not a whole frame yet or not taken."""
        return len(self._incoming)

    @property
    def num_unsent_bytes(self) -> int:
        return 0 if self.is_closed else self._transport.get_write_buffer_size()

    def welcome(self) -> None:
        """The peer has said who it is: it gets its time and room."""
        self._timer.cancel()
        self._incoming.max_frame_bytes = MAX_CLIENT_FRAME_BYTES
        self._max_unsent_bytes = MAX_UNSENT_BYTES

    def send(self, frame: bytes) -> None:
        """Send a message; a peer that leaves too much unread is closed instead."""
        if self.is_closed:
            return
        header, body = encode_frame(frame)
        if len(body) <= COPIED_BYTES:
            self._write(header + body)
        else:
            self._write(header)
            self._write(body)

    def hold(self) -> None:
        """Take no further message until `go_on`; what comes waits in the kernel."""
        self._is_held = True
        self._transport.pause_reading()

    def go_on(self) -> None:
        """Take messages again."""
        self._is_held = False
        self._work_soon()

    def close(self) -> None:
        self._transport.abort()
        self._incoming.clear()

    def cut(self) -> None:
        """Close a connection that holds too much."""
        logger.info("a ZMQ client sends or leaves unread too much: its requests are aborted")
        self.close()

    def beat(self) -> None:
        """Find out whether the peer is there; not while it waits for us, or we for it."""
        if not self._incoming.is_ready or self._is_held or self._is_due or self.is_closed:
            return
        if self._num_silent_beats >= MAX_SILENT_BEATS:
            logger.info("a ZMQ client does not answer: its requests are aborted")
            self.close()
        elif not self.num_unsent_bytes:
            self._num_silent_beats += 1
            self._write(encode_ping())

    # -- the event loop's calls ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # a TCP connection's
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(STRANGER_LIMIT_S, self.close)
        if self._listener.enter(self):
            transport.write(GREETING)
        else:
            self.close()

    def data_received(self, data: bytes) -> None:
        if self.is_closed:
            return
        self._num_silent_beats = 0
        self._incoming.feed(data)
        if not self._is_due and not self._is_held:
            self._work()
        self._listener.unread.add(len(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._incoming.clear()
        self._listener.leave(self)

    # -- inside ----------------------------------------------------------------------------------

    def _work(self) -> None:
        """Take what has come, some of it now and the rest later."""
        self._is_due = False
        try:
            self._take_some()
        except WireError as error:
            logger.debug("closed a ZMQ connection: %s", error)
            self.close()

    def _take_some(self) -> None:
        for _ in range(MAX_FRAMES_AT_ONCE):
            if self._is_held or self.is_closed:
                return
            found = self._incoming.next()
            if found is None:
                self._transport.resume_reading()
                return
            if isinstance(found, Reply):
                self._write(found.raw)
            else:
                self._listener.take(self, found.body)
        self._work_soon()

    def _work_soon(self) -> None:
        if not self._is_due and not self.is_closed:
            self._is_due = True
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._work)

    def _write(self, raw: bytes) -> None:
        self._transport.write(raw)
        if self._transport.get_write_buffer_size() > self._max_unsent_bytes:
            self.cut()
        self._listener.unsent.add(len(raw))


class Bound:
    """A limit on what all connections hold together, added up only when it may be reached."""

    def __init__(self, max_bytes: int, wires: set[Wire], size_of: Callable[[Wire], int]) -> None:
        self._max_bytes: Final = max_bytes
        self._wires: Final = wires
        self._size_of: Final = size_of
        self._at_most = 0

    def add(self, num_bytes: int) -> None:
        """Somebody holds this much more; beyond the limit the one that holds most is closed."""
        self._at_most += num_bytes
        if self._at_most <= self._max_bytes:
            return
        self._at_most = sum(map(self._size_of, self._wires))
        if self._at_most > self._max_bytes:
            max(self._wires, key=self._size_of).cut()


class Listener:
    """The listening socket and its connections.

    `take` gets each message, None for one of several frames; `lose` each connection that is gone.
    """

    def __init__(
        self, take: Callable[[Wire, bytes | None], None], lose: Callable[[Wire], None]
    ) -> None:
        self.take: Final = take
        self._lose: Final = lose
        self._wires: Final[set[Wire]] = set()
        self.unread: Final = Bound(
            MAX_ALL_UNREAD_BYTES, self._wires, lambda wire: wire.num_unread_bytes
        )
        self.unsent: Final = Bound(
            MAX_ALL_UNSENT_BYTES, self._wires, lambda wire: wire.num_unsent_bytes
        )
        self._server: asyncio.Server | None = None

    async def open(self, endpoint: str) -> str:
        """Listen at tcp://host:port, where `*` is any; the address with its real port. OSError."""
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        is_ipv6 = host.startswith("[")
        listening = socket.create_server(
            ("" if host == "*" else host.strip("[]"), 0 if port == "*" else int(port)),
            family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
        )
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Wire(self), sock=listening, backlog=BACKLOG)
        loop.call_later(HEARTBEAT_S, self._beat)
        address, number = listening.getsockname()[:2]
        return f"tcp://[{address}]:{number}" if is_ipv6 else f"tcp://{address}:{number}"

    def close(self) -> None:
        """Stop listening, and close every connection."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for wire in list(self._wires):
            wire.close()

    def enter(self, wire: Wire) -> bool:
        """A new connection; False when there are too many."""
        most = min(MAX_WIRES, most_clients(SHARE))
        if len(self._wires) >= most or self._server is None:
            return False
        self._wires.add(wire)
        return True

    def leave(self, wire: Wire) -> None:
        """It is gone."""
        if wire in self._wires:
            self._wires.remove(wire)
            self._lose(wire)

    def _beat(self) -> None:
        if self._server is None:
            return
        for wire in list(self._wires):
            wire.beat()
        asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)
