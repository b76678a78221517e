"""The time that the policy's limits are measured in: none goes by while everything stands still.

A frozen cgroup, a paused machine and a stopped launcher all leave a gap between two readings.
"""

import time
from collections.abc import Callable
from typing import Final

OVERSLEPT_S: Final = 1.0  # a turn of the loop that is longer than it waits by so much: a gap


class AwakeClock:
    """CLOCK_MONOTONIC less the gaps; to be read at least every `turn_s`."""

    def __init__(self, turn_s: float, read: Callable[[], float] = time.monotonic) -> None:
        self._turn_s: Final = turn_s
        self._read: Final = read
        self._last = read()
        self._gaps_s = 0.0
        self.awake_since = self._last  # when the last gap ended

    def now(self) -> float:
        time_s = self._read()
        gap_s = time_s - self._last - self._turn_s  # a turn goes by in any case: no limit is off
        self._last = time_s
        if gap_s > OVERSLEPT_S:
            self._gaps_s += gap_s
            self.awake_since = self.convert(time_s)
        return self.convert(time_s)

    def convert(self, time_s: float) -> float:
        """A CLOCK_MONOTONIC time since the last gap; one from before it comes out too early."""
        return time_s - self._gaps_s
