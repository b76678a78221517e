"""How a launch ends: drained on a signal, given up after too many failures, or stopped at once.

Pure, like the policy above it in recovery.py.

    drain: Drain -> Drained or its limit -> stop          give up: farewell -> stop
    interrupt: SIGKILL to all but the frontend -> stop    once more: SIGKILL to the rest -> End
    stop: SIGKILL to who still starts, Exit to all -> all gone or 2 s -> SIGKILL to the rest -> End
"""

import enum
from typing import Final

from nvserve.protocol.control import Drain, Exit, Role
from nvserve.scripts.actions import End, Member
from nvserve.scripts.exit_codes import ExitCode
from nvserve.scripts.household import FENCE_LIMIT_S, Household

EXIT_LIMIT_S: Final = 2.0  # from Exit to SIGKILL
FAREWELL_S: Final = 1.0  # the frontend answers everybody before a failed server goes


class Step(enum.Enum):
    """Where an ending stands."""

    NONE = "none"
    DRAINING = "draining"
    FAREWELL = "farewell"
    LEAVING = "leaving"  # Exit was sent
    KILLING = "killing"


class Ending:
    """The end of the launch; `step` is NONE until it begins and never goes back."""

    def __init__(self, house: Household) -> None:
        self.step = Step.NONE
        self.code = ExitCode.OK
        self.reason = ""
        self.deadline = float("inf")  # when `run_late` has something to do
        self._house: Final = house

    @property
    def is_final(self) -> bool:
        """Nothing is repaired any more; draining still repairs."""
        return self.step not in (Step.NONE, Step.DRAINING)

    def drain(self, now: float, timeout_s: float) -> None:
        """Let running requests finish."""
        self._enter(Step.DRAINING, now + timeout_s + EXIT_LIMIT_S)
        self.reason = "draining"
        self._house.send(self._house.find(Role.FRONTEND), Drain(timeout_s))

    def stop(self, now: float) -> None:
        """Ask everybody to leave; who still starts hears nothing yet, and has nothing to lose.

        Nor does a worker that loads, which reads nothing until it has joined.
        """
        self._enter(Step.LEAVING, now + EXIT_LIMIT_S)
        members = self._house.members.values()
        deaf = [m for m in members if not m.is_ready or (m.is_worker and m.joined_epoch < 0)]
        self._house.fence(deaf, now)
        self._house.send_all(Exit())
        self._end_if_alone()

    def give_up(self, now: float, code: ExitCode, reason: str) -> None:
        """The server has failed: clients are told, engines killed."""
        self.code, self.reason = code, reason
        frontend = self._house.find(Role.FRONTEND)
        others = [m for m in self._house.members.values() if m is not frontend]
        self._house.fence(others, now)
        if frontend is None or not frontend.is_ready:
            self.stop(now)
            return
        self._enter(Step.FAREWELL, now + FAREWELL_S)
        self._house.send(frontend, Drain(0.0))

    def interrupt(self, now: float) -> None:
        """A signal while the launch ends: all leave at once; by the next one nobody is asked.

        Only the frontend may leave by itself, since it answers everybody first.
        """
        is_asking = self.code is not ExitCode.INTERRUPTED and self.step is not Step.KILLING
        self.code, self.reason = ExitCode.INTERRUPTED, "stopped at once"
        if not is_asking:
            self.kill(now)
            return
        members = self._house.members.values()
        self._house.fence([m for m in members if m.child.role is not Role.FRONTEND], now)
        self.stop(now)

    def kill(self, now: float) -> None:
        """SIGKILL to all that is left."""
        self._enter(Step.KILLING, now + FENCE_LIMIT_S)
        self._house.fence(self._house.members.values(), now)
        self._end_if_alone()

    def bury(self, member: Member, now: float) -> None:
        """A child is gone while the launch ends."""
        if self.step is Step.FAREWELL and member.child.role is Role.FRONTEND:
            self.stop(now)
        else:
            self._end_if_alone()

    def run_late(self, now: float) -> None:
        """Go on from a step that has passed its limit; called at or after `deadline`."""
        match self.step:
            case Step.DRAINING | Step.FAREWELL:
                self.stop(now)
            case Step.LEAVING:
                self.kill(now)
            case Step.KILLING:
                left = ", ".join(member.name for member in self._house.members.values())
                self._house.order(End(ExitCode.UNKILLABLE, f"{left} did not die"))
                self.deadline = float("inf")
            case Step.NONE:
                pass

    def _enter(self, step: Step, deadline: float) -> None:
        self.step = step
        self.deadline = deadline

    def _end_if_alone(self) -> None:
        if not self._house.members:
            self._house.order(End(self.code, self.reason))
            self.deadline = float("inf")
