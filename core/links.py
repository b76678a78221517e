"""The sockets of core: one pair to the frontend's life, one set to the workers of an epoch.

Opens, closes, decodes and counts; decides nothing about requests.
"""

from collections.abc import Iterator
from typing import Final, TypeVar

import zmq

from nvserve.core.step_ledger import Report
from nvserve.protocol import channel
from nvserve.protocol.channel import Inbox, Outbox
from nvserve.protocol.codec import BadFrame, Decoder, decode_from_worker, decode_to_core, encode
from nvserve.protocol.messages import (
    Abort,
    Finish,
    Hello,
    SchedulerOutput,
    Submit,
    ToFrontend,
)

# Read from one socket before the others get their turn.
MAX_FRAMES: Final = 512
MAX_BYTES: Final = 1 << 20

Context = zmq.Context[zmq.Socket[bytes]]
T = TypeVar("T")


class FrontendLink:
    """The way to and from the present life of the frontend."""

    def __init__(self, context: Context, launch_dir: str, core_life: int) -> None:
        self._context: Final = context
        self._launch_dir: Final = launch_dir
        self._core_life: Final = core_life
        self.life = -1
        self.is_connected = False  # its Hello has arrived
        self.inbox: Inbox | None = None
        self._outbox: Outbox | None = None
        self.is_drained = True  # the last reading left nothing behind
        self.num_dropped = 0  # malformed frames and those of other lives

    def connect(self, life: int) -> None:
        """Leave the life before, if any, and say Hello to this one."""
        self.close()
        self.life = life
        lives = (self._launch_dir, life, self._core_life)
        self.inbox = Inbox(self._context, channel.frontend_to_core(*lives))
        self._outbox = Outbox(self._context, channel.core_to_frontend(*lives))
        self._outbox.send(encode(Hello(self._core_life)))

    def close(self) -> None:
        self.is_connected = False
        if self.inbox is not None and self._outbox is not None:
            self.inbox.close()
            self._outbox.close()
        self.inbox = self._outbox = None

    def receive(self) -> Iterator[Submit | Abort | Finish]:
        """The messages that have arrived from the present life."""
        for message in _receive(self, self.inbox, decode_to_core):
            if isinstance(message, Hello):
                self.is_connected |= message.life == self.life
            elif (message.frontend_life, message.core_life) == (self.life, self._core_life):
                yield message
            else:
                self.num_dropped += 1

    def send(self, message: ToFrontend) -> bool:
        """Queue a message; False when it cannot be taken now."""
        return self._outbox is not None and self.is_connected and self._outbox.send(encode(message))


class WorkerLinks:
    """The way to and from the ranks of the present epoch."""

    def __init__(self, context: Context, launch_dir: str, core_life: int) -> None:
        self._context: Final = context
        self._launch_dir: Final = launch_dir
        self._core_life: Final = core_life
        self.epoch = -1
        self.inbox: Inbox | None = None
        self._outboxes: list[Outbox] = []
        self._absent: set[int] = set()  # ranks whose Hello has not arrived
        self.is_drained = True
        self.num_dropped = 0

    @property
    def is_connected(self) -> bool:
        return self.inbox is not None and not self._absent

    def connect(self, epoch: int, tp_size: int) -> None:
        """Leave the epoch before, if any, and say Hello to all ranks of this one."""
        self.close()
        self.epoch = epoch
        self._absent = set(range(tp_size))
        self.inbox = Inbox(self._context, channel.worker_to_core(self._launch_dir, epoch))
        hello = encode(Hello(self._core_life))
        for rank in range(tp_size):
            address = channel.core_to_worker(self._launch_dir, epoch, rank)
            self._outboxes.append(Outbox(self._context, address))
            self._outboxes[rank].send(hello)

    def close(self) -> None:
        if self.inbox is not None:
            self.inbox.close()
        for outbox in self._outboxes:
            outbox.close()
        self.inbox = None
        self._outboxes = []

    def receive(self) -> Iterator[Report]:
        """The reports that have arrived; a Hello is noted."""
        for message in _receive(self, self.inbox, decode_from_worker):
            if not isinstance(message, Hello):
                yield message
            elif message.life == self.epoch:
                self._absent.discard(message.rank)
            else:
                self.num_dropped += 1

    def send(self, step: SchedulerOutput) -> int | None:
        """Queue a step for every rank; the first rank that cannot take it, None when all did."""
        frame = encode(step)
        for rank, outbox in enumerate(self._outboxes):
            if not outbox.send(frame):
                return rank
        return None


def _receive(
    link: FrontendLink | WorkerLinks, inbox: Inbox | None, decode: Decoder[T]
) -> Iterator[T]:
    num_bytes = num_frames = 0
    link.is_drained = False
    while num_frames < MAX_FRAMES and num_bytes < MAX_BYTES:
        frame = inbox.receive() if inbox is not None else None
        if frame is None:
            link.is_drained = True
            return
        num_frames += 1
        num_bytes += len(frame)
        try:
            message = decode(frame)
        except BadFrame:
            link.num_dropped += 1
            continue
        yield message
