"""What a run of `bench recovery` means: requests judged by their references, times by percentiles.

Pure: what happened in, JSON values and a table out. Times are seconds of one monotonic clock.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from nvserve.scripts.bench.engine import format_table
from nvserve.scripts.bench.report import percentile

NEAR_TIE: Final = 0.05  # log-probabilities closer than this may change places in 16 bits
MAX_SHOWN: Final = 5
PHASES: Final = ("fence", "rebuild", "resume", "total")  # of nvserve:recovery_seconds

# What each line of the table is; seconds over the faults of one kind.
LINES: Final[dict[str, str]] = {
    "detected": "strike until the launcher no longer says ready",
    "resumed": "from there until the last stream has its first new token",
    "pause": "the longest silence of each stream",
    "planned": "first order until ready again, as the launcher tells it",
    "fence": "recovery_seconds: kill and wait",
    "rebuild": "recovery_seconds: new process, new group, every rank ready",
    "resume": "recovery_seconds: core takes the epoch up",
    "total": "recovery_seconds: all of them",
}


@dataclass(frozen=True, slots=True)
class Reference:
    """What one stream asks for, and what came when nobody disturbed it."""

    prompt: list[int]
    ids: list[int]
    gaps: list[float]  # by position: log-probability of the best token less that of the next


@dataclass(slots=True, eq=False)
class Ride:
    """One request of a stream."""

    stream: int
    begun_s: float
    ids: list[int] = field(default_factory=list)
    error: str = ""
    ended_s: float = math.inf  # while it runs


@dataclass(slots=True)
class Fault:
    """One process struck under load, and what followed; lengths count from the strike."""

    kind: str  # kill, stop or planned
    rank: int
    struck_s: float = 0.0
    detected_s: float | None = None  # length; None where the launcher did it itself
    ready_s: float = 0.0  # length, until the launcher said ready again
    resumed_s: list[float] = field(default_factory=list)  # by stream: its first new token
    pauses_s: list[float] = field(default_factory=list)  # by stream
    planned_s: float | None = None  # the pause that the launcher reports of a planned one
    phases_s: dict[str, float] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)  # other processes with another pid

    def touches(self, ride: Ride) -> bool:
        """The request ran while the fault did, until every stream went on."""
        over_s = self.struck_s + max(self.resumed_s, default=self.ready_s)
        return ride.begun_s <= over_s and ride.ended_s >= self.struck_s

    def times_s(self, line: str) -> list[float]:
        """What this fault adds to a line of the table."""
        match line:
            case "detected":
                return [] if self.detected_s is None else [self.detected_s]
            case "resumed":
                begun_s = self.detected_s or 0.0
                return [max(self.resumed_s) - begun_s] if self.resumed_s else []
            case "pause":
                return self.pauses_s
            case "planned":
                return [] if self.planned_s is None else [self.planned_s]
        return [self.phases_s[line]] if line in self.phases_s else []

    def describe(self) -> str:
        """One line for the terminal."""
        found = "" if self.detected_s is None else f"detected {self.detected_s:.2f}, "
        phases = ", ".join(f"{name} {value:.2f}" for name, value in self.phases_s.items())
        resumed_s = max(self.resumed_s, default=math.nan)
        text = f"{self.kind} worker {self.rank}: {found}streams go on {resumed_s:.2f} s ({phases})"
        return text + (f"; changed too: {', '.join(self.changed)}" if self.changed else "")


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a request left its reference."""

    stream: int
    position: int
    got: int
    expected: int
    gap: float  # the reference's, at this position
    faults: list[int]  # numbers of those that touched the request


