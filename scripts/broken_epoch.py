"""An epoch that a process says is broken, until a death explains it or the time for that is over.

A survivor notices a lost peer before the launcher does: memory and devices are given back first.
Pure, like recovery.py, which drives it.
"""

from dataclasses import dataclass
from typing import Final

from nvserve.protocol.control import EpochBroken
from nvserve.scripts.actions import Member

SETTLE_S: Final = 0.1  # so long a broken epoch waits for the death that explains it
DEATH_LIMIT_S: Final = 10.0  # the same where somebody is about to be dead


@dataclass(frozen=True, slots=True)
class Report:
    """Who says so, and what."""

    member: Member
    message: EpochBroken

    @property
    def text(self) -> str:
        message = self.message
        return f"{self.member.name}: epoch {message.epoch}, step {message.step}: {message.reason}"


class BrokenEpoch:
    """At most one report of an epoch: the first, or the first that names a rank."""

    def __init__(self) -> None:
        self.deadline = float("inf")  # when `take` returns it
        self._report: Report | None = None
        self._noted_s = 0.0

    @property
    def is_known(self) -> bool:
        return self._report is not None

    def note(self, member: Member, message: EpochBroken, now: float) -> None:
        if self._report is None:
            self._report = Report(member, message)
            self._noted_s, self.deadline = now, now + SETTLE_S
        elif self._report.message.rank < 0 <= message.rank:  # core knows better than a survivor
            self._report = Report(member, message)

    def clear(self) -> None:
        """A death explains it."""
        self._report, self.deadline = None, float("inf")

    def take(self, now: float, *, is_death_at_hand: bool) -> Report | None:
        """The report that no death has explained in time, once; one at hand is waited for."""
        if now < self.deadline:
            return None
        if is_death_at_hand and now < self._noted_s + DEATH_LIMIT_S:  # its cause is not known yet
            self.deadline = now + SETTLE_S
            return None
        report = self._report
        self.clear()
        return report
