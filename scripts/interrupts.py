"""Ctrl-C as a KeyboardInterrupt where a command can take one, and never lost.

Python looks for signals between its instructions and when a system call is interrupted. One that
comes right before a call that blocks is noticed at its end: at a prompt with the next line, in a
stream with the next token. So a timer interrupts whatever blocks the main thread, again and again.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

NOTICE_S: Final = 0.2  # the longest that a Ctrl-C goes unnoticed


class Interrupts:
    """What becomes of each Ctrl-C: it is raised inside `raised`, at its beginning if need be."""

    def __init__(self) -> None:
        self._is_raised = False
        self._is_pending = False

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Inside, or already at the end or the beginning, one KeyboardInterrupt may be raised."""
        self._is_raised = True
        try:
            if self._is_pending:
                self._is_pending = False
                raise KeyboardInterrupt
            yield
        finally:
            self._is_raised = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler."""
        if not self._is_raised:
            self._is_pending = True
            return
        self._is_raised = False  # what puts things away is not disturbed
        raise KeyboardInterrupt


@contextmanager
def watched() -> Iterator[Interrupts]:
    """Inside, Ctrl-C is handled by what this gives; not where the parent has it ignored."""
    interrupts = Interrupts()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield interrupts
        return
    alarm = signal.signal(signal.SIGALRM, _notice)
    timer = signal.setitimer(signal.ITIMER_REAL, NOTICE_S, NOTICE_S)
    signal.signal(signal.SIGINT, interrupts.note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        signal.setitimer(signal.ITIMER_REAL, *timer)


@contextmanager
def raised_once() -> Iterator[None]:
    """Inside, the first Ctrl-C is a KeyboardInterrupt, and later ones change nothing."""
    with watched() as interrupts, interrupts.raised():
        yield


def _notice(number: int, frame: FrameType | None) -> None:
    """The call was interrupted, which is all."""
