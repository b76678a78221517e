"""How many unplanned deaths a launch bears, and which of them are not counted.

Pure: knows neither processes nor messages.
"""

from typing import Final

from nvserve.scripts.hangs import ChildId
from nvserve.scripts.ladder import Intensity

MAX_SEARCH_DEATHS: Final = 40  # that one search for poisonous requests may cost uncounted


class DeathCount:
    """Deaths against --max-restarts; crashes while requests are on trial belong to the search."""

    def __init__(self, max_restarts: int, restart_window_s: float) -> None:
        self._intensity: Final = Intensity(max_restarts, restart_window_s)
        self._searchers: Final[set[ChildId]] = set()  # processes that have requests on trial
        self._num_search_deaths = 0

    def note_search(self, child: ChildId, num_suspects: int) -> None:
        """A process suspects so many requests now."""
        self._searchers.discard(child)
        if num_suspects:
            self._searchers.add(child)

    def forget(self, child: ChildId) -> None:
        self._searchers.discard(child)

    def count(self, now: float, *, is_crash: bool) -> bool:
        """Count one death, unless it is part of a search; False when it is one too many."""
        if is_crash and self._searchers and self._num_search_deaths < MAX_SEARCH_DEATHS:
            self._num_search_deaths += 1
            return True
        if not self._searchers:
            self._num_search_deaths = 0
        return self._intensity.count(now)
