"""`nvserve launch` as a child of a Python program: started, awaited, stopped, and never left over.

The kernel kills the launcher when the thread that started it ends (and its children with it), so a
keeper thread starts it, reads what it prints, and lives as long as it does.
"""

import enum
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from nvserve.scripts import python_child
from nvserve.scripts.children import API_KEY_VARIABLE

READY_LINE: Final = re.compile(r"nvserve is ready: (\S+)$")
ZMQ_LINE: Final = re.compile(r"  ZMQ clients: (\S+)$")  # the last line of a start
ACCOUNTS: Final = ("nvserve: ", "Error: ")  # how the launcher's own account of its end begins
STOP_LIMIT_S: Final = 10.0  # for an orderly end; then SIGKILL
DEAD_LIMIT_S: Final = 5.0  # after SIGKILL
MAX_TAIL: Final = 60  # lines kept for an error's text


class LaunchFailed(RuntimeError):
    """The engine did not start, or has ended; the message holds its own last words."""


@dataclass(slots=True)
class Announcement:
    """What a launch says once it is ready."""

    url: str = ""
    zmq_endpoint: str = ""
    details: list[str] = field(default_factory=list)
    start_s: float = 0.0  # from starting the command to its ready line


class Words(enum.Enum):
    """Where the lines go that the launcher writes to its standard error."""

    KEPT = "kept"  # the last ones, for `last_words`
    COPIED = "copied"  # kept, and written to this program's standard error too
    SHOWN = "shown"  # straight to this program's standard error, a terminal's bar among them


class EmbeddedLaunch:
    """One launcher process on a free loopback port; with an API key, also a ZMQ door on another."""

    def __init__(self, flags: list[str], *, api_key: str = "", words: Words = Words.KEPT) -> None:
        self.announcement: Final = Announcement()
        self._flags: Final = flags
        self._api_key: Final = api_key
        self._words: Final = words
        self._tail: Final[deque[str]] = deque(maxlen=MAX_TAIL)
        self._process: subprocess.Popen[str] | None = None
        self._failure: OSError | None = None
        self._is_ready = False
        self._has_begun: Final = threading.Event()  # the process is there, or the failure
        self._is_ready_or_over: Final = threading.Event()
        self._keeper: Final = threading.Thread(
            target=self._keep, name="nvserve launch", daemon=True
        )
        self._begun_s: Final = time.monotonic()
        self._keeper.start()

    @property
    def is_running(self) -> bool:
        return self._keeper.is_alive()

    @property
    def exit_code(self) -> int | None:
        """The launcher's exit status once it has ended."""
        return self._process.poll() if self._process is not None else None

    def wait_ready(self, limit_s: float) -> Announcement:
        """Until the server is ready; LaunchFailed when it ends before, or is too late."""
        if not self._is_ready_or_over.wait(limit_s):
            self.stop()
            raise LaunchFailed(f"not ready within {limit_s:g} s\n{self.last_words()}")
        if not self._is_ready:
            self._keeper.join(DEAD_LIMIT_S)
            raise LaunchFailed(self.last_words())
        return self.announcement

    def last_words(self) -> str:
        """Its own account of its end, or its last lines if it has given none."""
        if self._failure is not None:
            return f"cannot start Python: {self._failure}"
        code = self.exit_code
        ending = "" if code is None else f"nvserve launch ended with exit status {code}\n"
        lines = list(self._tail)
        accounts = [place for place, line in enumerate(lines) if line.startswith(ACCOUNTS)]
        return ending + "\n".join(lines[accounts[0] :] if accounts else lines)

    def stop(self) -> None:
        """End it and wait until it is gone; harmless when it is."""
        self._has_begun.wait(DEAD_LIMIT_S)
        process = self._process
        if process is None:
            return
        for number, limit_s in ((signal.SIGTERM, STOP_LIMIT_S), (signal.SIGKILL, DEAD_LIMIT_S)):
            if self._keeper.is_alive():
                process.send_signal(number)
                self._keeper.join(limit_s)

    def _keep(self) -> None:
        """The keeper thread: start, read to the end, reap."""
        try:
            process = self._process = self._start()
        except OSError as error:
            self._failure = error
            self._is_ready_or_over.set()
            return
        finally:
            self._has_begun.set()
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._hear(line.rstrip("\n"))
        process.wait()  # it has closed its output, so it is ending
        self._is_ready_or_over.set()

    def _start(self) -> "subprocess.Popen[str]":
        door = ["--zmq-port", "0"] if self._api_key else []
        ours = ["--port", "0", *door, "--parent-pid", str(os.getpid())]
        key = {API_KEY_VARIABLE: self._api_key} if self._api_key else {}
        return subprocess.Popen(
            python_child.command("-m", "nvserve", "launch", *ours, *self._flags),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            # With one pipe for both the lines keep their order.
            stderr=None if self._words is Words.SHOWN else subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,  # a terminal's Ctrl-C is for the program alone
            env=python_child.environment() | key,
        )

    def _hear(self, line: str) -> None:
        self._tail.append(line)
        if self._words is Words.COPIED:
            print(line, file=sys.stderr, flush=True)
        if self._is_ready:
            return
        told = self.announcement
        if ready := READY_LINE.match(line):
            told.url = ready.group(1)
            told.start_s = time.monotonic() - self._begun_s
        elif told.url:
            told.details.append(line)
        if door := ZMQ_LINE.match(line):
            told.zmq_endpoint = door.group(1)
        self._is_ready = bool(told.zmq_endpoint if self._api_key else told.url)
        if self._is_ready:
            self._is_ready_or_over.set()
