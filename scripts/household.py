"""The children a launch has, and the orders given about them so far in this event.

Pure bookkeeping under the policy in recovery.py: decides nothing.
"""

from collections.abc import Iterable
from typing import Final

from nvserve.protocol.control import Role, ToChild
from nvserve.scripts.actions import Action, Kill, Member, Note, Send, Start
from nvserve.scripts.hangs import ChildId

FENCE_LIMIT_S: Final = 10.0  # a killed process that still exists is stuck in the kernel


class Household:
    """Living members by id, the next life of each role, and the actions not yet taken."""

    def __init__(self, tp_size: int) -> None:
        self.members: Final[dict[ChildId, Member]] = {}
        self.restarts: Final = dict.fromkeys(Role, 0)  # replacements, the spare not counted
        self._tp_size: Final = tp_size
        self._lives: Final = dict.fromkeys(Role, 0)
        self._actions: list[Action] = []

    def take(self) -> list[Action]:
        """The orders since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    # -- who is there ----------------------------------------------------------------------------

    def find(self, role: Role) -> Member | None:
        """The one frontend or core that is alive and not being fenced."""
        return next(
            (m for m in self.members.values() if m.child.role is role and not m.is_fenced), None
        )

    def is_ready(self, role: Role) -> bool:
        member = self.find(role)
        return member is not None and member.is_ready

    def ranked(self) -> list[Member]:
        """The workers of the group that are alive and not being fenced."""
        return [m for m in self.members.values() if m.is_worker and not m.is_fenced]

    def spare(self) -> Member | None:
        return next((m for m in self.members.values() if m.is_spare and not m.is_fenced), None)

    def is_fencing(self) -> bool:
        """Some core or ranked worker that was killed still exists."""
        return any(m.is_fenced and m.is_in_epoch for m in self.members.values())

    def unkillable(self, now: float) -> list[Member]:
        return [
            m for m in self.members.values() if m.is_fenced and now > m.fenced_s + FENCE_LIMIT_S
        ]

    # -- orders ----------------------------------------------------------------------------------

    def start(self, role: Role, now: float, rank: int = -1) -> Member:
        child = ChildId(role, self._lives[role])
        self._lives[role] += 1
        if child.life > 0 and role is not Role.WORKER:
            self.restarts[role] += 1
        member = self.members[child] = Member(child, now, rank)
        self._actions.append(Start(child, member.name))
        return member

    def fill_ranks(self, now: float, *, is_first: bool) -> bool:
        """Give every empty rank to the spare or a fresh worker; False when none was empty."""
        taken = {member.rank for member in self.ranked()}
        empty = [rank for rank in range(self._tp_size) if rank not in taken]
        for rank in empty:
            spare = self.spare()
            if spare is None:
                self.start(Role.WORKER, now, rank)
            else:
                spare.rank = rank
            self.restarts[Role.WORKER] += not is_first
        return bool(empty)

    def send(self, member: Member | None, message: ToChild) -> None:
        if member is not None:
            self._actions.append(Send(member.child, message))

    def send_all(self, message: ToChild) -> None:
        for member in self.members.values():
            self.send(member, message)

    def fence(self, members: Iterable[Member], now: float, *, wants_stacks: bool = False) -> None:
        """Kill each once; from now on what it says does not count."""
        for member in members:
            if not member.is_fenced:
                member.is_fenced = True
                member.fenced_s = now
                self._actions.append(Kill(member.child, wants_stacks))

    def note(self, text: str, accident: Member | None = None) -> None:
        self._actions.append(Note(text, None if accident is None else accident.child))

    def order(self, action: Action) -> None:
        self._actions.append(action)
