"""Who is suspected of a hang when processes have fallen silent. Pure; hangs.py finds the silent."""

from collections.abc import Mapping
from dataclasses import dataclass

from nvserve.scripts.actions import Member
from nvserve.scripts.hangs import ChildId, Observation, describe, find_culprits
from nvserve.scripts.ladder import Rung


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Members that live and do not do their work, and what shall be done about it at least."""

    members: list[Member]
    text: str
    at_least: Rung = Rung.REPLACE
    is_crash: bool = False  # requests may be the cause


def suspect_silent(
    silent: list[Observation], members: Mapping[ChildId, Member], now: float
) -> list[Suspicion]:
    """One of each silent process beside the workers, and one of all workers; spares are no loss."""
    suspicions, workers = [], []
    for seen in silent:
        member = members[seen.child]
        if member.is_worker:
            workers.append(seen)
        elif not member.is_spare:
            text = describe(member.name, seen, now)
            suspicions.append(Suspicion([member], text, is_crash=seen.hangs_by_itself))
    if workers:
        suspicions.append(_suspect_workers(workers, members, now))
    return suspicions


def _suspect_workers(
    silent: list[Observation], members: Mapping[ChildId, Member], now: float
) -> Suspicion:
    """The culprit among workers that wait for each other; all of them where it cannot be told."""
    culprits = find_culprits(silent)
    found = [members[seen.child] for seen in culprits]
    text = "; ".join(
        describe(member.name, seen, now) for member, seen in zip(found, culprits, strict=True)
    )
    if len(culprits) == 1 or all(seen.is_stopped for seen in culprits):
        return Suspicion(found, text, is_crash=culprits[0].hangs_by_itself)
    return Suspicion(found[:1], f"no single culprit: {text}", Rung.WORKERS, is_crash=True)
