"""A guard around what one thread at a time may use, such as a ZeroMQ socket."""

import threading
from types import TracebackType
from typing import Final


class OneThread:
    """Held while in use, by one thread as often as it likes; RuntimeError for a second one.

    Two threads at one ZeroMQ socket would abort the whole process.
    """

    def __init__(self, name: str) -> None:
        self._name: Final = name
        self._lock: Final = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(f"another thread is using {self._name}; give each one its own")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._lock.release()
