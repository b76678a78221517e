"""The frontend's side of core: submits requests, hands their new tokens out, survives core's death.

Owns the journal and the listeners; the sockets are its link's. Knows ids; never text.
"""

import logging
import random
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Final, assert_never

import zmq

from nvserve.frontend.core_link import CoreLink
from nvserve.frontend.errors import ApiError
from nvserve.frontend.journal import Entry, Gap, Journal, Standing
from nvserve.frontend.listener import EmitExtras, Listener
from nvserve.frontend.pace import Pace
from nvserve.frontend.quarantine import Quarantine
from nvserve.frontend.resync import compare
from nvserve.protocol.config import Config
from nvserve.protocol.control import Peers
from nvserve.protocol.messages import (
    Abort,
    Accepted,
    CoreStats,
    Emits,
    Finish,
    FinishReason,
    Hello,
    RefusalKind,
    Refused,
    Strikes,
    ToFrontend,
    make_request_id,
    unpack_ids,
)
from nvserve.protocol.sampling import SamplingParams

logger = logging.getLogger(__name__)

DRAINING_RETRY_AFTER_S: Final = 5.0

_STATUS_OF: Final = {
    RefusalKind.INVALID: 400,
    RefusalKind.BUSY: 429,
    RefusalKind.DRAINING: 503,
}


