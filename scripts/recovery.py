"""The launcher's policy: which processes live and what a death, a hang or a signal leads to.

Rule: suspect -> SIGKILL and wait -> new epoch -> rebuild -> replay. Pure: events and a time come in
(start, died, received, tick, interrupt), a list of actions goes out. Spawns, kills, reads and
prints nothing; supervisor.py does that. Here losses are found; what they lead to is in repair.py,
and the epoch itself is formed by formation.py.
"""

from typing import Final

from nvserve.protocol.control import (
    Condition,
    Drained,
    EpochBroken,
    EpochReady,
    Failed,
    FromChild,
    Held,
    Progress,
    Ready,
    Role,
    Searching,
    State,
)
from nvserve.scripts.actions import Action, Member
from nvserve.scripts.announcements import Announcements
from nvserve.scripts.broken_epoch import BrokenEpoch
from nvserve.scripts.ending import Ending, Step
from nvserve.scripts.exit_codes import ExitCode
from nvserve.scripts.formation import Formation, Stage, names
from nvserve.scripts.hangs import ChildId, Observation, find_silent
from nvserve.scripts.household import Household
from nvserve.scripts.limits import Limits
from nvserve.scripts.planned import PlannedRestarts
from nvserve.scripts.repair import Repair
from nvserve.scripts.spare import SpareKeeper
from nvserve.scripts.stalls import StallWatch
from nvserve.scripts.suspicion import Suspicion, suspect_silent

ANSWER_SHARE: Final = 0.4  # of hang_timeout_s: time for a survivor to answer a new epoch, ...
MIN_ANSWER_S: Final = 2.0  # ... at least
FRONTEND_START_LIMIT_S: Final = 60.0
STALL_SLACK_S: Final = 0.5  # beyond hang_timeout_s: a hang, which names its culprit, is found first


