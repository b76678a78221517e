"""The frontend's link to core: the two sockets of the present life of core, and who it may be.

Everything runs on the event loop and nothing here waits: a frame that core has no room for is kept
and retried. Knows lives; decides nothing about requests.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import zmq

from nvserve.protocol.channel import Inbox, Outbox, core_to_frontend, frontend_to_core
from nvserve.protocol.codec import BadFrame, decode_to_frontend, encode
from nvserve.protocol.messages import Hello, ToCore, ToFrontend

logger = logging.getLogger(__name__)

MAX_FRAMES_AT_ONCE: Final = 64  # read before other callbacks get their turn
RETRY_S: Final = 0.005  # between attempts to send what core had no room for


class CoreLink:
    """Messages to and from one life of core after another.

    `dispatch` gets its Hello, once, and every message of the present two lives. What is sent while
    there is no such life is dropped: the next one starts from the journal.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        launch_dir: str,
        life: int,
        dispatch: Callable[[ToFrontend], None],
    ) -> None:
        self.life: Final = life  # of this frontend
        self.core_life = -1
        self.is_connected = False  # core's Hello has arrived
        self.num_dropped = 0  # frames malformed or of an older life
        self.settled_s = 0.0  # UNIX seconds when nothing was unsent any more, inf until then
        self._context: Final = context
        self._launch_dir: Final = launch_dir
        self._dispatch: Final = dispatch
        self._inbox: Inbox | None = None
        self._inbox_fd = -1
        self._outbox: Outbox | None = None
        self._unsent: deque[bytes] = deque()
        self._retry: asyncio.TimerHandle | None = None

    @property
    def num_unsent(self) -> int:
        """Messages that core has no room for yet."""
        return len(self._unsent)

    # -- the sockets of a life -------------------------------------------------------------------

    def open(self, core_life: int) -> None:
        """Leave the life before, if any, and say Hello to this one."""
        self.close()
        self.core_life = core_life
        lives = (self._launch_dir, self.life, core_life)
        self._inbox = Inbox(self._context, core_to_frontend(*lives))
        self._outbox = Outbox(self._context, frontend_to_core(*lives))
        self.send(Hello(self.life))
        loop = asyncio.get_running_loop()
        self._inbox_fd = int(self._inbox.socket.getsockopt(zmq.FD))
        loop.add_reader(self._inbox_fd, self._drain)
        loop.call_soon(self._drain)

    def close(self) -> None:
        """Close the sockets and forget what was not sent; harmless when repeated."""
        self.is_connected = False
        self._unsent.clear()
        self.settled_s = 0.0
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._inbox is not None:
            asyncio.get_running_loop().remove_reader(self._inbox_fd)
            self._inbox.close()
            self._inbox = None
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None

    # -- out -------------------------------------------------------------------------------------

    def send(self, message: ToCore) -> None:
        """Queue a message behind those that wait already."""
        if self._outbox is None:
            return
        frame = encode(message)
        if self._unsent or not self._outbox.send(frame):
            self._unsent.append(frame)
            self.settled_s = math.inf
            self._retry_later()

    def _retry_later(self) -> None:
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._send_unsent)

    def _send_unsent(self) -> None:
        self._retry = None
        while self._unsent and self._outbox is not None:
            if not self._outbox.send(self._unsent[0]):
                self._retry_later()
                return
            self._unsent.popleft()
        self.settled_s = time.time()

    # -- in --------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Read what core sent. The descriptor signals edges: stop only when nothing is left."""
        for _ in range(MAX_FRAMES_AT_ONCE):
            frame = self._inbox.receive() if self._inbox is not None else None
            if frame is None:
                return
            try:
                message = decode_to_frontend(frame)
            except BadFrame as error:
                self.num_dropped += 1
                logger.error("dropped a frame of core: %s", error)
                continue
            if self._is_present(message):
                self._dispatch(message)
            else:
                self.num_dropped += 1
        asyncio.get_running_loop().call_soon(self._drain)

    def _is_present(self, message: ToFrontend) -> bool:
        """Whether a message is of these two lives; core's first Hello connects it."""
        if not isinstance(message, Hello):
            return (message.core_life, message.frontend_life) == (self.core_life, self.life)
        if message.life != self.core_life or self.is_connected:
            return False
        self.is_connected = True
        return True