class Engine:
    """Requests by id, in the journal and with their listeners, until each one's last call."""

    def __init__(
        self,
        config: Config,
        *,
        life: int,
        launch_dir: str,
        context: "zmq.Context[zmq.Socket[bytes]]",
    ) -> None:
        self.life: Final = life
        self.stats: CoreStats | None = None
        self.journal: Final = Journal()
        self.num_gaps = 0
        self.num_replays = 0
        self.on_search: Callable[[int], object] = int  # told how many requests are suspected
        self._quarantine: Final = Quarantine()
        self._pace: Final = Pace()
        self._max_queued: Final = config.max_queued_requests
        self._max_running: Final = config.max_num_seqs
        self._timeout_s: Final = config.request_timeout_s
        self._link: Final = CoreLink(context, launch_dir, life, self._take)
        self._last_step_time = 0.0  # UNIX seconds of the last step known of, 0 before the first
        self._num_late = 0  # answers to what had ended
        self._listeners: dict[int, Listener] = {}
        self._counter = 0
        self._random: Final = random.Random(f"{config.seed} {life}")

    @property
    def is_connected(self) -> bool:
        """Core's Hello has arrived."""
        return self._link.is_connected

    @property
    def num_dropped(self) -> int:
        """Messages of no use: malformed, late, of an older life."""
        return self._link.num_dropped + self._num_late

    @property
    def last_step_age_s(self) -> float | None:
        """Since the last step known of; None before the first.

        Core tells times of the wall clock, which may be set back.
        """
        last = self._last_step_time
        return max(0.0, time.time() - last) if last else None

    # -- requests in -----------------------------------------------------------------------------

    def draw_seed(self) -> int:
        """A seed for a request that came without one."""
        return self._random.getrandbits(63)

    def submit(
        self,
        listener: Listener,
        *,
        prompt: bytes,
        sampling: SamplingParams,
        seed: int,
        priority: int = 0,
        salt: str = "",
        emitted: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> Entry:
        """Journal a request and send it, now or once core is there; a 429 over the queue limit.

        While core answers, its own limit decides; this one holds when it is down or silent.
        `prompt` is int32. `timeout_s` replaces the configured time a request may take, 0 lifts it.
        """
        # What core has not answered yet may find free slots there.
        limit = self._max_queued + (self._max_running if self.is_connected else 0)
        if max(self.journal.num_unanswered, self._link.num_unsent) >= limit:
            raise ApiError(
                429,
                f"{limit} requests are waiting already",
                code="queue_full",
                retry_after_s=self._queue_wait_s(),
            )
        now = time.time()
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        entry = Entry(
            request_id=self._next_id(),
            prompt=prompt,
            sampling=sampling,
            seed=seed,
            arrival=now,
            deadline=now + limit_s if limit_s else 0.0,
            priority=priority,
            salt=salt,
            emitted=array("i", emitted),
        )
        self.journal.add(entry)
        self._listeners[entry.request_id] = listener
        if self.is_connected and self._quarantine.admits(entry):
            self._send_submit(entry)
        return entry

    def abort(self, entry: Entry) -> None:
        """Forget a request and have core free it; no call follows. Harmless when it has ended."""
        if self._forget(entry) and entry.standing is not Standing.QUEUED:
            self._link.send(Abort(self.life, self._link.core_life, [entry.request_id]))

    def finish(self, entry: Entry) -> None:
        """As `abort`, for a request whose text reached a stop string."""
        if self._forget(entry) and entry.standing is not Standing.QUEUED:
            self._link.send(Finish(self.life, self._link.core_life, [entry.request_id]))

    def expire(self, now: float) -> None:
        """End whom core, if there is one, has not ended at the deadline; `now` in UNIX seconds."""
        for entry in self.journal.overdue(now):
            if entry.request_id in self._listeners:  # else another's end was its end too
                self._end(entry, FinishReason.DEADLINE)

    def _end(self, entry: Entry, reason: FinishReason) -> None:
        listener = self._listeners[entry.request_id]
        self.abort(entry)
        self._tell(entry.request_id, listener, (), reason)

    def _next_id(self) -> int:
        self._counter += 1
        return make_request_id(self.life, self._counter)

    def _forget(self, entry: Entry) -> bool:
        self._listeners.pop(entry.request_id, None)
        is_known = self.journal.close(entry.request_id) is not None
        self._review()
        return is_known

    def _send_submit(self, entry: Entry) -> None:
        entry.standing = Standing.SENT
        entry.sent_s = time.time()
        self.num_replays += entry.was_accepted
        self._link.send(entry.submit(self.life, self._link.core_life))

    # -- the lives of core -----------------------------------------------------------------------

    def connect(self, peers: Peers) -> None:
        """Open the sockets of a new life of core; its Hello then starts every request anew."""
        if peers.frontend_life != self.life or peers.core_life == self._link.core_life:
            return
        held = [entry for entry in self.journal if entry.standing is not Standing.QUEUED]
        self.close()
        if peers.is_blamed:
            self._accuse(held)
        self._link.open(peers.core_life)

    def close(self) -> None:
        """Close the sockets; journalled requests wait for the next life."""
        self._link.close()
        self.journal.requeue_all()

    def _on_hello(self, message: Hello) -> None:
        self._quarantine.open_trial(is_new_life=True)
        entries = [entry for entry in self.journal if self._quarantine.admits(entry)]
        logger.info("core life %d is connected, %d requests go to it", message.life, len(entries))
        for entry in entries:
            self._send_submit(entry)

    # -- the search for a request that kills core ------------------------------------------------

    def _accuse(self, held: list[Entry]) -> None:
        """Core crashed with these: suspect them, and fail the one that was there alone again."""
        condemned = self._quarantine.accuse(held)
        logger.warning("core crashed with %d requests: they are suspects now", len(held))
        self.on_search(len(self._quarantine))
        if condemned is not None:
            self._end(condemned, FinishReason.ENGINE_FAULT)

    def _review(self) -> None:
        """A trial that is over lets the next suspects go to core, or everybody when none is."""
        if not len(self._quarantine) or not self._quarantine.absolve(self.journal):
            return
        self._quarantine.open_trial()
        if not len(self._quarantine):
            self.on_search(0)
        if not self.is_connected:
            return
        for entry in self.journal:
            if entry.standing is Standing.QUEUED and self._quarantine.admits(entry):
                self._send_submit(entry)

    # -- answers of core -------------------------------------------------------------------------

    def _take(self, message: ToFrontend) -> None:
        match message:
            case Hello():
                self._on_hello(message)
            case Emits():
                self._on_emits(message)
            case Accepted():
                self._on_accepted(message)
            case Refused():
                self._on_refused(message)
            case Strikes():
                for request_id, count in zip(message.request_ids, message.counts, strict=True):
                    self.journal.strike(request_id, count)
            case CoreStats():
                self._take_stats(message)
                if message.request_ids is not None:
                    self._mend(message, message.request_ids, message.unanswered_ids or [])
            case _:
                assert_never(message)

    def _take_stats(self, message: CoreStats) -> None:
        """The last step may be one of an earlier life of core, or younger than this message."""
        self._last_step_time = max(self._last_step_time, message.last_step_time)
        self.stats = message
        is_busy = message.num_running + message.num_waiting > 0
        self._pace.note(sum(message.finished_totals), message.time, is_busy=is_busy)

    def _mend(self, stats: CoreStats, held: list[int], unanswered: list[int]) -> None:
        """Repair what a lost message broke."""
        settled_s = self._link.settled_s
        found = compare(
            self.journal, held, stats.time, unanswered_ids=unanswered, settled_s=settled_s
        )
        for entry in found.lost:
            self._restart(entry.request_id, Gap(f"request {entry.request_id}: its end was lost"))
        for entry in found.unsent:
            self.num_gaps += 1
            self._send_submit(entry)
        if found.accepted:
            self.num_gaps += 1
            self._on_accepted(Accepted(self._link.core_life, self.life, found.accepted))
        if found.orphans:
            self._link.send(Abort(self.life, self._link.core_life, found.orphans))

    def _on_accepted(self, message: Accepted) -> None:
        for request_id in message.request_ids:
            known = self.journal.get(request_id)
            is_first = known is not None and not known.was_accepted
            if self.journal.accept(request_id) is None:
                self._num_late += 1
            elif is_first:
                self._listeners[request_id].on_accepted()

    def _on_refused(self, message: Refused) -> None:
        entry = self.journal.close(message.request_id)
        listener = self._listeners.pop(message.request_id, None)
        self._review()
        if entry is None or listener is None:
            self._num_late += 1
            return
        listener.on_refused(
            ApiError(
                _STATUS_OF[message.kind],
                message.message,
                param=message.param or None,
                code="queue_full" if message.kind is RefusalKind.BUSY else None,
                retry_after_s=self._retry_after_s(message),
            )
        )

    def _retry_after_s(self, message: Refused) -> float | None:
        match message.kind:
            case RefusalKind.BUSY:
                return message.retry_after_s or self._queue_wait_s()
            case RefusalKind.DRAINING:
                return message.retry_after_s or DRAINING_RETRY_AFTER_S
            case _:
                return None

    def _queue_wait_s(self) -> float:
        """Until a full queue will have been served, by the pace of the last seconds."""
        return self._pace.wait_s(max(self._max_queued, self.journal.num_unanswered))

    def _on_emits(self, message: Emits) -> None:
        tokens = unpack_ids(message.tokens)
        if tokens:  # core tells it too, but only some times a second
            self._last_step_time = time.time()
        append = self.journal.append
        start = 0
        columns = zip(
            message.request_ids, message.firsts, message.counts, message.finishes, strict=True
        )
        for row, (request_id, first, count, finish) in enumerate(columns):
            end = start + count
            try:
                fresh = append(request_id, first, tokens[start:end], finish)
            except Gap as gap:
                self._restart(request_id, gap)
            else:
                if fresh is None:
                    self._num_late += 1
                else:
                    self._hand_out(message, row, fresh, count - len(fresh))
            start = end
        self._review()

    def _hand_out(self, message: Emits, row: int, tokens: Sequence[int], num_skipped: int) -> None:
        request_id, finish = message.request_ids[row], message.finishes[row]
        logprobs = message.logprobs[row] if message.logprobs else None
        scores = message.prompt_logprobs[row] if message.prompt_logprobs else None
        extras = EmitExtras(num_skipped, logprobs, scores) if logprobs or scores else None
        listener = self._listeners[request_id]
        if finish:
            del self._listeners[request_id]
        self._tell(request_id, listener, tokens, finish, message.cached[row], extras)

    def _tell(
        self,
        request_id: int,
        listener: Listener,
        tokens: Sequence[int],
        finish: FinishReason,
        cached: int = 0,
        extras: EmitExtras | None = None,
    ) -> None:
        try:
            listener.on_tokens(tokens, finish, cached, extras)
        except Exception as error:  # one request's fault must not stop the others' tokens
            logger.exception("request %d failed while its tokens were handed out", request_id)
            entry = self.journal.get(request_id)
            if entry is not None:
                self.abort(entry)
            listener.on_failure(error)

    def _restart(self, request_id: int, gap: Gap) -> None:
        """Emits were lost: have core forget the request and submit it again from the journal."""
        self.num_gaps += 1
        logger.error("%s; submitting it again", gap)
        self._link.send(Abort(self.life, self._link.core_life, [request_id]))
        entry = self.journal.reissue(request_id, self._next_id())
        assert entry is not None, f"request {request_id} has a gap, so it is in the journal"
        self._listeners[entry.request_id] = self._listeners.pop(request_id)
        self._send_submit(entry)
