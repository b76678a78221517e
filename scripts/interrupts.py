"""Ctrl-C as a KeyboardInterrupt where a command can take one."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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
    signal.signal(signal.SIGINT, interrupts.note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def raised_once() -> Iterator[None]:
    """Inside, the first Ctrl-C is a KeyboardInterrupt, and later ones change nothing."""
    with watched() as interrupts, interrupts.raised():
        yield
