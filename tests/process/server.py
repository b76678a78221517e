"""Starts launchers for tests, reads what they print, and proves that nothing is left of them.

Every launcher gets a TMPDIR of its own, which is how its launch directory, its control socket and
so the pids of its children are found.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TextIO, TypeVar

from nvserve.scripts.control_socket import ask

ROOT = Path(__file__).parents[2]
READY = re.compile(r"^nvserve is ready: (\S+)$", re.MULTILINE)
PATIENT = ("--port", "0", "--hang-timeout", "60")  # a loaded machine is no hang
START_LIMIT_S = 120.0  # the suite may share its cores
EVENT_LIMIT_S = 60.0  # for whatever surely comes: what has happened costs nobody this time
# "Within 3 s" is promised of a machine that is not full; what is never gone outlasts any limit.
GONE_LIMIT_S = 15.0
POLL_S = 0.02

T = TypeVar("T")


def wait_for(what: str, probe: Callable[[], T | None], limit_s: float = EVENT_LIMIT_S) -> T:
    """The first true value of `probe`; fails, naming `what`, when none came in time."""
    deadline = time.monotonic() + limit_s
    while True:
        value = probe()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what}: not within {limit_s:g} s"
        time.sleep(POLL_S)


def environment(**extra: str) -> dict[str, str]:
    """For a process that shall import nvserve from this checkout."""
    return os.environ | {
        "PYTHONPATH": f"{ROOT / '.src'}:{ROOT / 'tests'}",
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
        **extra,
    }


class Server:
    """One launcher process and its output so far."""

    def __init__(self, command: list[str], **variables: str) -> None:
        self.tmpdir = Path(tempfile.mkdtemp(prefix="nt"))
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**({"TMPDIR": str(self.tmpdir)} | variables)),
        )
        self.out: list[str] = []
        self.err: list[str] = []
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._readers = [
            threading.Thread(target=_read_lines, args=[self.process.stdout, self.out], daemon=True),
            threading.Thread(target=_read_lines, args=[self.process.stderr, self.err], daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self._seen: set[int] = set()

    @classmethod
    def launch(cls, *flags: str, **variables: str) -> Self:
        """`nvserve launch` with these flags; a free port and much patience unless they say more."""
        return cls(["-m", "nvserve", "launch", *PATIENT, *flags], **variables)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def text(self) -> str:
        """Everything on standard error so far."""
        return "".join(self.err)

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> str:
        """The server's URL, once it says that it is ready."""

        def probe() -> str | None:
            found = READY.search("".join(self.out))
            assert found or self.process.poll() is None, f"ended before ready:\n{self.text}"
            return found and found.group(1)

        return wait_for("ready", probe, limit_s)

    def wait_text(self, pattern: str, limit_s: float = EVENT_LIMIT_S) -> re.Match[str]:
        """Wait until standard error holds this."""
        return wait_for(repr(pattern), lambda: re.search(pattern, self.text), limit_s)

    def status(self) -> dict[str, Any]:
        """The launcher's own account; fails when it does not answer."""
        [directory] = self.tmpdir.glob("nvserve-*")
        status = ask(directory, {"command": "status"}, EVENT_LIMIT_S)
        self._seen.update(process["pid"] for process in status["processes"])
        return status

    def pids(self) -> dict[str, int]:
        """Child pids by name."""
        return {process["name"]: process["pid"] for process in self.status()["processes"]}

    def wait_status(self, what: str, probe: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first status for which `probe` holds; a new worker may have to start for it."""

        def look() -> dict[str, Any] | None:
            status = self.status()
            return status if probe(status) else None

        return wait_for(what, look, START_LIMIT_S)

    def wait_epoch(self, epoch: int) -> dict[str, Any]:
        """Serving in this epoch."""
        return self.wait_status(
            f"epoch {epoch}", lambda status: (status["state"], status["epoch"]) == ("ready", epoch)
        )

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_exit(self, limit_s: float = EVENT_LIMIT_S) -> int:
        """Its exit status, once it and all children ever seen are gone."""
        code = self.process.wait(limit_s)
        self._finish_reading()
        self.wait_gone()
        return code

    def wait_gone(self, limit_s: float = GONE_LIMIT_S) -> None:
        """No child ever seen still runs."""
        wait_for("children gone", lambda: not any(map(is_running, self._seen)), limit_s)

    def _finish_reading(self) -> None:
        for reader in self._readers:
            reader.join(GONE_LIMIT_S)
            assert not reader.is_alive(), "somebody still holds the launcher's output"

    def close(self) -> None:
        """Whatever the test did: nothing stays behind."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(GONE_LIMIT_S)
        try:
            self._finish_reading()
            self.wait_gone()
        finally:
            shutil.rmtree(self.tmpdir, ignore_errors=True)


def _read_lines(stream: TextIO, lines: list[str]) -> None:
    with stream:
        for line in stream:
            lines.append(line)


def is_running(pid: int) -> bool:
    """A zombie that waits for its reaper has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b") ")[2][:1] != b"Z"


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()


@contextmanager
def served(server: Server) -> Iterator[Server]:
    """Close the server at the end of a test."""
    try:
        yield server
    finally:
        server.close()
