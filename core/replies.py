"""What core still has to tell the frontend, in order, while the socket may be full.

Decides what is sent together; never touches a socket. Bounded by the number of requests: what
cannot be sent is merged, so a slow frontend costs one entry a request.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from nvserve.core import logprobs
from nvserve.core.emission import Emission
from nvserve.core.errors import RequestRefused
from nvserve.core.request import Request
from nvserve.protocol.messages import (
    Accepted,
    Emits,
    FinishReason,
    Logprobs,
    Refused,
    Strikes,
)

Reply = Accepted | Refused | Emits | Strikes


class Replies:
    """Messages for one life of the frontend; a new life starts with none."""

    def __init__(self, core_life: int) -> None:
        self._core_life: Final = core_life
        self._frontend_life = -1
        self._queue: deque[Reply] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def restart(self, frontend_life: int) -> None:
        """Forget what was meant for the frontend before."""
        self._frontend_life = frontend_life
        self._queue.clear()

    # -- in

    def accept(self, request_id: int) -> None:
        self._queue.append(Accepted(self._core_life, self._frontend_life, [request_id]))

    def refuse(self, request_id: int, refusal: RequestRefused) -> None:
        self._queue.append(
            Refused(
                self._core_life,
                self._frontend_life,
                request_id,
                refusal.kind,
                refusal.message,
                refusal.param,
                refusal.retry_after_s,
            )
        )

    def finish(self, request: Request, reason: FinishReason) -> None:
        """The final emit of a request that gets no further token."""
        emission = Emission()
        emission.add_final(request, reason)
        self.emit(emission)

    def emit(self, emission: Emission) -> None:
        if emission.requests:
            self._queue.append(
                emission.message(core_life=self._core_life, frontend_life=self._frontend_life)
            )

    def strike(self, requests: list[Request]) -> None:
        """Their counts of crashes, for the journal."""
        if requests:
            request_ids = [request.request_id for request in requests]
            counts = [request.strikes for request in requests]
            self._queue.append(Strikes(self._core_life, self._frontend_life, request_ids, counts))

    # -- out

    def flush(self, send: Callable[[Reply], bool]) -> bool:
        """Send all in order; False when `send` refused one, which is kept with all after it."""
        if len(self._queue) > 1:
            self._merge()
        queue = self._queue
        while queue:
            if not send(queue[0]):
                return False
            queue.popleft()
        return True

    def _merge(self) -> None:
        """One Accepted, then the refusals, then one Emits, then one Strikes.

        Only the order within a request matters: its Accepted before its emits, these by index, and
        its last strikes after them.
        """
        strikes: dict[int, int] = {}
        accepted: list[int] = []
        refused: list[Refused] = []
        emits: list[Emits] = []
        for reply in self._queue:
            match reply:
                case Accepted():
                    accepted += reply.request_ids
                case Refused():
                    refused.append(reply)
                case Emits():
                    emits.append(reply)
                case Strikes():
                    strikes |= zip(reply.request_ids, reply.counts, strict=True)
        self._queue.clear()
        if accepted:
            self._queue.append(Accepted(self._core_life, self._frontend_life, accepted))
        self._queue.extend(refused)
        if emits:
            self._queue.append(emits[0] if len(emits) == 1 else merge_emits(emits))
        if strikes:
            lives = (self._core_life, self._frontend_life)
            self._queue.append(Strikes(*lives, list(strikes), list(strikes.values())))


@dataclass(slots=True)
class _Entry:
    """What one request gets out of several Emits."""

    request_id: int
    first: int
    cached: int
    tokens: bytearray = field(default_factory=bytearray)
    finish: FinishReason = FinishReason.NONE
    logprobs: Logprobs | None = None
    scores: Logprobs | None = None


def merge_emits(emits: list[Emits]) -> Emits:
    """Several Emits, oldest first, as one with an entry a request."""
    entries: list[_Entry] = []
    open_entries: dict[int, _Entry] = {}  # a request id may come again after its final emit
    for message in emits:
        start = 0
        for row, request_id in enumerate(message.request_ids):
            entry = open_entries.get(request_id)
            if entry is None:
                entry = _Entry(request_id, message.firsts[row], message.cached[row])
                open_entries[request_id] = entry
                entries.append(entry)
            end = start + 4 * message.counts[row]
            _extend(entry, message, row, message.tokens[start:end])
            start = end
            if entry.finish is not FinishReason.NONE:
                del open_entries[request_id]
    return Emits(
        emits[0].core_life,
        emits[0].frontend_life,
        request_ids=[entry.request_id for entry in entries],
        firsts=[entry.first for entry in entries],
        counts=[len(entry.tokens) // 4 for entry in entries],
        tokens=b"".join(entry.tokens for entry in entries),
        finishes=[entry.finish for entry in entries],
        cached=[entry.cached for entry in entries],
        logprobs=[entry.logprobs for entry in entries]
        if any(message.logprobs for message in emits)
        else None,
        prompt_logprobs=[entry.scores for entry in entries]
        if any(message.prompt_logprobs for message in emits)
        else None,
    )


def _extend(entry: _Entry, message: Emits, row: int, tokens: bytes) -> None:
    if message.logprobs is not None:
        entry.logprobs = logprobs.join(
            entry.logprobs, message.logprobs[row], shift=len(entry.tokens) // 4
        )
    if message.prompt_logprobs is not None:
        entry.scores = logprobs.join(entry.scores, message.prompt_logprobs[row])
    entry.tokens += tokens
    entry.finish = message.finishes[row]
