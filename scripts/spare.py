"""When the launch gets its spare: one warm worker without a rank, started while nothing else runs.

Pure, like the policy above it in recovery.py. One that dies is no unplanned death; the next one
comes later the more have died in a row.
"""

from typing import Final

from nvserve.protocol.control import Role
from nvserve.scripts.household import Household

MAX_DELAY_S: Final = 60.0


class SpareKeeper:
    """Keeps one spare, or none where none is wanted."""

    def __init__(self, house: Household, num_spares: int) -> None:
        self._house: Final = house
        self._is_wanted: Final = num_spares > 0
        self._due = 0.0
        self._num_deaths = 0  # since one became ready

    def note_ready(self) -> None:
        self._num_deaths = 0

    def note_death(self, now: float) -> None:
        self._num_deaths += 1
        self._due = now + min(MAX_DELAY_S, 2.0**self._num_deaths)

    def keep(self, now: float) -> None:
        """Start one where there is none; called while the server is ready."""
        if not self._is_wanted or now < self._due:
            return
        if not any(member.is_spare for member in self._house.members.values()):
            self._house.start(Role.WORKER, now)
