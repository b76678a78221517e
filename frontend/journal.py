"""The accepted requests of this frontend until their final emit: enough of each to start it again.

Pure bookkeeping: ids in, new ids out. The journal's length decides what is new, so a doubled emit
changes nothing and a missing one is seen. Knows no text, no socket and no clock.
"""

import enum
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from nvserve.protocol.messages import FinishReason, Submit
from nvserve.protocol.sampling import SamplingParams

CORE_GRACE_S: Final = 1.0  # for core to end what is with it at its deadline


class Standing(enum.Enum):
    """Where a request stands with core's present life."""

    QUEUED = "queued"  # not sent to it yet
    SENT = "sent"  # no answer yet
    ACCEPTED = "accepted"


@dataclass(slots=True, eq=False)
class Entry:
    """One request. `was_accepted` means that some life of core took it: it is a promise now."""

    request_id: int
    prompt: bytes  # int32
    sampling: SamplingParams
    seed: int
    arrival: float  # UNIX seconds
    deadline: float  # UNIX seconds, 0 = none
    priority: int = 0
    salt: str = ""
    strikes: int = 0  # core's own count, kept for its next life
    emitted: "array[int]" = field(default_factory=lambda: array("i"))
    standing: Standing = Standing.QUEUED
    was_accepted: bool = False
    sent_s: float = 0.0  # UNIX seconds of its last Submit

    def submit(self, frontend_life: int, core_life: int) -> Submit:
        """The message that starts, or restarts, this request in one life of core."""
        return Submit(
            frontend_life=frontend_life,
            core_life=core_life,
            request_id=self.request_id,
            prompt=self.prompt,
            emitted=self.emitted.tobytes(),
            sampling=self.sampling,
            seed=self.seed,
            arrival=self.arrival,
            deadline=self.deadline,
            priority=self.priority,
            strikes=self.strikes,
            is_replay=self.was_accepted,
            salt=self.salt,
        )


class Gap(Exception):
    """An emit starts behind the journal's end: one before it was lost."""


class Journal:
    """Entries by request id, in the order of arrival."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self.num_unanswered = 0  # entries no life of core has accepted yet

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def get(self, request_id: int) -> Entry | None:
        return self._entries.get(request_id)

    def overdue(self, now: float) -> list[Entry]:
        """Whose deadline has passed by `now`, UNIX seconds, without a word of core in due time."""
        return [
            entry
            for entry in self._entries.values()
            if 0 < entry.deadline <= now
            and (entry.standing is Standing.QUEUED or entry.deadline + CORE_GRACE_S <= now)
        ]

    def add(self, entry: Entry) -> None:
        assert entry.request_id not in self._entries, f"request {entry.request_id} is in already"
        self._entries[entry.request_id] = entry
        self.num_unanswered += not entry.was_accepted

    def accept(self, request_id: int) -> Entry | None:
        """Core took it; None when it is not waiting for that answer (any more)."""
        entry = self._entries.get(request_id)
        if entry is None or entry.standing is not Standing.SENT:
            return None
        entry.standing = Standing.ACCEPTED
        if not entry.was_accepted:
            entry.was_accepted = True
            self.num_unanswered -= 1
        return entry

    def strike(self, request_id: int, strikes: int) -> None:
        """Core says how often the request was part of a crashed step; it may have ended."""
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.strikes = strikes

    def append(
        self, request_id: int, first: int, tokens: Sequence[int], finish: FinishReason
    ) -> Sequence[int] | None:
        """Take an emit: its ids that are new, or None when nothing of it is for us.

        A final emit ends the entry. Raises Gap, with nothing changed, when ids are missing before
        `first`; a final emit without ids can show a gap as well.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.standing is not Standing.ACCEPTED:
            return None
        overlap = len(entry.emitted) - first
        if overlap < 0:
            raise Gap(f"request {request_id}: emit at {first}, journal ends at {first + overlap}")
        if overlap:
            tokens = tokens[overlap:]
        entry.emitted.extend(tokens)
        if finish is not FinishReason.NONE:
            del self._entries[request_id]
        elif overlap and not tokens:
            return None
        return tokens

    def close(self, request_id: int) -> Entry | None:
        """Forget a request: finished by a stop string, aborted or refused."""
        entry = self._entries.pop(request_id, None)
        if entry is not None and not entry.was_accepted:
            self.num_unanswered -= 1
        return entry

    def reissue(self, request_id: int, new_id: int) -> Entry | None:
        """Give a request another id, under which it can be submitted again.

        Whatever core still sends under the old id then finds no entry.
        """
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        entry.request_id = new_id
        entry.standing = Standing.QUEUED
        self._entries[new_id] = entry
        return entry

    def requeue_all(self) -> list[Entry]:
        """Core's life has ended: every entry has to be submitted again, oldest first."""
        for entry in self._entries.values():
            entry.standing = Standing.QUEUED
        return list(self._entries.values())
