"""Forming an epoch: kill and wait, call every rank, tell core. Used at the start and after a death.

    SERVING -> FENCING -> JOINING -> RESUMING -> SERVING      (the launch begins at JOINING)

FENCING waits until the killed are gone, JOINING for every rank's EpochReady, RESUMING for core's.
Pure, like the policy above it in recovery.py, which decides when an epoch must end.
"""

import enum
from dataclasses import dataclass
from typing import Final

from nvserve.protocol.control import EpochReady, Role, StartEpoch
from nvserve.scripts.actions import Member
from nvserve.scripts.household import Household
from nvserve.scripts.ladder import Ladder, Rung

FIRST_START_LIMIT_S: Final = 3600.0  # a big model from a slow disk; a hang is found earlier
REBUILD_LIMIT_S: Final = 10.0  # survivors alone; a newcomer gets twice the first load on top
RESUME_LIMIT_S: Final = 10.0


class Stage(enum.Enum):
    """Where the epoch stands; the values name the phases of a recovery in logs and metrics."""

    SERVING = "serving"
    FENCING = "fence"
    JOINING = "rebuild"
    RESUMING = "resume"


@dataclass(frozen=True, slots=True)
class Late:
    """A stage passed its limit: whom to suspect (nobody = one rung further), and the words."""

    members: list[Member]
    text: str


