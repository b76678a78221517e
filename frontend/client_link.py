"""One connection of a Python client to the ZMQ door: a socket and when it last was heard."""

import time
from typing import Any, Final

import zmq

from nvserve.protocol.client_messages import SILENCE_S, Hello, encode_client

RETRY_S: Final = 1.0  # for one Hello to be answered before the next
SEND_LIMIT_MS: Final = 5000


class Link:
    """One DEALER socket and its monitor, replaced as a whole when the connection is lost."""

    def __init__(self, context: "zmq.Context[Any]", endpoint: str, hello: Hello) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self.socket.setsockopt(zmq.SNDTIMEO, SEND_LIMIT_MS)
        self.socket.setsockopt(zmq.IPV6, "[" in endpoint)  # otherwise names are IPv4's
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.opened = self.heard = time.monotonic()
        self.is_welcome = False
        self.hello = encode_client(hello)
        self.socket.connect(endpoint)

    def is_lost(self, is_waiting: bool) -> bool:
        """Nothing came for too long: a greeting unanswered, or no beat for open requests."""
        silent_s = time.monotonic() - self.heard
        if not self.is_welcome:
            return silent_s > RETRY_S
        return is_waiting and silent_s > SILENCE_S

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)
