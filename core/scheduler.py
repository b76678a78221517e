"""Which tokens run in the next step: the decisions of core, without socket, clock or thread.

Knows ids and counts; never sees text, a tensor or a time it was not told.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from nvserve.core.admission import Admission
from nvserve.core.batch import Batch
from nvserve.core.block_tables import BlockTables
from nvserve.core.constraint import Matcher
from nvserve.core.deadlines import Deadlines
from nvserve.core.emission import Emission
from nvserve.core.errors import EpochFault, RequestRefused
from nvserve.core.limits import Limits
from nvserve.core.metrics import Counters
from nvserve.core.prefix_cache import BlockHasher
from nvserve.core.replies import Replies
from nvserve.core.request import Phase, Request
from nvserve.core.step_delta import step_masks
from nvserve.core.step_ledger import MAX_IN_FLIGHT, Report, Step, StepLedger
from nvserve.core.suspects import Suspects
from nvserve.core.waiting_queue import WaitingQueue
from nvserve.protocol.control import EpochBroken
from nvserve.protocol.messages import FinishReason, RefusalKind, SchedulerOutput, StepFailed, Submit


class Scheduler:
    """Continuous batching with chunked prefill, first come first served within a priority.

    Running requests decode first, one token each, the oldest ones where the budget is smaller than
    their number; what is left of it goes to prompts in chunks, and a prompt is admitted only when
    all its blocks are free. When a decode finds no block, the youngest running request is preempted
    and later starts again from its tokens. Small requests may pass one that waits for blocks, but
    only `max_bypasses` times.
    """

    def __init__(self, limits: Limits, replies: Replies, hash_key: bytes) -> None:
        self._limits: Final = limits
        self._admission: Final = Admission(limits)
        self._hasher: Final = (
            BlockHasher(hash_key, limits.block_size) if limits.has_prefix_cache else None
        )
        self._replies: Final = replies
        self._deadlines: Final = Deadlines()
        self.suspects: Final = Suspects()
        self._last_epoch = -1  # that ended, and who was in flight then, unless blamed already
        self._last_involved: list[Request] = []
        self._last_broken: EpochBroken | None = None  # what was told of its end
        self.counters: Final = Counters()
        self.last_step_time = 0.0  # UNIX seconds of the last commit
        self.requests: Final[dict[int, Request]] = {}  # all that are not finished
        self.waiting: Final = WaitingQueue(limits.max_bypasses)
        self.batch: Batch | None = None  # None until the size of the pool is known
        self.ledger: StepLedger | None = None  # None between epochs

    # -- requests in -----------------------------------------------------------------------------

    def submit(
        self, message: Submit, matcher: Matcher | None = None, *, num_compiling: int = 0
    ) -> None:
        """Accept or refuse a request; a replay is never refused for load.

        `matcher` is its compiled grammar, before which its load was checked.
        """
        if self.holds(message.request_id):
            self.counters.dropped += 1
            return
        num_blocks = self.batch.tables.pool.num_usable if self.batch is not None else None
        try:
            if matcher is None:
                self.check_load(message, num_compiling)
            request = self._admission.take(message, matcher, num_blocks)
        except RequestRefused as refusal:
            self.refuse(message.request_id, refusal)
            return
        if request is not None:
            self._accept(request)

    def check_load(self, message: Submit, num_compiling: int) -> None:
        """RequestRefused when too many wait already, `num_compiling` for their grammars."""
        num_waiting = len(self.waiting) + num_compiling
        num_running = len(self.batch) if self.batch is not None else 0
        if not message.is_replay:
            self._admission.check_load(num_waiting=num_waiting, num_running=num_running)

    def holds(self, request_id: int) -> bool:
        """Is this request accepted and unfinished, or about to be?"""
        return request_id in self.requests or request_id in self._admission.held

    @property
    def held_ids(self) -> list[int]:
        """Requests that wait for the first epoch to be accepted or refused."""
        return list(self._admission.held)

    def refuse(self, request_id: int, refusal: RequestRefused) -> None:
        """Answer a submit that is not taken."""
        self.counters.refused += 1
        self._replies.refuse(request_id, refusal)

    def end(self, request_ids: list[int], reason: FinishReason) -> None:
        """Finish requests from outside; unknown ids are counted."""
        for request_id in request_ids:
            if request_id in self.requests:
                self._end(self.requests[request_id], reason)
            elif request_id in self._admission.held:
                del self._admission.held[request_id]
                self.refuse(request_id, RequestRefused("", "aborted", RefusalKind.DRAINING))
            else:  # it finished meanwhile: a benign race
                self.counters.dropped += 1

    def expire(self, now: float, uncompiled: Sequence[Submit] = ()) -> None:
        """Finish requests whose deadline has passed; `now` in UNIX seconds.

        `uncompiled` are such submits whose grammar was not ready.
        """
        for request in self._admission.pop_late(now):
            self._accept(request)
        for message in uncompiled:
            try:
                self._accept(self._admission.make_request(message))
            except RequestRefused as refusal:
                self.refuse(message.request_id, refusal)
        for request_id in self._deadlines.pop_passed(now):
            if request_id in self.requests and 0 < self.requests[request_id].deadline <= now:
                self._end(self.requests[request_id], FinishReason.DEADLINE)

    def drop_frontend(self) -> None:
        """Free everything a frontend left behind; nobody is there to be told."""
        for request in list(self.requests.values()):
            self._finish(request, FinishReason.ABORT)
        self._admission.held.clear()

    def _accept(self, request: Request) -> None:
        self.counters.accepted += 1
        self.counters.recovered += request.is_replay
        self.counters.prompt_tokens += request.num_prompt
        self._replies.accept(request.request_id)
        self.requests[request.request_id] = request
        self.waiting.add(request)
        if reason := request.finish_reason():  # nothing to do, or the replay of a complete output
            self._end(request, reason)
            return
        if request.deadline:
            self._deadlines.add(request.deadline, request.request_id, self.requests)
        if request.strikes:
            self.suspects.add(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Finish without a further token; one that is in flight will be dropped."""
        self._finish(request, reason)
        self._replies.finish(request, reason)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.phase is Phase.RUNNING:
            assert self.batch is not None
            self.batch.vacate(request)
        else:
            self.waiting.remove(request)
        request.move_to(Phase.FINISHED)
        del self.requests[request.request_id]
        self.suspects.forget(request)
        self.counters.finished[reason] += 1

    # -- epochs and steps in ---------------------------------------------------------------------

    def start_epoch(
        self, *, epoch: int, tp_size: int, num_kv_blocks: int, is_blamed: bool = False
    ) -> None:
        """Begin with empty slots and an empty cache; everybody computes again from the tokens.

        `is_blamed`: a worker of the last epoch died in a way its requests may be the cause of.
        """
        self.leave_epoch()
        if is_blamed:
            self._accuse()
        self._last_involved, self._last_broken = [], None
        tables = BlockTables(num_kv_blocks, self._limits.block_size, self._hasher)
        self.batch = Batch(self._limits.max_num_seqs, tables)
        self.ledger = StepLedger(epoch=epoch, tp_size=tp_size, vocab_size=self._limits.vocab_size)
        for request in self._admission.pop_held():
            try:
                self._admission.check_size(request, tables.pool.num_usable)
                self._accept(request)
            except RequestRefused as refusal:
                self.refuse(request.request_id, refusal)

    def leave_epoch(self) -> None:
        """Preempt everybody; what is in flight is lost.

        Of late reports only a rank's own fault still counts: see _report_late.
        """
        if self.batch is None or self.ledger is None:
            return
        self._last_epoch, self._last_involved = self.ledger.epoch, self.ledger.involved()
        self.ledger = None
        self.counters.recovered += len(self.batch)
        for request in list(self.batch.running.values()):
            self._preempt(request)
        for request in self.requests.values():
            request.ready_step = 0
        self.counters.note_cache(self.batch.tables)

    def report(self, message: Report, now: float) -> EpochBroken | None:
        """Take a worker's answer and commit what is complete; says so when it ends the epoch."""
        ledger = self.ledger
        if ledger is None or message.epoch != ledger.epoch:
            return self._report_late(message)
        try:
            if not ledger.report(message):
                self.counters.dropped += 1
        except EpochFault as fault:
            return self.fail_epoch(fault)
        while (step := ledger.pop_complete()) is not None:
            self._commit(step)
            self.last_step_time = now
        return None

    def fail_epoch(self, fault: EpochFault) -> EpochBroken:
        """Leave the epoch for a fault in it; blame the requests in flight, if they may be."""
        assert self.ledger is not None, "no epoch to fail"
        self.leave_epoch()
        request_ids = [request.request_id for request in self._last_involved]
        if fault.is_blamed:
            self._accuse()
        broken = EpochBroken(self._last_epoch, fault.rank, fault.step, fault.reason, request_ids)
        self._last_broken = broken
        return broken

    def _report_late(self, message: Report) -> EpochBroken | None:
        """A step failed, but a peer that lost this rank by it was quicker: the same blame.

        Says so again where nobody knew yet which rank is at fault.
        """
        is_of_last = self.ledger is None and message.epoch == self._last_epoch
        if not is_of_last or not isinstance(message, StepFailed) or message.is_peer_lost:
            self.counters.dropped += 1
            return None
        self._accuse()
        told = self._last_broken
        if told is None or told.rank >= 0:
            return None
        self._last_broken = msgspec.structs.replace(
            told, rank=message.rank, step=message.step, reason=message.message
        )
        return self._last_broken

    def _accuse(self) -> None:
        """Suspect who was in flight, once an epoch, and fail the one that has crashed alone."""
        accused, self._last_involved = self._last_involved, []
        condemned = self.suspects.accuse(accused)
        if condemned is not None:
            self._end(condemned, FinishReason.ENGINE_FAULT)
        self._replies.strike([one for one in accused if not one.is_finished])

    def _commit(self, step: Step) -> None:
        """Make computed blocks findable, hand out tokens, finish who is done."""
        assert self.batch is not None
        for request, _, end in step.chunks:
            if request.phase is Phase.RUNNING:  # else it has left, and its blocks with it
                request.num_prefilled = end
                self.batch.tables.publish(request)
        emission = Emission()
        emission.add_step(step)
        self.counters.generated_tokens += len(emission.token_ids)
        for index, reason in emission.finished:
            self._finish(emission.requests[index], reason)
        self._replies.emit(emission)
        if len(self.suspects):
            self._replies.strike(self.suspects.absolve())

    @property
    def is_idle(self) -> bool:
        """No step is in flight."""
        return self.ledger is None or not self.ledger.num_in_flight

    # -- decisions out ---------------------------------------------------------------------------

    def plan(self) -> SchedulerOutput | None:
        """The next step; None when nothing can run now or enough steps are in flight."""
        ledger, batch = self.ledger, self.batch
        if ledger is None or batch is None or ledger.num_in_flight >= MAX_IN_FLIGHT:
            return None
        if len(self.suspects):
            self._isolate_suspects(batch)
        self._plan_decodes(batch)
        self._plan_chunks(batch, self._limits.max_num_batched_tokens - len(batch.decoding))
        if not batch.decoding and not batch.delta.chunks:
            return None  # what changed stays in the delta
        rows = batch.start_step()
        step = ledger.open(rows, batch.delta.chunks)
        is_full_tail = any([request.needs_full_tail for request in rows])
        return batch.delta.take(
            epoch=ledger.epoch,
            step=step.number,
            is_full_tail=is_full_tail,
            masks=step_masks(rows) if is_full_tail else None,
        )

    def _plan_decodes(self, batch: Batch) -> None:
        """Bring the decode list up to date; afterwards all in it can run one token."""
        due = [request for request in batch.decoding if request.num_planned >= request.decode_until]
        for request in due:
            if not request.can_decode:  # before an older one looks for a row
                batch.leave(request)
                batch.joining.append(request)
        if batch.joining:
            self._make_rows_free(batch)
        candidates = [request for request in due if request.is_decoding] + batch.joining
        batch.joining = []
        # Oldest first: who must yield comes later, so nothing of its is in the delta yet.
        for request in sorted(candidates, key=lambda request: request.order):
            if request.phase is not Phase.RUNNING or request.is_planned_to_its_end:
                continue  # preempted for an older one just now, or the commit will finish it
            is_full = len(batch.decoding) >= self._limits.max_num_batched_tokens
            if request.is_waiting_for_token or (is_full and not request.is_decoding):
                batch.joining.append(request)
            elif self._find_blocks(batch, request) and not request.is_decoding:
                batch.join(request)

    def _make_rows_free(self, batch: Batch) -> None:
        """Let the youngest leave the decode list where it has no row for an older request."""
        limit = self._limits.max_num_batched_tokens
        if len(batch.decoding) + len(batch.joining) <= limit:
            return
        ready = [request for request in batch.decoding + batch.joining if request.can_decode]
        ready.sort(key=lambda request: request.order)
        for request in ready[limit:]:
            if request.is_decoding:
                batch.leave(request)
                batch.joining.append(request)

    def _find_blocks(self, batch: Batch, request: Request) -> bool:
        """Let the request decode while its table lasts, growing it or making room for that.

        False when it had to make room itself.
        """
        while request.num_planned >= batch.tables.capacity(request) and not batch.grow(request):
            youngest = batch.youngest
            self._preempt(youngest)
            if youngest is request:
                return False
        decode_until = min(request.max_total - 1, batch.tables.capacity(request))
        request.decode_until = len(request.tokens) if request.must_wait else decode_until
        return True

    def _plan_chunks(self, batch: Batch, budget: int) -> None:
        """Spend the budget on prompts, begun ones first."""
        assert self.ledger is not None
        for request in batch.prefilling[:]:
            if budget <= 0:
                return
            budget -= batch.plan_chunk(request, budget)
        turns = self.waiting.turns()
        for request in turns:
            if budget <= 0 or not batch.num_free_slots:
                return
            if not self.suspects.admits(request):
                continue
            if request.ready_step > self.ledger.num_committed:
                return  # its own token is in flight; nobody takes its place meanwhile
            if not batch.tables.admit(request, num_running=len(batch)):
                turns.block()
                continue
            turns.take()
            batch.enter(request)
            budget -= batch.plan_chunk(request, budget)

    def _preempt(self, request: Request) -> None:
        """Back to waiting with all tokens and without blocks."""
        assert self.batch is not None
        self.batch.vacate(request)
        request.move_to(Phase.WAITING)
        self.waiting.add(request)
        if self.ledger is not None:
            request.ready_step = self.ledger.num_opened
            self.counters.preempted += 1

    def _isolate_suspects(self, batch: Batch) -> None:
        """Keep everybody but the requests on trial out of the coming steps."""
        self.suspects.open_trial()
        for request in list(batch.running.values()):
            if not self.suspects.admits(request):
                self._preempt(request)

    def check(self) -> None:
        """Assert every invariant from scratch."""
        self.waiting.check()
        self.suspects.check()
        if self.batch is None:
            return
        self.batch.check()
        num_placed = len(self.waiting) + len(self.batch)
        assert num_placed == len(self.requests), f"{num_placed} of {len(self.requests)} placed"
        num_known = num_placed + sum(self.counters.finished)
        assert self.counters.accepted == num_known, "a request was lost"