class Recovery:
    """The policy. `state`, `members` and `formation` may be read; events change them."""

    def __init__(self, limits: Limits) -> None:
        self.limits: Final = limits
        self._house: Final = Household(limits.tp_size)
        self.formation: Final = Formation(
            self._house,
            tp_size=limits.tp_size,
            num_kv_blocks=limits.num_kv_blocks,
            answer_limit_s=max(MIN_ANSWER_S, ANSWER_SHARE * limits.hang_timeout_s),
        )
        self._announcements: Final = Announcements(self._house)
        self._broken: Final = BrokenEpoch()
        self._spare: Final = SpareKeeper(self._house, limits.num_spares)
        self._stalls: Final = StallWatch()
        self._ending: Final = Ending(self._house)
        self.planned: Final = PlannedRestarts(self._house, limits.shutdown_timeout_s)
        self._repair: Final = Repair(
            limits,
            self._house,
            formation=self.formation,
            broken=self._broken,
            announcements=self._announcements,
            ending=self._ending,
        )

    # -- read by the supervisor ------------------------------------------------------------------

    @property
    def members(self) -> dict[ChildId, Member]:
        return self._house.members

    @property
    def was_ready(self) -> bool:
        """The server has been ready once."""
        return self._repair.was_ready

    @property
    def reason(self) -> str:
        """Why the server is in its present state; empty while it is ready."""
        return self._repair.reason

    @property
    def is_broken(self) -> bool:
        """Some process says that its epoch is, and who has died is not known yet."""
        return self._broken.is_known

    @property
    def restarts(self) -> dict[Role, int]:
        return self._house.restarts

    @property
    def state(self) -> State:
        """The condition of the whole server."""
        if self._ending.step is not Step.NONE:
            is_wanted = self._ending.code in (ExitCode.OK, ExitCode.INTERRUPTED)
            return State.DRAINING if is_wanted else State.FAILED
        is_serving = self.formation.stage is Stage.SERVING and not self._broken.is_known
        if is_serving and self._house.is_ready(Role.FRONTEND):
            return State.READY
        return State.RECOVERING if self.was_ready else State.LOADING

    def next_deadline(self) -> float:
        """When `tick` has something to do at the latest."""
        deadline = self._ending.deadline
        if self._ending.is_final:
            return deadline
        return min(
            deadline,
            self._broken.deadline,
            self.planned.deadline,
            self.formation.next_deadline(),
        )

    # -- events ----------------------------------------------------------------------------------

    def start(self, now: float) -> list[Action]:
        """Start everything; called once."""
        self.formation.start(now)
        self._house.start(Role.FRONTEND, now)
        return self._conclude(now)

    def died(
        self, child: ChildId, now: float, cause: str, *, is_crash: bool = False
    ) -> list[Action]:
        """A child has been reaped; `cause` reads on from its name ("was killed by SIGKILL").

        `is_crash`: nobody outside did it, so that requests may be the cause.
        """
        member = self.members.pop(child)
        self._repair.deaths.forget(child)
        if self._ending.is_final:
            self._ending.bury(member, now)
        elif member.is_spare:
            self._house.note(f"the spare {cause}", accident=member)
            self._spare.note_death(now)
        elif not member.is_fenced:
            self._repair.lose(member, now, f"{member.name} {cause}", is_crash=is_crash)
        elif member.child.role is Role.FRONTEND:
            self._repair.replace_frontend(now)
        else:
            self.formation.bury(now)
        return self._conclude(now)

    def received(self, child: ChildId, message: FromChild, now: float) -> list[Action]:
        """A control message; what a fenced child still says does not count."""
        member = self.members[child]
        if member.is_fenced:
            return []
        match message:
            case Drained():
                if self._ending.step in (Step.DRAINING, Step.FAREWELL):
                    self._ending.stop(now)
                else:
                    self._restart_quiet(Role.FRONTEND, now)
            case _ if self._ending.is_final:
                return []
            case Ready():
                member.is_ready = True
                if member.is_spare:
                    self._spare.note_ready()
                self._announcements.introduce()
                self.formation.resume(now)
            case EpochReady():
                complaint = self.formation.join(member, message, now)
                if complaint is not None:
                    self._repair.suspect(now, Suspicion([member], complaint))
            case EpochBroken():
                if self.formation.is_going_on(message.epoch):
                    self._broken.note(member, message, now)
            case Searching(num_suspects):
                self._repair.deaths.note_search(child, num_suspects)
            case Held():
                self._restart_quiet(Role.CORE, now)
            case Failed(text):
                self._fail(member, text, now)
            case Progress():
                pass
        return self._conclude(now)

    def tick(
        self, now: float, observations: list[Observation], *, awake_since: float
    ) -> list[Action]:
        """Time has passed: find hangs, apply limits, keep the spare."""
        if now >= self._ending.deadline:
            self._ending.run_late(now)
        if self._ending.is_final:
            return self._conclude(now)
        for seen in observations:
            member = self.members[seen.child]
            if seen.page is not None:
                member.answered_epoch = max(member.answered_epoch, seen.page.epoch)
        # Who waited for the dead one was silent as well.
        self._find_hangs(now, observations, max(awake_since, self._repair.epoch_ended_s))
        self._find_stall(now, observations, awake_since)
        self._settle(now, observations)
        self._apply_limits(now)
        self._kill_planned(self.planned.take_late(now), now, wants_stacks=True)
        if self.state is State.READY:  # nothing else needs the cores
            self._spare.keep(now)
        return self._conclude(now)

    def interrupt(self, now: float) -> list[Action]:
        """SIGINT or SIGTERM: the first one drains, the next one ends everything at once."""
        if self._ending.step is not Step.NONE:
            self._ending.interrupt(now)
        elif self.was_ready and self._house.is_ready(Role.FRONTEND):
            timeout_s = self.limits.shutdown_timeout_s
            self._house.note(
                f"draining: running requests have {timeout_s:g} s; interrupt again to stop at once"
            )
            self.planned.drop_drain()
            self._ending.drain(now, timeout_s)
        else:
            self._ending.stop(now)
        return self._conclude(now)

    def restart(self, name: str, now: float) -> tuple[int | None, list[Action]]:
        """Begin the planned restart of "worker N", "core" or "frontend"; None when not now."""
        member = next((m for m in self.members.values() if m.name == name), None)
        is_possible = self.state is State.READY and not self.planned.is_on
        if member is None or member.is_spare or not is_possible:
            return None, []
        number = self.planned.begin(member, now)
        return number, self._conclude(now)

    # -- planned restarts, hangs, broken epochs and limits ---------------------------------------

    def _restart_quiet(self, role: Role, now: float) -> None:
        """What a planned restart waited for has come."""
        self._kill_planned(self.planned.take_victim(role), now, wants_stacks=False)

    def _kill_planned(self, member: Member | None, now: float, *, wants_stacks: bool) -> None:
        """Only one that did not become quiet in time has stacks worth a look."""
        if member is None:
            return
        self._house.fence([member], now, wants_stacks=wants_stacks)
        if member.child.role is Role.FRONTEND:  # replaced when it is gone
            return
        is_alone = self.formation.stage is Stage.SERVING  # or a recovery has begun meanwhile
        self._repair.renew(now, f"planned restart of {member.name}" if is_alone else self.reason)

    def _find_stall(self, now: float, observations: list[Observation], awake_since: float) -> None:
        """All live and beat, core has requests, and no step moves: a message was lost."""
        limit_s = self.limits.hang_timeout_s + STALL_SLACK_S
        is_stalled = self._stalls.is_stalled(
            observations, now, awake_since=awake_since, limit_s=limit_s
        )
        if not is_stalled or self._ending.is_final or self._broken.is_known:
            return
        if self.formation.stage is not Stage.SERVING:
            return
        text = f"epoch {self.formation.epoch} has not moved for {limit_s:g} s: a message was lost"
        self._repair.lose_epoch(now, text)

    def _fail(self, member: Member, text: str, now: float) -> None:
        """A child says why it cannot start and is about to exit."""
        self._house.note(f"{member.name}: {text}")
        if not self.was_ready:
            self._repair.give_up(now, ExitCode.START_FAILED, text)

    def _settle(self, now: float, observations: list[Observation]) -> None:
        """A broken epoch that no death explained."""
        exiting = [self.members[seen.child] for seen in observations if seen.is_exiting]
        is_death_at_hand = any(one.is_in_epoch and not one.is_fenced for one in exiting)
        report = self._broken.take(now, is_death_at_hand=is_death_at_hand)
        if report is None or self._ending.is_final:
            return
        rank, suspects = report.message.rank, report.message.suspects
        named = next((worker for worker in self._house.ranked() if worker.rank == rank), None)
        self._repair.lose_epoch(now, report.text, named, is_crash=bool(suspects))

    def _find_hangs(self, now: float, observations: list[Observation], awake_since: float) -> None:
        watched = [seen for seen in observations if not self.members[seen.child].is_fenced]
        timeout_s = self.limits.hang_timeout_s
        silent = find_silent(watched, now=now, awake_since=awake_since, hang_timeout_s=timeout_s)
        spares = [self.members[one.child] for one in silent if self.members[one.child].is_spare]
        self._house.fence(spares, now)
        for suspicion in suspect_silent(silent, self.members, now):
            if not self._ending.is_final:
                self._repair.suspect(now, suspicion)

    def _apply_limits(self, now: float) -> None:
        if self._ending.is_final:
            return
        unkillable = self._house.unkillable(now)
        if unkillable:
            self._repair.give_up(now, ExitCode.UNKILLABLE, f"{names(unkillable)} did not die")
            return
        frontend = self._house.find(Role.FRONTEND)
        if frontend is not None and not frontend.is_ready:
            waited_s = now - frontend.started_s
            if waited_s > FRONTEND_START_LIMIT_S:
                text = f"frontend did not start in {waited_s:.0f} s"
                self._repair.suspect(now, Suspicion([frontend], text))
        late = self.formation.find_late(now)
        if late is None or self._ending.is_final:
            return
        if late.members:
            self._repair.suspect(now, Suspicion(late.members, late.text))
            return
        self._house.note(late.text)
        self._repair.renew(now, late.text, at_least=self.formation.ladder.next_rung())

    # -- telling ---------------------------------------------------------------------------------

    def _conclude(self, now: float) -> list[Action]:
        """The actions of this event, with the new condition for the frontend where it changed."""
        state = self.state
        if state is State.READY:
            self._repair.note_ready()
            self.planned.note_ready(now)
        self._announcements.publish(
            Condition(
                state,
                self._ending.reason or self.reason,
                worker_restarts_total=self.restarts[Role.WORKER],
                core_restarts_total=self.restarts[Role.CORE],
                frontend_restarts_total=self.restarts[Role.FRONTEND],
                recovery_seconds=self.formation.recovery_seconds,
            )
        )
        return self._house.take()
