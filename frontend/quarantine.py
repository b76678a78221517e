"""The search for a request that kills core: who is suspected, and who may go to core meanwhile.

Every request that core held when it crashed is suspected. They return in halves, with nobody else
in core, and each crash halves again; one that was there alone fails. Pure: decides; sends nothing.
"""

from typing import Final

from nvserve.frontend.journal import Entry, Journal

TOKENS_BEYOND: Final = 2  # past the crash position before a suspect is innocent
MAX_TOKENS_LOST: Final = 2  # computed before the crash, and never heard of


class Quarantine:
    """Suspected entries, each with the number of ids at which it is innocent, and the trial."""

    def __init__(self) -> None:
        self._suspects: Final[dict[Entry, int]] = {}
        self._trial: Final[set[Entry]] = set()

    def __len__(self) -> int:
        return len(self._suspects)

    def accuse(self, held: list[Entry]) -> Entry | None:
        """Core crashed while it held these; the one to fail, if it is found now."""
        self._trial.clear()
        is_found = len(held) == 1 and held[0] in self._suspects
        for entry in held:
            entry.strikes += 1
            self._suspects[entry] = len(entry.emitted) + MAX_TOKENS_LOST + TOKENS_BEYOND
        return held[0] if is_found else None

    def admits(self, entry: Entry) -> bool:
        """May core have this request now?"""
        return not self._suspects or entry in self._trial

    def open_trial(self) -> None:
        """Put the next group on trial when none is: half of those with most strikes."""
        if self._trial or not self._suspects:
            return
        most = max(entry.strikes for entry in self._suspects)
        group = [entry for entry in self._suspects if entry.strikes == most]
        group.sort(key=lambda entry: (entry.priority, entry.arrival, entry.request_id))
        self._trial.update(group[: (len(group) + 1) // 2])

    def absolve(self, journal: Journal) -> bool:
        """Clear those that ended or came far enough in core; True when a trial is over by that."""
        was_on = bool(self._trial)
        for entry, innocent_at in list(self._suspects.items()):
            is_innocent = entry in self._trial and len(entry.emitted) >= innocent_at
            if is_innocent or journal.get(entry.request_id) is not entry:
                entry.strikes = 0
                del self._suspects[entry]
                self._trial.discard(entry)
        return not self._suspects or (was_on and not self._trial)
