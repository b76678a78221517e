"""Standard output and standard error as the launcher writes to them: without ever waiting.

A terminal held with Ctrl-S, a reader that sleeps or has left and a full disk must not stop the
process that watches all others, so a thread of its own does the writing.
"""

import contextlib
import os
import queue
import select
import sys
import threading
from typing import Final

MAX_TEXTS: Final = 4096  # kept for a reader that does not read; later ones are lost
FAREWELL_S: Final = 1.0  # for what is left at the end


class Outlet:
    """Both streams in one order. What cannot be written is lost, and nobody is told."""

    def __init__(self, *, stdout_fd: int = 1, stderr_fd: int = 2) -> None:
        self._stdout_fd: Final = stdout_fd
        self._stderr_fd: Final = stderr_fd
        self._texts: Final[queue.Queue[tuple[int, bytes] | None]] = queue.Queue(MAX_TEXTS)
        self._is_closed = False
        self._writer: Final = threading.Thread(target=self._run, name="outlet", daemon=True)
        self._writer.start()

    def isatty(self) -> bool:
        return os.isatty(self._stderr_fd)

    def write(self, text: str) -> None:
        """To standard error."""
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        self._put((self._stderr_fd, text.encode(encoding, "backslashreplace")))

    def announce(self, line: str) -> None:
        """To standard output."""
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        self._put((self._stdout_fd, f"{line}\n".encode(encoding, "backslashreplace")))

    def close(self) -> bool:
        """Wait a little for what is left, and say whether all of it has been written.

        The writer ends once nothing is left, also after this has given up on it.
        """
        self._is_closed = True
        self._put(None)
        self._writer.join(FAREWELL_S)
        return not self._writer.is_alive()

    def _put(self, text: tuple[int, bytes] | None) -> None:
        with contextlib.suppress(queue.Full):
            self._texts.put_nowait(text)

    def _run(self) -> None:
        while (text := self._texts.get()) is not None:
            fd, rest = text
            with contextlib.suppress(OSError):  # its reader has left, or the disk is full
                while rest:
                    rest = rest[_write_some(fd, rest) :]
            if self._is_closed and self._texts.empty():  # a full queue had no place for the end
                return


def _write_some(fd: int, text: bytes) -> int:
    """How much of it was written, however long that took."""
    try:
        return os.write(fd, text)
    except BlockingIOError:  # whoever shares the descriptor has made it so
        select.select([], [fd], [])
        return 0
