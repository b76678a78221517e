"""A guard around what one thread at a time may use, such as a ZeroMQ socket."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final


class OneThread:
    """Held while in use, by one thread as often as it likes; RuntimeError for a second one.

    Two threads at one ZeroMQ socket would abort the whole process, and so might a signal handler
    that closes a socket under the wait it interrupted.
    """

    def __init__(self, name: str) -> None:
        self._name: Final = name
        self._lock: Final = threading.RLock()
        self._depth = 0  # uses within each other
        self._last_actions: Final[list[Callable[[], None]]] = []

    @contextmanager
    def within(self, limit_s: float) -> Iterator[None]:
        """The same, once another thread's use has ended; RuntimeError when it does not in time."""
        self._enter(limit_s)
        try:
            yield
        finally:
            self._leave()

    def at_end(self, action: Callable[[], None]) -> None:
        """Run it as the outermost use ends; called within a use."""
        self._last_actions.append(action)

    def __enter__(self) -> None:
        self._enter(0.0)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._leave()

    def _enter(self, limit_s: float) -> None:
        if not self._lock.acquire(timeout=limit_s):
            raise RuntimeError(f"another thread is using {self._name}; give each one its own")
        self._depth += 1

    def _leave(self) -> None:
        try:
            while self._depth == 1 and self._last_actions:
                self._last_actions.pop(0)()
        finally:
            self._depth -= 1
            self._lock.release()
