"""What a launch shows: log lines of every process, the progress of a start, readiness, the end.

Lines go to standard error, each with time and process name; the one line that announces the
server goes to standard output. A terminal gets a bar that later lines push down.
"""

import time
from typing import Final, Protocol

BAR_CELLS: Final = 24
MAX_COLUMNS: Final = 120


class Lines(Protocol):
    """Where it all goes: see outlet.py."""

    def isatty(self) -> bool: ...

    def write(self, text: str, /) -> object: ...

    def announce(self, line: str, /) -> None: ...


class Display:
    """Writes for one launch; knows nothing of processes but their names."""

    def __init__(self, lines: Lines, *, is_quiet: bool = False) -> None:
        self._lines: Final = lines
        self._is_quiet: Final = is_quiet  # only the bar, accidents and the end
        self._has_bar: Final = lines.isatty()
        self._bar = ""
        self._phases: dict[str, tuple[str, float]] = {}  # by process name

    def log(self, name: str, line: str) -> None:
        """One line of a child's output."""
        if not self._is_quiet:
            self._write(f"{time.strftime('%H:%M:%S')} {name} | {line}")

    def note(self, line: str, *, is_urgent: bool = False) -> None:
        """A line of the launcher itself."""
        if is_urgent or not self._is_quiet:
            self._write(f"{time.strftime('%H:%M:%S')} launcher | {line}")

    def error(self, line: str) -> None:
        """A line of the account at the end, as it is."""
        self._write(line)

    def progress(self, name: str, phase: str, done: float) -> None:
        """A process is in this phase; on no terminal, only a new phase makes a line."""
        is_new = self._phases.get(name, ("", 0.0))[0] != phase
        self._phases[name] = (phase, done)
        if self._has_bar:
            self._draw(self._render())
        elif is_new:
            self.note(f"{name}: {phase}")

    def announce(self, line: str, details: list[str]) -> None:
        """The server is ready: `line` to standard output, details beside it."""
        self.settle()
        self._lines.announce(line)
        for detail in details if not self._is_quiet else []:
            self._write(detail)

    def settle(self) -> None:
        """Take the bar away."""
        self._phases.clear()
        self._draw("")

    def _render(self) -> str:
        done = sum(done for _, done in self._phases.values()) / len(self._phases)
        cells = round(done * BAR_CELLS)
        bar = "#" * cells + "." * (BAR_CELLS - cells)
        texts = [
            f"{name} {phase}" + (f" {done:.0%}" if 0.0 < done < 1.0 else "")
            for name, (phase, done) in self._phases.items()
        ]
        return f"[{bar}] {', '.join(texts)}"[:MAX_COLUMNS]

    def _draw(self, bar: str) -> None:
        if bar != self._bar:
            self._bar = bar
            self._lines.write(f"\r\x1b[K{bar}")

    def _write(self, line: str) -> None:
        bar = self._bar
        self._draw("")
        self._lines.write(line + "\n")
        self._draw(bar)
