"""A client of the ZMQ door without our library: what it sends and when it goes is the test's."""

import time
from typing import Any, Self, TypeVar

import msgspec
import zmq

from nvserve.protocol.client_messages import (
    CLIENT_PROTOCOL,
    Beat,
    Emit,
    Hello,
    ToClient,
    ToServer,
    Welcome,
    decode_to_client,
    encode_client,
)
from nvserve.protocol.messages import unpack_ids

T = TypeVar("T")
LIMIT_S = 60.0


class Peer:
    """One DEALER socket; `linger` 0 makes it go without a word."""

    def __init__(self, endpoint: str, *, identity: bytes = b"", is_greeting: bool = True) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        if identity:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.connect(endpoint)
        if is_greeting:
            self.send(Hello(version=CLIENT_PROTOCOL))
            self.expect(Welcome)

    def send(self, message: ToServer) -> None:
        self.socket.send(encode_client(message))

    def send_fields(self, **fields: Any) -> None:
        """A message of any shape."""
        self.socket.send(msgspec.msgpack.encode(fields))

    def receive(self, limit_s: float = LIMIT_S) -> ToClient:
        """The next message that is no beat."""
        deadline = time.monotonic() + limit_s
        while True:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"nothing within {limit_s} s"
            if self.socket.poll(int(left_s * 1000) + 1):
                message = decode_to_client(self.socket.recv())
                if not isinstance(message, Beat):
                    return message

    def expect(self, kind: type[T], limit_s: float = LIMIT_S) -> T:
        message = self.receive(limit_s)
        assert isinstance(message, kind), message
        return message

    def output(self, request_id: int, last: type[T]) -> tuple[list[int], T]:
        """Ids of one request up to its last message; there must be no other open request."""
        ids: list[int] = []
        while not isinstance(message := self.receive(), last):
            assert getattr(message, "id", None) == request_id, message
            if isinstance(message, Emit):
                assert message.first == len(ids)
                ids += unpack_ids(message.tokens)
        return ids, message

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
