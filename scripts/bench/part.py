"""A measurement as a process with a limit: run, ended when it is late, its answer and words kept.

The process writes its result to the JSON file it is told; whatever it does, the caller goes on.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nvserve.scripts import python_child

GRACE_S: Final = 20.0  # of a part's limit: from Ctrl-C to SIGKILL
MAX_LOG_LINES: Final = 40

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """One measurement and the seconds that it may take; `least_s` is kept free for it."""

    name: str
    least_s: float
    most_s: float
    arguments: Callable[[float], list[str]]  # of Python, for a limit; "--output FILE" is added
    headline: Callable[[Result], str]  # of its result, for the table


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a part ended."""

    state: str  # ok, failed, too late, or skipped: no time was left
    seconds: float = 0.0
    limit_s: float = 0.0
    exit_code: int | None = None
    arguments: tuple[str, ...] = ()
    log: tuple[str, ...] = ()  # its last lines
    result: Result | None = None

    def summary(self, part: Part) -> str:
        """What the table says of it."""
        if self.result is None:
            return self.log[-1] if self.log else "-"
        try:
            return part.headline(self.result)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            return f"a result of another form: {error!r}"


def limits_s(part: Part, later: list[Part], remaining_s: float) -> float:
    """Seconds that a part gets when those behind it shall keep their least; 0: none is left."""
    limit_s = min(part.most_s, remaining_s - sum(one.least_s for one in later))
    return limit_s if limit_s >= part.least_s else 0.0


def run_part(part: Part, limit_s: float) -> Outcome:
    """Run one part; never raises for what the part does. Ctrl-C here ends the part too."""
    arguments = tuple(part.arguments(limit_s))
    with tempfile.TemporaryDirectory(prefix="nvserve-part-") as scratch:
        output, log = Path(scratch) / "result.json", Path(scratch) / "log"
        begun_s = time.monotonic()
        is_late = False
        with log.open("wb") as lines:
            process = subprocess.Popen(
                python_child.command(*arguments, "--output", str(output)),
                stdin=subprocess.DEVNULL,
                stdout=lines,
                stderr=subprocess.STDOUT,
                env=python_child.environment(),
                process_group=0,  # so that its own children can be ended with it
            )
            try:
                process.wait(max(limit_s / 2, limit_s - GRACE_S))
            except subprocess.TimeoutExpired:
                is_late = True
            finally:
                end(process)
        code = process.returncode
        state = "too late" if is_late else "ok" if code == 0 else "failed"
        return Outcome(
            state=state,
            seconds=time.monotonic() - begun_s,
            limit_s=limit_s,
            exit_code=code,
            arguments=arguments,
            log=tuple(log.read_text(errors="replace").splitlines()[-MAX_LOG_LINES:]),
            result=_read(output),
        )


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ctrl-C for the leader of a group, then SIGKILL for the group; nothing when it has ended."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # it is not reaped: the number is still its own
        with contextlib.suppress(subprocess.TimeoutExpired):  # a device may hold it longer
            process.wait(GRACE_S)


def _read(path: Path) -> Result | None:
    try:
        result = json.loads(path.read_bytes())
    except (OSError, ValueError):  # not written, or not to the end
        return None
    return result if isinstance(result, dict) else None
