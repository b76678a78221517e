"""The search for a request that kills core: who is suspected, and who may go to core meanwhile.

Every request that core held when it crashed is suspected. They return in halves, with nobody else
in core, and each crash halves again; one that had a life of core to itself fails. Pure: decides;
sends nothing. Its counts are no business of core, which searches for what kills workers by counts
of its own.
"""

from dataclasses import dataclass
from typing import Final

from nvserve.frontend.journal import Entry, Journal

TOKENS_BEYOND: Final = 2  # past the crash position before a suspect is innocent
MAX_TOKENS_LOST: Final = 2  # computed before the crash, and never heard of


@dataclass(slots=True)
class Suspicion:
    """Against one entry: core's crashes it was there at, and the number of ids that clear it."""

    num_crashes: int
    innocent_at: int


class Quarantine:
    """Suspected entries and those of them on trial."""

    def __init__(self) -> None:
        self._suspects: Final[dict[Entry, Suspicion]] = {}
        self._trial: Final[set[Entry]] = set()
        self._is_alone = False  # the trial is of one, and its life of core has seen nobody else

    def __len__(self) -> int:
        return len(self._suspects)

    def accuse(self, held: list[Entry]) -> Entry | None:
        """Core crashed while it held these; the one to fail, if it is found now.

        Who ended since the crash is not among them, nor who was on its way out at it.
        """
        is_found = self._is_alone and len(held) == 1 and held[0] in self._suspects
        self._trial.clear()
        self._is_alone = False
        for entry in held:
            known = self._suspects.get(entry)
            num_crashes = 1 if known is None else known.num_crashes + 1
            innocent_at = len(entry.emitted) + MAX_TOKENS_LOST + TOKENS_BEYOND
            self._suspects[entry] = Suspicion(num_crashes, innocent_at)
        return held[0] if is_found else None

    def admits(self, entry: Entry) -> bool:
        """May core have this request now?"""
        return not self._suspects or entry in self._trial

    def open_trial(self, *, is_new_life: bool = False) -> None:
        """Put the next group on trial when none is: half of those with most crashes.

        `is_new_life`: core holds nothing yet, and of what comes only those on trial.
        """
        if not self._trial:
            self._choose()
            self._is_alone = False
        if is_new_life:
            self._is_alone = len(self._trial) == 1

    def _choose(self) -> None:
        if not self._suspects:
            return
        most = max(known.num_crashes for known in self._suspects.values())
        group = [entry for entry, known in self._suspects.items() if known.num_crashes == most]
        group.sort(key=lambda entry: (entry.priority, entry.arrival, entry.request_id))
        self._trial.update(group[: (len(group) + 1) // 2])

    def absolve(self, journal: Journal) -> bool:
        """Clear those that ended or came far enough in core; True when a trial is over by that."""
        was_on = bool(self._trial)
        for entry, known in list(self._suspects.items()):
            is_innocent = entry in self._trial and len(entry.emitted) >= known.innocent_at
            if is_innocent or journal.get(entry.request_id) is not entry:
                del self._suspects[entry]
                self._trial.discard(entry)
        return not self._suspects or (was_on and not self._trial)