@dataclass(frozen=True, slots=True)
class Loss:
    """A request that did not come to its whole end."""

    stream: int
    num_tokens: int
    error: str
    faults: list[int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """All requests of a run, judged."""

    num_requests: int
    num_touched: int  # by a fault
    lost: list[Loss]
    differences: list[Difference]

    @property
    def num_beyond_ties(self) -> int:
        return sum(difference.gap >= NEAR_TIE for difference in self.differences)

    def largest_gap(self, *, is_touched: bool) -> float:
        """Of the differences that met a fault or met none, which is rounding alone; 0 for none."""
        gaps = [one.gap for one in self.differences if bool(one.faults) == is_touched]
        return max(gaps, default=0.0)

    def complaint(self, *, is_exact: bool) -> str:
        """Why the run has failed, empty if it has not; `is_exact`: no id may differ."""
        found = [f"{len(self.lost)} requests lost"] if self.lost else []
        if is_exact and self.differences:
            found.append(f"ids of {len(self.differences)} requests differ in float32")
        return ", ".join(found)


def silence(arrivals_s: Sequence[float], since_s: float, until_s: float) -> tuple[float, float]:
    """Begin and end of the longest gap between arrivals that overlaps the time given.

    There must be an arrival before `since_s` and one after `until_s`.
    """
    gaps = [(a, b) for a, b in itertools.pairwise(arrivals_s) if b > since_s and a < until_s]
    assert gaps, f"no gap around {since_s}..{until_s} in {len(arrivals_s)} arrivals"
    return max(gaps, key=lambda gap: gap[1] - gap[0])


def first_difference(got: Sequence[int], expected: Sequence[int]) -> int | None:
    """The first position where the common lengths differ."""
    pairs = enumerate(zip(got, expected, strict=False))
    return next((position for position, (a, b) in pairs if a != b), None)


def clearest(references: Sequence[Reference], count: int) -> list[Reference]:
    """Those whose ids are least likely to change by rounding."""
    return sorted(references, key=lambda one: -min(one.gaps))[:count]


def judge(
    rides: Sequence[Ride], references: Sequence[Reference], faults: Sequence[Fault]
) -> Verdict:
    """Every request beside the reference of its stream."""
    lost: list[Loss] = []
    differences: list[Difference] = []
    num_touched = 0
    for ride in rides:
        expected = references[ride.stream]
        touching = [number for number, fault in enumerate(faults) if fault.touches(ride)]
        num_touched += bool(touching)
        if ride.error or len(ride.ids) != len(expected.ids):
            error = ride.error or f"ended after {len(ride.ids)} of {len(expected.ids)} tokens"
            lost.append(Loss(ride.stream, len(ride.ids), error, touching))
        place = first_difference(ride.ids, expected.ids)
        if place is not None:
            ids = (ride.ids[place], expected.ids[place])
            gap = expected.gaps[place]
            differences.append(Difference(ride.stream, place, *ids, gap, touching))
    return Verdict(len(rides), num_touched, lost, differences)


# -- percentiles, table and JSON -------------------------------------------------------------------

Spreads = dict[str, dict[str, dict[str, float]]]  # by kind of fault and line of the table


def spread(values: Sequence[float]) -> dict[str, float]:
    """How many, and where they lie."""
    ordered = sorted(values)
    percentiles = {f"p{percent}": percentile(ordered, percent) for percent in (50, 95)}
    return {"num": len(ordered), **percentiles, "max": ordered[-1]}


def summarize(faults: Sequence[Fault]) -> Spreads:
    """Seconds by kind of fault and line, where there are any."""
    found: Spreads = {}
    for kind in dict.fromkeys(fault.kind for fault in faults):
        struck = [fault for fault in faults if fault.kind == kind]
        values = {line: [s for fault in struck for s in fault.times_s(line)] for line in LINES}
        found[kind] = {line: spread(times) for line, times in values.items() if times}
    return found


def format_spreads(spreads: Spreads) -> str:
    """The table: a line for each kind of fault and time."""
    rows = [
        [kind, line, int(one["num"]), one["p50"], one["p95"], one["max"], LINES[line]]
        for kind, lines in spreads.items()
        for line, one in lines.items()
    ]
    return format_table(["fault", "seconds", "times", "p50", "p95", "max", "what it is"], rows)


def format_verdict(verdict: Verdict, faults: Sequence[Fault]) -> str:
    """What became of the requests and of the processes that were not struck."""
    touched = sum(bool(one.faults) for one in verdict.differences)
    lines = [
        f"requests: {verdict.num_requests} ({verdict.num_touched} met a fault), "
        f"{len(verdict.lost)} lost",
        f"ids differ from the reference: {touched} that met a fault, "
        f"{len(verdict.differences) - touched} that met none; "
        f"{verdict.num_beyond_ties} at a gap of {NEAR_TIE} or more",
        f"  the largest gap: {verdict.largest_gap(is_touched=True):.3f} with a fault, "
        f"{verdict.largest_gap(is_touched=False):.3f} without",
    ]
    lines += [f"  lost: {loss}" for loss in verdict.lost[:MAX_SHOWN]]
    worst = sorted(verdict.differences, key=lambda one: -one.gap)
    lines += [f"  differs: {difference}" for difference in worst[:MAX_SHOWN]]
    changed = [
        f"{name} (fault {number})" for number, fault in enumerate(faults) for name in fault.changed
    ]
    kept = ", ".join(changed[:MAX_SHOWN]) or "none"
    lines.append(f"processes replaced beside the struck ones: {len(changed)}: {kept}")
    return "\n".join(lines)


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict's figures and every loss and difference."""
    return {
        "num": verdict.num_requests,
        "num_touched": verdict.num_touched,
        "num_lost": len(verdict.lost),
        "num_differing": len(verdict.differences),
        "num_differing_beyond_near_ties": verdict.num_beyond_ties,
        "near_tie": NEAR_TIE,
        "largest_gap_with_fault": verdict.largest_gap(is_touched=True),
        "largest_gap_without": verdict.largest_gap(is_touched=False),
        "lost": [asdict(loss) for loss in verdict.lost],
        "differences": [asdict(difference) for difference in verdict.differences],
    }
