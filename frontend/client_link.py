"""One connection of a Python client to the ZMQ door: a socket and how long nothing came by it."""

import time
from typing import Any, Final

import zmq

from nvserve.protocol.client_messages import SILENCE_S, Hello, encode_client

RETRY_S: Final = 1.0  # for one Hello to be answered before the next
# Frames that wait to be sent: a wait for room would hide that the connection is lost. They go with
# the link, which is replaced after SILENCE_S of open requests without a message.
UNBOUNDED: Final = 0


class Silence:
    """Seconds for which a server has owed a message: it sends beats while a request is open.

    Time without an open request does not count. It does not start the count again either, since
    calls that give up early would then never find out about a silent server. Knows no clock.
    """

    def __init__(self, now_s: float) -> None:
        self.seconds = 0.0
        self._noted_s = now_s
        self._is_owed = False

    def hear(self, now_s: float) -> None:
        """A message has come."""
        self.seconds = 0.0
        self._noted_s = now_s

    def note(self, is_owed: bool, now_s: float) -> None:
        """Count up to now; from now on something is owed or not."""
        if self._is_owed:
            self.seconds += now_s - self._noted_s
        self._noted_s = now_s
        self._is_owed = is_owed


class Link:
    """One DEALER socket and its monitor, replaced as a whole when the connection is lost."""

    def __init__(self, context: "zmq.Context[Any]", endpoint: str, hello: Hello) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self.socket.setsockopt(zmq.SNDHWM, UNBOUNDED)
        self.socket.setsockopt(zmq.IPV6, "[" in endpoint)  # otherwise names are IPv4's
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._opened_s: Final = time.monotonic()
        self._silence: Final = Silence(self._opened_s)
        self.is_welcome = False
        self.hello = encode_client(hello)
        self.socket.connect(endpoint)

    def hear(self) -> None:
        """A message has come."""
        self._silence.hear(time.monotonic())

    def note(self, is_waiting: bool) -> None:
        """Told when requests begin and end: whether any is open now."""
        self._silence.note(is_waiting, time.monotonic())

    def is_lost(self, is_waiting: bool) -> bool:
        """Nothing came for too long: a greeting unanswered, or no beat for open requests."""
        self.note(is_waiting)
        if not self.is_welcome:
            return time.monotonic() - self._opened_s > RETRY_S
        return self._silence.seconds > SILENCE_S

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)
