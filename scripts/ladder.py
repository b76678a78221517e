"""How far a recovery goes and how often one may happen: the ladder and the restart intensity.

Pure: knows neither processes nor messages.
"""

import enum
from collections import deque


class Rung(enum.IntEnum):
    """What a recovery replaces; each rung includes those before it."""

    REPLACE = 1  # the dead rank (none, when core died or the epoch broke); survivors rebuild
    WORKERS = 2  # all workers
    CORE_AND_WORKERS = 3
    GIVE_UP = 4


class Ladder:
    """The rung that the recovery in progress stands on; `rung` is None while there is none.

    A first failure on a rung starts the same rung again, a second one goes one rung down.
    """

    def __init__(self) -> None:
        self.rung: Rung | None = None
        self._num_failures = 0  # on this rung

    def fall(self, at_least: Rung = Rung.REPLACE, *, is_failure: bool = True) -> Rung:
        """Begin a recovery, or go on with the one in progress; the rung to take now.

        `is_failure`: the one in progress has failed, if there is one.
        """
        if self.rung is None or at_least > self.rung:
            self.rung = at_least
            self._num_failures = 0
            return self.rung
        self._num_failures += is_failure
        if self._num_failures == 2:
            self.rung = Rung(self.rung + 1)
            self._num_failures = 0
        return self.rung

    def next_rung(self) -> Rung:
        """The one below the present rung."""
        return Rung.REPLACE if self.rung is None else Rung(min(self.rung + 1, Rung.GIVE_UP))

    def leave(self) -> None:
        """The recovery is done."""
        self.rung = None


class Intensity:
    """At most `max_deaths` unplanned deaths within any `window_s` seconds."""

    def __init__(self, max_deaths: int, window_s: float) -> None:
        self._max_deaths = max_deaths
        self._window_s = window_s
        self._times: deque[float] = deque()

    def count(self, now: float) -> bool:
        """Count one death; False when it is one too many."""
        self._times.append(now)
        while self._times[0] <= now - self._window_s:
            self._times.popleft()
        return len(self._times) <= self._max_deaths