class Formation:
    """The epoch and its stage. Events change it; what it wants done goes into the household."""

    def __init__(
        self, house: Household, *, tp_size: int, num_kv_blocks: int, answer_limit_s: float
    ) -> None:
        self.epoch = -1
        self.num_kv_blocks = num_kv_blocks  # 0 until measured, then fixed for the launch
        self.stage = Stage.JOINING
        self.timings: dict[str, float] = {}  # seconds by stage since the start or fence
        self.recovery_seconds: dict[str, float] = {}  # of the last recovery, by stage and total
        self.load_s = 0.0  # length of the first JOINING
        self.ladder: Final = Ladder()
        self.is_blamed = False  # the last epoch's requests may have killed a worker
        self._served_epoch = -1  # the last one that got as far as serving
        self._house: Final = house
        self._tp_size: Final = tp_size
        self._answer_limit_s: Final = answer_limit_s
        self._since = 0.0  # when the stage began
        self._deadline = 0.0  # when it is over its limit
        self._survivors: list[Member] = []  # workers of the epoch before that must answer, ...
        self._answer_by = 0.0  # ... by now

    def start(self, now: float) -> None:
        """The first epoch."""
        self._since = now
        self._join(now)

    def renew(self, now: float, at_least: Rung = Rung.REPLACE, *, is_failure: bool = True) -> Rung:
        """End the epoch: fence what the ladder says, then form the next one without the fenced.

        Begins the recovery in progress again when there is one; `is_failure`: it has failed.
        GIVE_UP changes nothing.
        """
        if self.ladder.rung is None:
            self.timings = {}
        rung = self.ladder.fall(at_least, is_failure=is_failure)
        if rung is Rung.GIVE_UP:
            return rung
        if rung >= Rung.WORKERS:
            self._house.fence(self._house.ranked(), now)
        core = self._house.find(Role.CORE)
        if rung >= Rung.CORE_AND_WORKERS and core is not None:
            self._house.fence([core], now)
        self._enter(Stage.FENCING, now, float("inf"))  # the household watches the killed
        self.bury(now)
        return rung

    def bury(self, now: float) -> None:
        """Go on when nothing half-dead is left."""
        if self.stage is Stage.FENCING and not self._house.is_fencing():
            self._join(now)

    def join(self, member: Member, message: EpochReady, now: float) -> str | None:
        """A rank or core is in the epoch; a complaint when it cannot hold the launch's pool."""
        if message.epoch != self.epoch:
            return None
        if member.child.role is Role.CORE:
            if self.stage is Stage.RESUMING:
                member.answered_epoch = member.joined_epoch = self.epoch
                self._serve(now)
            return None
        fixed = self.num_kv_blocks if self.epoch > 0 else 0
        if message.num_kv_blocks < fixed:
            return f"{member.name} has room for {message.num_kv_blocks} KV blocks, not {fixed}"
        member.answered_epoch = member.joined_epoch = self.epoch
        member.num_kv_blocks = message.num_kv_blocks
        self.resume(now)
        return None

    def resume(self, now: float) -> None:
        """Once every rank has joined and core is there, core takes up the epoch."""
        ranked = self._house.ranked()
        if self.stage is not Stage.JOINING or not self._house.is_ready(Role.CORE):
            return
        if any(member.joined_epoch != self.epoch for member in ranked):
            return
        if self.epoch == 0:
            self.load_s = now - self._since
            self.num_kv_blocks = min(member.num_kv_blocks for member in ranked)
        message = StartEpoch(
            self.epoch,
            self._tp_size,
            num_kv_blocks=self.num_kv_blocks,
            is_blamed=self.is_blamed,
        )
        self.is_blamed = False
        self._house.send(self._house.find(Role.CORE), message)
        self._enter(Stage.RESUMING, now, RESUME_LIMIT_S)

    def is_recovered_anyway(self, member: Member) -> bool:
        """Is there a recovery from the last epoch that served, of which this member has not heard?

        Its death then belongs to the same accident, and is no failure of the recovery.
        """
        is_untouched = member.joined_epoch == member.answered_epoch == self._served_epoch
        return self.ladder.rung is not None and is_untouched

    def is_going_on(self, epoch: int) -> bool:
        """It is the present epoch, and nobody is fenced because of its end."""
        return epoch == self.epoch and self.stage is not Stage.FENCING

    def next_deadline(self) -> float:
        if self.stage is Stage.SERVING:
            return float("inf")
        is_asking = self.stage is Stage.JOINING and self._survivors
        return min(self._deadline, self._answer_by) if is_asking else self._deadline

    def find_late(self, now: float) -> Late | None:
        """Who keeps the stage beyond its limit; called at the latest at `next_deadline`."""
        if self.stage is Stage.JOINING and now > self._answer_by and self._survivors:
            silent = [m for m in self._survivors if m.answered_epoch < self.epoch]
            self._survivors = []
            if silent:
                return Late(silent, f"{names(silent)} did not answer epoch {self.epoch}")
        if self.stage is Stage.SERVING or now <= self._deadline:
            return None
        waited = f"within {now - self._since:.1f} s"
        missing = [m for m in self._house.ranked() if m.joined_epoch != self.epoch]
        if missing:
            return Late([], f"{names(missing)} did not join epoch {self.epoch} {waited}")
        core = self._house.find(Role.CORE)
        assert core is not None, "a core is started with every epoch"
        return Late([core], f"core did not take up epoch {self.epoch} {waited}")

    def _join(self, now: float) -> None:
        self.epoch += 1
        is_first = self.epoch == 0
        self._survivors = self._house.ranked()
        has_newcomers = self._house.fill_ranks(now, is_first=is_first)
        if self._house.find(Role.CORE) is None:
            self._house.start(Role.CORE, now)
        for member in self._house.ranked():
            self._house.send(
                member, StartEpoch(self.epoch, self._tp_size, member.rank, self.num_kv_blocks)
            )
        limit_s = REBUILD_LIMIT_S + (2 * self.load_s if has_newcomers else 0.0)
        self._enter(Stage.JOINING, now, FIRST_START_LIMIT_S if is_first else limit_s)
        self._answer_by = now + self._answer_limit_s

    def _serve(self, now: float) -> None:
        self._enter(Stage.SERVING, now, 0.0)
        self._served_epoch = self.epoch
        if self.ladder.rung is None:
            return
        self.ladder.leave()
        self.recovery_seconds = {**self.timings, "total": sum(self.timings.values())}
        phases = ", ".join(f"{name} {length:.2f}" for name, length in self.timings.items())
        self._house.note(
            f"recovered in {self.recovery_seconds['total']:.2f} s ({phases}); epoch {self.epoch}"
        )

    def _enter(self, stage: Stage, now: float, limit_s: float) -> None:
        if self.stage is not Stage.SERVING:
            spent = self.timings.get(self.stage.value, 0.0)
            self.timings[self.stage.value] = spent + now - self._since
        self.stage = stage
        self._since = now
        self._deadline = now + limit_s


def names(members: list[Member]) -> str:
    return ", ".join(member.name for member in members)
