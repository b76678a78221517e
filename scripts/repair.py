"""What a loss leads to: it is counted, requests are blamed, and what is lost is made anew.

A frontend is replaced beside the epoch; with a core or a worker the epoch ends, and formation.py
forms the next one. The launch is given up when that has happened too often. Pure, like the policy
in recovery.py, which finds the losses.
"""

from typing import Final

from nvserve.protocol.control import Role
from nvserve.scripts.actions import Member
from nvserve.scripts.announcements import Announcements
from nvserve.scripts.broken_epoch import BrokenEpoch
from nvserve.scripts.death_count import DeathCount
from nvserve.scripts.ending import Ending, Step
from nvserve.scripts.exit_codes import LOST, ExitCode
from nvserve.scripts.formation import Formation
from nvserve.scripts.household import Household
from nvserve.scripts.ladder import Rung
from nvserve.scripts.limits import Limits
from nvserve.scripts.suspicion import Suspicion


class Repair:
    """Makes good once the server has been ready; before that, the first loss ends the launch."""

    def __init__(
        self,
        limits: Limits,
        house: Household,
        *,
        formation: Formation,
        broken: BrokenEpoch,
        announcements: Announcements,
        ending: Ending,
    ) -> None:
        self.reason = "starting"  # of the server's present state
        self.was_ready = False
        self.epoch_ended_s = 0.0  # when the last epoch was ended
        self.deaths: Final = DeathCount(limits.max_restarts, limits.restart_window_s)
        self._limits: Final = limits
        self._house: Final = house
        self._formation: Final = formation
        self._broken: Final = broken
        self._announcements: Final = announcements
        self._ending: Final = ending

    def note_ready(self) -> None:
        """The server is ready: whatever was lost is there again."""
        self.was_ready = True
        self.reason = ""

    # -- losses ----------------------------------------------------------------------------------

    def lose(self, member: Member, now: float, text: str, *, is_crash: bool) -> None:
        """An unplanned death."""
        self._house.note(text, accident=member)
        is_more = self._formation.is_recovered_anyway(member)  # of an accident that was counted
        if not is_more and not self._count(member.child.role, now, text, is_crash=is_crash):
            return
        self._blame(member, is_crash=is_crash)
        if member.child.role is Role.FRONTEND:
            self.replace_frontend(now)
        else:
            self.renew(now, text, is_failure=not is_more)

    def suspect(self, now: float, suspicion: Suspicion) -> None:
        """Fence the members, then as after one death; a frontend is replaced when it is gone."""
        text, is_crash = suspicion.text, suspicion.is_crash
        for member in suspicion.members:
            self._house.note(text, accident=member)
        # Once: survivors whom a single dead rank holds up are no losses of their own.
        if not self._count(suspicion.members[0].child.role, now, text, is_crash=is_crash):
            return
        for member in suspicion.members:
            self._blame(member, is_crash=is_crash)
        self._house.fence(suspicion.members, now, wants_stacks=True)
        if any(member.child.role is not Role.FRONTEND for member in suspicion.members):
            self.renew(now, text, suspicion.at_least)

    def lose_epoch(
        self, now: float, text: str, named: Member | None = None, *, is_crash: bool = False
    ) -> None:
        """An epoch that is broken or stands still though nobody has died.

        `named` is held to be at fault. Of a crash core suspects the requests by itself.
        """
        self._house.note(text, accident=named)
        if not self._count(Role.WORKER, now, text, is_crash=is_crash):
            return
        if named is not None:
            self._house.fence([named], now, wants_stacks=True)
        self.renew(now, text)

    def _count(self, role: Role, now: float, text: str, *, is_crash: bool) -> bool:
        """Count an unplanned death; False when the launch ends by it."""
        self.reason = text
        if not self.was_ready:
            self.give_up(now, ExitCode.START_FAILED, text)
            return False
        if self.deaths.count(now, is_crash=is_crash):
            return True
        most, window_s = self._limits.max_restarts, self._limits.restart_window_s
        text = f"more than {most} unplanned deaths within {window_s:g} s; last: {text}"
        self.give_up(now, LOST[role], text)
        return False

    def _blame(self, member: Member, *, is_crash: bool) -> None:
        """Have the requests suspected of a crash: core's by the frontend, a worker's by core.

        A worker that has not joined the present epoch runs no step of theirs.
        """
        if member.child.role is Role.CORE:
            self._announcements.is_core_blamed |= is_crash
        elif member.is_worker and member.joined_epoch == self._formation.epoch:
            self._formation.is_blamed |= is_crash

    # -- making good -----------------------------------------------------------------------------

    def renew(
        self,
        now: float,
        text: str,
        at_least: Rung = Rung.REPLACE,
        *,
        is_failure: bool = True,
    ) -> None:
        """End the epoch and form the next one, or give up at the ladder's end.

        Whoever does not belong into the next one has been fenced before. `is_failure`: if there is
        a recovery in progress, it has failed.
        """
        self._broken.clear()
        self.epoch_ended_s = now
        self.reason = text
        if not self.was_ready:
            self.give_up(now, ExitCode.START_FAILED, text)
        elif self._formation.renew(now, at_least, is_failure=is_failure) is Rung.GIVE_UP:
            self.give_up(now, ExitCode.RECOVERY_FAILED, f"no recovery helped; last: {text}")

    def replace_frontend(self, now: float) -> None:
        """The frontend is gone."""
        if self._ending.step is Step.DRAINING:  # its streams are gone: nothing is left to drain
            self._ending.stop(now)
        else:
            self._house.start(Role.FRONTEND, now)

    def give_up(self, now: float, code: ExitCode, text: str) -> None:
        """End the launch with this exit status."""
        self.reason = text
        self._ending.give_up(now, code, text)
