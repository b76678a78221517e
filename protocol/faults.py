"""Injected faults: the points where a process of a launch with --enable-faults can be made to fail.

Without the flag nothing here is called and nothing of the process is changed. With it, `install`
puts one hook around every sent frame and every beat; workers add theirs around the engine. Each
point asks `find` whether an armed fault fits; `strike` does what the fault says.
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from nvserve.protocol.channel import Outbox
from nvserve.protocol.control import FaultKind, Inject
from nvserve.protocol.messages import SchedulerOutput, Submit, unpack_ids
from nvserve.protocol.progress import Phase, ProgressPage

logger = logging.getLogger(__name__)

SEND: Final = "send"  # the points, in Inject.phase
LAUNCH: Final = "launch"  # of a step, in a worker
BEGIN: Final = "begin"  # of an epoch, in a worker
MESSAGE_KINDS: Final = frozenset(
    {FaultKind.DROP, FaultKind.DELAY, FaultKind.DUPLICATE, FaultKind.CORRUPT}
)
PROMPT_MESSAGES: Final = (Submit.__name__, SchedulerOutput.__name__)  # that carry prompt ids


class InjectedFault(RuntimeError):
    """The exception that `nvserve fault exception` asked for."""


class Faults:
    """The faults armed in this process, each until it has struck `count` times."""

    def __init__(self) -> None:
        self._armed: Final[list[tuple[Inject, int]]] = []  # with the strikes left
        self._late: list[tuple[float, Outbox, bytes]] = []  # frames held back until a time

    def arm(self, fault: Inject) -> None:
        logger.warning("armed: %s", fault)
        self._armed.append((fault, fault.count))

    def find(
        self, point: str, *, step: int = -1, message: str = "", tokens: Sequence[int] = ()
    ) -> Inject | None:
        """The first armed fault that fits here; finding it uses up one of its strikes."""
        for index, (fault, left) in enumerate(self._armed):
            if not _fits(fault, point, step=step, message=message, tokens=tokens):
                continue
            if left > 1:
                self._armed[index] = (fault, left - 1)
            else:
                del self._armed[index]
            logger.warning("striking in step %d, %s %s: %s", step, point, message, fault)
            return fault
        return None

    def send(self, outbox: Outbox, frame: bytes, send: Callable[[Outbox, bytes], bool]) -> bool:
        """Send a frame as the armed faults will have it."""
        self.send_late(send)
        if not self._armed:
            return send(outbox, frame)
        name, tokens = _read(frame)
        fault = self.find(SEND, message=name, tokens=tokens)
        match fault.kind if fault is not None else None:
            case None:
                return send(outbox, frame)
            case FaultKind.DROP:
                return True
            case FaultKind.DUPLICATE:
                return send(outbox, frame) and (send(outbox, frame) or True)
            case FaultKind.CORRUPT:
                assert fault is not None
                return send(outbox, _break(frame, fault.seed))
            case FaultKind.DELAY:
                assert fault is not None
                self._late.append((time.monotonic() + fault.seconds, outbox, frame))
                return True
            case _:
                assert fault is not None
                strike(fault)
                return send(outbox, frame)

    def send_late(self, send: Callable[[Outbox, bytes], bool]) -> None:
        """Send what was held back long enough, unless its socket is gone."""
        if not self._late:
            return
        now = time.monotonic()
        due = [entry for entry in self._late if entry[0] <= now]
        self._late = [entry for entry in self._late if entry[0] > now]
        for _, outbox, frame in due:
            if not outbox.socket.closed:
                send(outbox, frame)


def install() -> Faults:
    """Put the hooks of this process in; called once, and only with --enable-faults."""
    faults = Faults()
    plain_send, plain_beat = Outbox.send, ProgressPage.beat

    def send(outbox: Outbox, frame: bytes) -> bool:
        return faults.send(outbox, frame, plain_send)

    def beat(page: ProgressPage, phase: Phase | None = None) -> None:
        plain_beat(page, phase)
        faults.send_late(plain_send)

    # On the classes themselves, so that it costs nothing without the flag.
    Outbox.send = send  # type: ignore[assignment, method-assign]
    ProgressPage.beat = beat  # type: ignore[assignment, method-assign]
    return faults


def strike(fault: Inject) -> None:
    """Do to this process, or raise, what the fault says.

    Message faults are done where the message is sent, NaN and wrong shapes where the step is run.
    """
    match fault.kind:
        case FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case FaultKind.CRASH:
            os.abort()
        case FaultKind.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case FaultKind.SLOW:
            time.sleep(fault.seconds)  # without a beat, as a process that is busy elsewhere
        case FaultKind.OOM:
            raise MemoryError("injected: out of memory")
        case kind:
            raise InjectedFault(f"injected: {kind.value}")


def _fits(fault: Inject, point: str, *, step: int, message: str, tokens: Sequence[int]) -> bool:
    wanted = SEND if fault.kind in MESSAGE_KINDS else fault.phase
    if wanted != point or (fault.token >= 0 and fault.token not in tokens):
        return False
    if point == SEND:
        return fault.message in ("", message)
    return fault.step <= step


def _read(frame: bytes) -> tuple[str, Sequence[int]]:
    """The name of the message in a frame, and the prompt ids that it carries."""
    fields = msgspec.msgpack.decode(frame)
    name: str = fields[0]
    if name == Submit.__name__:
        return name, unpack_ids(msgspec.convert(fields, Submit).prompt)
    if name == SchedulerOutput.__name__:
        chunks = msgspec.msgpack.decode(frame, type=SchedulerOutput).chunks
        return name, () if chunks is None else unpack_ids(chunks.tokens)
    return name, ()


def _break(frame: bytes, seed: int) -> bytes:
    """The frame cut short, its first byte no array any more: no receiver can read it."""
    end = 1 + seed % max(1, len(frame) - 1)
    return bytes([0xC1]) + frame[1:end]  # 0xC1 is the one byte msgpack never uses
