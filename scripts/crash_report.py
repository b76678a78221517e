"""One readable account of why a launch ended: who, how, where it was, and its last words."""

from collections.abc import Iterable
from dataclasses import dataclass

from nvserve.protocol.progress import Snapshot
from nvserve.scripts.exit_codes import ExitCode

MAX_LINES = 25  # of each process


@dataclass(frozen=True, slots=True)
class Accident:
    """An unplanned death or a hang."""

    text: str
    name: str
    pid: int
    page: Snapshot | None  # at that moment
    tail: Iterable[str]  # its last output lines, also those that came later


def write_report(code: ExitCode, reason: str, accidents: list[Accident]) -> list[str]:
    """Lines for the terminal; the last accident in full, earlier ones in a line each."""
    lines = [f"nvserve: {reason} (exit status {code.value}, {code.name})"]
    if not accidents:
        return lines
    lines += [f"  earlier: {accident.text}" for accident in accidents[:-1]]
    last = accidents[-1]
    lines.append(f"  last: {last.name}, pid {last.pid}{_where(last.page)}")
    tail = list(last.tail)[-MAX_LINES:]
    lines.append(f"  its last {len(tail)} lines:" if tail else "  it had written nothing")
    return lines + [f"  | {line}" for line in tail]


def _where(page: Snapshot | None) -> str:
    if page is None:
        return ", before its first sign of life"
    return f", phase {page.phase.name.lower()}, epoch {page.epoch}, step {page.step}"
