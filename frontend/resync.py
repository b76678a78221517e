"""Compares the journal with the requests that core says it holds, to mend after a lost message.

Exact, because one socket keeps its order: whatever core sent before its CoreStats has been taken.
Pure; the engine does what it says.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from nvserve.frontend.journal import Entry, Journal, Standing

UNANSWERED_S: Final = 5.0  # a submit without an answer was lost, or its answer was


@dataclass(slots=True)
class Differences:
    """What does not fit together."""

    lost: list[Entry] = field(default_factory=list)  # core has finished them, we were not told
    unsent: list[Entry] = field(default_factory=list)  # core never got them
    accepted: list[int] = field(default_factory=list)  # core took them, we were not told
    orphans: list[int] = field(default_factory=list)  # core goes on with what has ended here


def compare(
    journal: Journal,
    request_ids: list[int],
    now: float,
    *,
    unanswered_ids: Collection[int] = (),
    settled_s: float = 0.0,
) -> Differences:
    """The differences from what core held at the time `now`, in UNIX seconds.

    `unanswered_ids`: submits that core has, and has neither accepted nor refused so far.
    `settled_s`: when the last submit left that there was no room for at first, inf until then.
    """
    found = Differences()
    held, unanswered = set(request_ids), set(unanswered_ids)
    for entry in journal:
        is_held = entry.request_id in held
        is_unanswered = entry.request_id in unanswered
        held.discard(entry.request_id)
        unanswered.discard(entry.request_id)
        if entry.standing is Standing.ACCEPTED and not is_held:
            found.lost.append(entry)
        elif entry.standing is Standing.SENT and now - max(entry.sent_s, settled_s) > UNANSWERED_S:
            if is_held:
                found.accepted.append(entry.request_id)
            elif not is_unanswered:
                found.unsent.append(entry)
    found.orphans = sorted(held | unanswered)
    return found
