"""Who has gone silent, and who of the silent is at fault, from progress pages alone.

Pure: observations in, names out. Reads no file and no clock.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from nvserve.protocol.control import Role
from nvserve.protocol.progress import IDLE, Phase, Snapshot

# How many times --hang-timeout a phase may last without a beat; other phases get it once, and so
# does a worker in any phase while its epoch serves, and whoever is stopped from outside.
SLOW_PHASES: Final[dict[Phase, float]] = {
    Phase.STARTING: 24.0,  # importing torch from a cold disk
    Phase.LOADING: 120.0,  # weights, capture
    Phase.REBUILDING: 12.0,  # the limits of a recovery come first
}


class ChildId(NamedTuple):
    """One start of one process; workers share one numbering of lives."""

    role: Role
    life: int


@dataclass(frozen=True, slots=True)
class Observation:
    """What the launcher saw of one child; times are seconds of its AwakeClock."""

    child: ChildId
    rank: int  # -1 for all but ranked workers
    page: Snapshot | None  # None before its first beat
    started_s: float
    is_stopped: bool = False  # state T in /proc
    is_exiting: bool = False  # dead, not reaped yet; looked for in a broken epoch, and in silence
    is_serving: bool = False  # a rank of an epoch that serves: it has no slow phase

    @property
    def phase(self) -> Phase:
        return Phase.STARTING if self.page is None else self.page.phase

    def limit_s(self, hang_timeout_s: float) -> float:
        """The silence that counts as a hang."""
        is_slow = not (self.is_serving or self.is_stopped)
        slowness = SLOW_PHASES.get(self.phase, 1.0) if is_slow else 1.0
        return hang_timeout_s * slowness

    @property
    def hangs_by_itself(self) -> bool:
        """Nobody stopped it, and it is not on its way out: what ended it is told by its death."""
        return not (self.is_stopped or self.is_exiting)

    def silence_s(self, now: float, awake_since: float) -> float:
        """Seconds without a beat, not counting before `awake_since`, when nobody watched."""
        last = self.started_s if self.page is None else max(self.page.time_s, self.started_s)
        return now - max(last, awake_since)


def find_silent(
    observations: list[Observation], *, now: float, awake_since: float, hang_timeout_s: float
) -> list[Observation]:
    """Those whose silence passes the limit of their phase."""
    return [
        seen
        for seen in observations
        if seen.silence_s(now, awake_since) > seen.limit_s(hang_timeout_s)
    ]


def find_culprits(silent: list[Observation]) -> list[Observation]:
    """The one silent rank that holds up the others, or all of them when that cannot be told.

    A rank that waits in a collective for a hung one is as silent as the hung one.
    """
    stopped = [seen for seen in silent if seen.is_stopped]
    if stopped or len(silent) < 2:
        return stopped or silent
    entered = [0 if seen.page is None else seen.page.collectives_entered for seen in silent]
    behind = [seen for seen, count in zip(silent, entered, strict=True) if count == min(entered)]
    if len(behind) == 1:
        return behind
    busy = [seen for seen in silent if seen.phase not in IDLE]
    return busy if len(busy) == 1 else silent


def describe(name: str, seen: Observation, now: float) -> str:
    """Who is silent, for how long, and where it was."""
    silent_s = seen.silence_s(now, 0.0)
    text = f"{name} has been silent for {silent_s:.1f} s in phase {seen.phase.name.lower()}"
    if seen.is_stopped:
        text += ", stopped from outside"
    if seen.page is None:
        return text
    return f"{text}, epoch {seen.page.epoch}, step {seen.page.step}"
