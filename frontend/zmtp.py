"""The bytes of ZMTP 3 as a server speaks it: what libzmq's sockets say on a TCP connection.

    greeting (64 bytes) | READY command | frames and commands, both directions alike

A libzmq socket bounds each frame of a message but not their number, and holds all of them until the
last has come, so that whoever can connect can fill the memory. Here frames come one by one and none
of a message of several is kept. Only the NULL mechanism. Pure: bytes in, frames out.
"""

import struct
from typing import Final, NamedTuple

_VERSION_AT: Final = 10  # in the greeting, behind its signature
_MECHANISM_AT: Final = 12
_GREETING_BYTES: Final = 64
_MECHANISM: Final = b"NULL".ljust(20, b"\0")
GREETING: Final = (b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + _MECHANISM).ljust(
    _GREETING_BYTES, b"\0"
)

_MORE, _LONG, _COMMAND = 1, 2, 4  # flags of a frame
_LENGTH: Final = struct.Struct(">Q")
_PING, _PONG, _READY = b"\x04PING", b"\x04PONG", b"\x05READY"
_TTL_BYTES: Final = 2  # of a PING, before what its PONG repeats
_MAX_CONTEXT: Final = 16  # bytes of that
_CLIENTS: Final = frozenset({b"DEALER", b"REQ", b"ROUTER"})  # the types that may meet a ROUTER


class WireError(ValueError):
    """The peer speaks something else, or more than is allowed: the connection cannot go on."""


class Frame(NamedTuple):
    """One message, whole; `body` is None for one of several frames, which were not kept."""

    body: bytes | None


class Reply(NamedTuple):
    """Bytes that the peer must get for what it said."""

    raw: bytes


def encode_frame(body: bytes) -> tuple[bytes, bytes]:
    """A message of one frame, as header and body."""
    return _header(0, len(body)), body


def encode_ping() -> bytes:
    """Asks for a PONG; a time to live of 0 leaves it to the peer when it gives us up."""
    return _command(_PING + bytes(_TTL_BYTES))


class Incoming:
    """What a peer sends, from its first byte on. After a WireError it is of no more use."""

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._buffer: Final = bytearray()
        self._is_greeted = False
        self._is_ready = False
        self._is_amid = False  # the message has more frames to come

    def __len__(self) -> int:
        """Bytes held."""
        return len(self._buffer)

    @property
    def is_ready(self) -> bool:
        """The handshake is over: messages may be sent."""
        return self._is_ready

    def feed(self, data: bytes) -> None:
        self._buffer.extend(data)

    def clear(self) -> None:
        """Forget what is held."""
        self._buffer.clear()

    def next(self) -> Frame | Reply | None:
        """The next thing in what was fed; None when that is not whole yet."""
        if not self._is_greeted:
            return self._take_greeting()
        while (taken := self._take_frame()) is not None:
            flags, body = taken
            if flags & _COMMAND:
                reply = self._obey(body)
                if reply is not None:
                    return reply
            elif not self._is_ready:
                raise WireError("a message before READY")
            elif flags & _MORE:
                self._is_amid = True
            elif self._is_amid:
                self._is_amid = False
                return Frame(None)
            else:
                return Frame(body)
        return None

    def _take_greeting(self) -> Reply | None:
        head = bytes(self._buffer[:_GREETING_BYTES])
        if head[:1] not in (b"", b"\xff") or head[9:10] not in (b"", b"\x7f"):
            raise WireError("no ZMTP")
        if head[_VERSION_AT : _VERSION_AT + 1] not in (b"", b"\x03"):
            raise WireError(f"ZMTP {head[_VERSION_AT]}, not 3")
        if len(head) < _GREETING_BYTES:
            return None
        if head[_MECHANISM_AT : _MECHANISM_AT + len(_MECHANISM)] != _MECHANISM:
            raise WireError("a mechanism other than NULL")
        del self._buffer[:_GREETING_BYTES]
        self._is_greeted = True
        return Reply(_command(_READY + _property(b"Socket-Type", b"ROUTER")))

    def _take_frame(self) -> tuple[int, bytes] | None:
        """Flags and body; a frame over the limit is found by its header."""
        buffer = self._buffer
        if not buffer:
            return None
        flags = buffer[0]
        if flags & ~(_MORE | _LONG | _COMMAND) or flags & (_MORE | _COMMAND) == _MORE | _COMMAND:
            raise WireError(f"a frame with flags {flags:#x}")
        start = 1 + (_LENGTH.size if flags & _LONG else 1)
        if len(buffer) < start:
            return None
        num_bytes: int = _LENGTH.unpack_from(buffer, 1)[0] if flags & _LONG else buffer[1]
        if num_bytes > self.max_frame_bytes:
            raise WireError(f"a frame of {num_bytes} bytes, at most {self.max_frame_bytes}")
        end = start + num_bytes
        if len(buffer) < end:
            return None
        with memoryview(buffer) as view:
            body = bytes(view[start:end])
        del buffer[:end]
        return flags, body

    def _obey(self, body: bytes) -> Reply | None:
        if not self._is_ready:
            if not body.startswith(_READY):
                raise WireError("a command before READY")
            if _socket_type(body[len(_READY) :]) not in _CLIENTS:
                raise WireError("a socket of a type that does not fit")
            self._is_ready = True
        elif body.startswith(_PING):
            context = body[len(_PING) + _TTL_BYTES :][:_MAX_CONTEXT]
            return Reply(_command(_PONG + context))
        return None  # a PONG, or a command of a later version


def _header(flags: int, num_bytes: int) -> bytes:
    if num_bytes < 256:
        return bytes((flags, num_bytes))
    return bytes((flags | _LONG,)) + _LENGTH.pack(num_bytes)


def _command(body: bytes) -> bytes:
    return _header(_COMMAND, len(body)) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


def _socket_type(properties: bytes) -> bytes:
    """From a READY's properties; empty when they are malformed or do not name it."""
    while properties:
        end = 1 + properties[0]
        name, size = properties[1:end], properties[end : end + 4]
        value_at = end + 4
        value_end = value_at + int.from_bytes(size, "big")
        if len(size) < 4 or value_end > len(properties):
            return b""
        if name.lower() == b"socket-type":
            return properties[value_at:value_end]
        properties = properties[value_end:]
    return b""
