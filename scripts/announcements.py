"""What frontend and core are told when it changes: each other's lives, and the server's state.

Pure, like the policy in recovery.py that drives it.
"""

from typing import Final

from nvserve.protocol.control import Condition, Peers, Role
from nvserve.scripts.hangs import ChildId
from nvserve.scripts.household import Household


class Announcements:
    """Remembers what was sent last."""

    def __init__(self, house: Household) -> None:
        self.is_core_blamed = False  # its last death may be its requests' fault
        self._house: Final = house
        self._lives: tuple[int, int] | None = None  # of frontend and core, last introduced
        self._published: tuple[ChildId, Condition] | None = None

    def introduce(self) -> None:
        """Name the present lives to frontend and core once both are there."""
        frontend, core = self._house.find(Role.FRONTEND), self._house.find(Role.CORE)
        if frontend is None or core is None or not (frontend.is_ready and core.is_ready):
            return
        lives = (frontend.child.life, core.child.life)
        if lives != self._lives:
            peers = Peers(*lives, self.is_core_blamed)
            self._lives, self.is_core_blamed = lives, False
            self._house.send(frontend, peers)
            self._house.send(core, peers)

    def publish(self, condition: Condition) -> None:
        """The frontend gets it if that life of it has not had it."""
        frontend = self._house.find(Role.FRONTEND)
        if frontend is not None and (frontend.child, condition) != self._published:
            self._published = (frontend.child, condition)
            self._house.send(frontend, condition)
