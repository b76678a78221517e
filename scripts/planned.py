"""Planned restarts: core holds or the frontend drains first, so that nothing is lost or counted.

    worker, core: Hold -> Held -> kill -> recovery    frontend: Drain -> Drained -> kill -> start

Pure, like the policy in recovery.py that drives it.
"""

from dataclasses import dataclass
from typing import Final

from nvserve.protocol.control import Drain, Hold, Role
from nvserve.scripts.actions import Member
from nvserve.scripts.household import Household

HOLD_LIMIT_S: Final = 10.0  # for the steps in flight; afterwards it is a restart like any other


@dataclass(frozen=True, slots=True)
class Report:
    """A planned restart that is done; `pause_s` is from its first order to serving again."""

    number: int
    name: str
    pause_s: float


class PlannedRestarts:
    """At most one at a time."""

    def __init__(self, house: Household, drain_limit_s: float) -> None:
        self.last: Report | None = None
        self.deadline = float("inf")  # when `begin`'s order must have been obeyed
        self._house: Final = house
        self._drain_limit_s: Final = drain_limit_s
        self._member: Member | None = None
        self._name = ""
        self._begun_s = 0.0
        self._number = 0
        self._is_killed = False

    @property
    def is_on(self) -> bool:
        return self._member is not None

    def begin(self, member: Member, now: float) -> int:
        """Order the quiet before it; the number under which its Report will be found."""
        assert self._member is None, "one planned restart at a time"
        self._member, self._name = member, member.name
        self._begun_s, self._is_killed = now, False
        self._number += 1
        if member.child.role is Role.FRONTEND:
            self._house.send(member, Drain(self._drain_limit_s, is_restart=True))
            self.deadline = now + self._drain_limit_s + HOLD_LIMIT_S
        else:
            self._house.send(self._house.find(Role.CORE), Hold())
            self.deadline = now + HOLD_LIMIT_S
        self._house.note(f"planned restart of {member.name}")
        return self._number

    def take_victim(self, role: Role) -> Member | None:
        """Quiet has come from this role: the member to kill now, once."""
        member = self._member
        if member is None or self._is_killed:
            return None
        if (member.child.role is Role.FRONTEND) != (role is Role.FRONTEND):
            return None
        self._is_killed = True
        self.deadline = float("inf")
        is_gone = member.is_fenced or member.child not in self._house.members
        return None if is_gone else member

    def drop_drain(self) -> None:
        """The frontend drains for good now. A hold goes on: only the restart frees core from it."""
        if self._member is not None and self._member.child.role is Role.FRONTEND:
            self._member, self.deadline = None, float("inf")

    def take_late(self, now: float) -> Member | None:
        """The member to kill although quiet has not come in time."""
        if now <= self.deadline or self._member is None:
            return None
        role = self._member.child.role
        return self.take_victim(Role.FRONTEND if role is Role.FRONTEND else Role.CORE)

    def note_ready(self, now: float) -> None:
        """The server is ready: a restart whose victim is gone is done."""
        if self._member is None or self._member.child in self._house.members:
            return
        pause_s = now - self._begun_s
        self.last = Report(self._number, self._name, pause_s)
        self._member = None
        self.deadline = float("inf")
        self._house.note(f"restarted {self._name} as planned, with a pause of {pause_s:.2f} s")
