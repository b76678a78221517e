"""The private directory of one launch: made, found again and swept.

It holds sockets, progress pages and the group's file store. A lock file tells whether its launcher
lives: the lock goes with the process, in whatever container it ran. A launcher that is killed
cannot remove its directory: a shell that waits for its end does, and the next launch does for both.
"""

import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from nvserve.protocol.channel import MAX_IPC_PATH

PREFIX: Final = "nvserve-"
LOCK: Final = "lock"
MAKING: Final = "making"  # the lock, before it is locked
MAX_NAME_BYTES: Final = 32  # the longest socket name in it, with the slash
RANDOM_BYTES: Final = 8  # mkdtemp's part of the name
MADE_NAME: Final = re.compile(rf"{PREFIX}[a-z0-9_]{{{RANDOM_BYTES}}}")
YOUNG_S: Final = 60.0  # a directory without a lock may still be in the making
EPOCH_FILE: Final = re.compile(r"e(\d+)[w.]")  # the names of channel.py
LIVES_FILE: Final = re.compile(r"f(\d+)c(\d+)\.")
FALLBACK: Final = "/tmp"
SWEEPER: Final = 'read -r _; rm -rf -- "$1" || { sleep 1; rm -rf -- "$1"; }'
SWEEPER_LIMIT_S: Final = 10.0


class LaunchDirError(RuntimeError):
    """No directory could be made; the message is for the user."""


class LaunchDir:
    """A fresh 0700 directory, ours until `remove` or the end of the process."""

    def __init__(self) -> None:
        with _undisturbed():  # from the sweeper on, whatever ends us leaves nothing behind
            self.path: Final = _make()
            self._sweeper: Final = _start_sweeper(self.path)
        making = self.path / MAKING
        self._lock: Final = os.open(making, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        making.rename(self.path / LOCK)  # it appears locked: nobody can take us for stale

    def prune(self, *, epoch: int, frontend_life: int, core_life: int, pages: set[str]) -> None:
        """Remove what the dead left behind: sockets and stores of earlier lives, other pages."""
        for path in self.path.iterdir():
            of_epoch = EPOCH_FILE.match(path.name)
            of_lives = LIVES_FILE.match(path.name)
            is_old = (
                (of_epoch is not None and int(of_epoch[1]) < epoch)
                or (of_lives is not None and int(of_lives[1]) < frontend_life)
                or (of_lives is not None and int(of_lives[2]) < core_life)
                or (path.suffix == ".page" and path.name not in pages)
            )
            if is_old:
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)  # the sweeper tries again
        os.close(self._lock)
        if self._sweeper is None:
            return
        try:
            self._sweeper.communicate(timeout=SWEEPER_LIMIT_S)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            self._sweeper.kill()


def bases() -> list[Path]:
    """Where launch directories may be: TMPDIR when its path is short enough, then /tmp."""
    longest = MAX_IPC_PATH - MAX_NAME_BYTES - len(PREFIX) - RANDOM_BYTES - 1
    chosen = [Path(tempfile.gettempdir()), Path(FALLBACK)]
    return list(dict.fromkeys(base for base in chosen if len(os.fsencode(base)) <= longest))


def find_all() -> list[Path]:
    """This user's launch directories, live or stale."""
    found = []
    for base in bases():
        try:
            names = sorted(base.glob(PREFIX + "*"))
        except OSError:
            continue
        found += [path for path in names if _is_ours(path)]
    return found


def sweep() -> list[Path]:
    """Remove the directories whose launcher is gone; the removed ones."""
    stale = [path for path in find_all() if _is_stale(path)]
    for path in stale:
        shutil.rmtree(path, ignore_errors=True)
    return stale


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals that end us wait until the end of this."""
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _make() -> Path:
    errors = []
    for base in bases():
        try:
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        except OSError as error:
            errors.append(f"{base}: {error.strerror}")
    raise LaunchDirError(f"no launch directory could be made ({'; '.join(errors)}); set TMPDIR")


def _start_sweeper(path: Path) -> "subprocess.Popen[bytes] | None":
    """A shell that removes the directory when our end of its standard input closes, however."""
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", SWEEPER, "nvserve-sweeper", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # a terminal's Ctrl-C or hang-up is not its end
        )
    except FileNotFoundError:  # no shell in this container: the next launch sweeps
        return None


def _is_ours(path: Path) -> bool:
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()


def _is_stale(path: Path) -> bool:
    """Its launcher is gone; False for all that no launch has made, whatever its name."""
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return _was_left_in_the_making(path)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        info = os.fstat(lock)
        return stat.S_ISREG(info.st_mode) and not info.st_size
    except OSError:  # it is held
        return False
    finally:
        os.close(lock)


def _was_left_in_the_making(path: Path) -> bool:
    try:
        is_old = time.time() - path.lstat().st_mtime > YOUNG_S
        return is_old and MADE_NAME.fullmatch(path.name) is not None and not _holds_more(path)
    except OSError:  # its launch has just removed it
        return False


def _holds_more(path: Path) -> bool:
    return any(one.name != MAKING for one in path.iterdir())
