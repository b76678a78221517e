"""A whole server around one Scheduler: a frontend with its journal, workers, and lag between them.

Everything a client would see is compared with `reference`, the answer worked out without batch,
blocks or steps. Used by unit tests step by step and by the model checks at random.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from model_check import scores
from model_check.answer import EveryThird, reference
from model_check.fake_worker import FakeWorker
from nvserve.core.limits import Limits
from nvserve.core.replies import Replies, Reply
from nvserve.core.request import Phase, Request
from nvserve.core.scheduler import Scheduler
from nvserve.protocol.control import EpochBroken
from nvserve.protocol.messages import (
    Accepted,
    Emits,
    FinishReason,
    ModelOutput,
    Refused,
    SchedulerOutput,
    StepDone,
    StepFailed,
    Strikes,
    Submit,
    pack_ids,
    unpack_ids,
)
from nvserve.protocol.sampling import SamplingParams

CORE_LIFE = 3
FRONTEND_LIFE = 5


@dataclass
class Entry:
    """The journal of one request in the frontend."""

    submit: Submit
    emitted: list[int] = field(default_factory=list)
    answer: Accepted | Refused | None = None
    finish: FinishReason = FinishReason.NONE
    ended_by: set[FinishReason] = field(default_factory=set)  # asked for from outside
    cached: int = -1
    strikes: int = 0
    num_scored: int = 0  # positions of the prompt, the first included, whose logprobs came
    reference: tuple[list[int], FinishReason] | None = None


class World:
    """One launch. `send`, `work` and `deliver` move messages; `run` does all until the end."""

    def __init__(
        self,
        limits: Limits,
        *,
        num_blocks: int = 65,
        tp_size: int = 1,
        hash_key: bytes = b"a key for tests",
    ) -> None:
        self.limits = limits
        self.hash_key = hash_key
        self.num_blocks = num_blocks
        self.tp_size = tp_size
        self.journal: dict[int, Entry] = {}
        self.closed: dict[int, Entry] = {}
        self.next_id = 0
        self.now = 1_000.0
        self.epoch = -1
        self.num_steps = 0
        self.num_preempted = 0  # and hits, by schedulers that are gone
        self.num_hit_tokens = 0
        self.broken: list[EpochBroken] = []
        self.num_blamed = 0  # epochs whose requests the launcher suspects
        self.is_frontend_blocked = False
        self.frontend_life = FRONTEND_LIFE
        self.start_core()
        self.worker = FakeWorker(
            num_blocks=num_blocks, block_size=limits.block_size, vocab_size=limits.vocab_size
        )
        self.start_epoch()

    def start_core(self) -> None:
        self.replies = Replies(CORE_LIFE)
        self.replies.restart(self.frontend_life)
        self.scheduler = Scheduler(self.limits, self.replies, self.hash_key)

    # -- the frontend

    def make_submit(
        self,
        prompt: list[int],
        *,
        seed: int = 7,
        priority: int = 0,
        deadline: float = 0.0,
        salt: str = "",
        strikes: int = 0,
        **sampling: object,
    ) -> Submit:
        self.next_id += 1
        self.now += 0.001
        return Submit(
            frontend_life=self.frontend_life,
            core_life=CORE_LIFE,
            request_id=self.next_id,
            prompt=pack_ids(prompt),
            emitted=b"",
            sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
            seed=seed,
            arrival=self.now,
            deadline=deadline,
            priority=priority,
            strikes=strikes,
            salt=salt,
        )

    def submit(self, prompt: list[int], **fields: object) -> int:
        """Journal and send a request; returns its id."""
        submit = self.make_submit(prompt, **fields)  # type: ignore[arg-type]
        self.journal[submit.request_id] = Entry(submit)
        self.scheduler.submit(submit, self.matcher(submit))
        self.flush()
        return submit.request_id

    def matcher(self, submit: Submit) -> EveryThird | None:
        """What the compiler of core makes of the request's grammar."""
        if not submit.sampling.grammar:
            return None
        return EveryThird(self.limits.vocab_size, self.limits.eos_token_ids)

    def end(self, request_id: int, reason: FinishReason) -> None:
        """The frontend asks for the end of a request, which may have ended already."""
        if request_id in self.journal:
            self.journal[request_id].ended_by.add(reason)
        self.scheduler.end([request_id], reason)
        self.flush()

    def entry(self, request_id: int) -> Entry:
        return self.journal.get(request_id) or self.closed[request_id]

    def request(self, request_id: int) -> Request:
        return self.scheduler.requests[request_id]

    def flush(self) -> None:
        self.replies.flush(self._receive)

    def _receive(self, reply: Reply) -> bool:
        if self.is_frontend_blocked:
            return False
        assert (reply.core_life, reply.frontend_life) == (CORE_LIFE, self.frontend_life)
        match reply:
            case Accepted():
                for request_id in reply.request_ids:
                    entry = self.journal[request_id]
                    assert entry.answer is None, f"{request_id} was answered twice"
                    entry.answer = reply
            case Refused():
                entry = self.journal.pop(reply.request_id)
                assert entry.answer is None, f"{reply.request_id} was answered twice"
                entry.answer = reply
                self.closed[reply.request_id] = entry
            case Emits():
                self._take_emits(reply)
            case Strikes():
                for request_id, count in zip(reply.request_ids, reply.counts, strict=True):
                    if request_id in self.journal:
                        self.journal[request_id].strikes = count
        return True

    def _take_emits(self, emits: Emits) -> None:
        tokens = unpack_ids(emits.tokens)
        assert len(set(emits.request_ids)) == len(emits.request_ids)
        start = 0
        for index, request_id in enumerate(emits.request_ids):
            entry = self.journal[request_id]  # KeyError: emitted after its final emit
            assert isinstance(entry.answer, Accepted), f"{request_id} emitted before its answer"
            assert emits.firsts[index] == len(entry.emitted), "tokens are missing or repeated"
            entry.emitted += tokens[start : start + emits.counts[index]]
            start += emits.counts[index]
            known = (entry.emitted, entry.num_scored)
            entry.num_scored = scores.check(emits, index, entry.submit, *known)
            entry.cached = emits.cached[index]
            if emits.finishes[index] is not FinishReason.NONE:
                entry.finish = emits.finishes[index]
                self.closed[request_id] = self.journal.pop(request_id)
            self._compare(entry)

    def _compare(self, entry: Entry) -> None:
        """Never a wrong token; the right end too, unless somebody asked for another."""
        if entry.reference is None:
            entry.reference = reference(entry.submit, self.limits)
        tokens, finish = entry.reference
        assert entry.emitted == tokens[: len(entry.emitted)], f"wrong tokens: {entry}"
        if entry.finish is FinishReason.NONE:
            assert len(entry.emitted) < len(tokens), f"complete, but not ended: {entry}"
        elif entry.finish is FinishReason.DEADLINE:
            assert 0 < entry.submit.deadline <= self.now
        elif entry.finish is FinishReason.ENGINE_FAULT:
            assert self.broken or self.num_blamed
        elif (entry.emitted, entry.finish) != (tokens, finish):
            assert entry.finish in entry.ended_by, f"wrong end: {entry}"

    def restart_frontend(self) -> None:
        """The frontend dies with its journal; core frees what belonged to it."""
        self.frontend_life += 1
        self.journal.clear()
        self.scheduler.drop_frontend()
        self.replies.restart(self.frontend_life)

    def expire(self, seconds: float, uncompiled: Sequence[Submit] = ()) -> None:
        """Time passes, too much of it for those whose grammar is not compiled.

        Nobody is kept beyond its deadline, with or without an epoch.
        """
        self.now += seconds
        for submit in uncompiled:
            self.journal[submit.request_id] = Entry(submit)
        self.scheduler.expire(self.now, uncompiled)
        self.flush()
        if not self.is_frontend_blocked:
            late = [id_ for id_, e in self.journal.items() if 0 < e.submit.deadline <= self.now]
            assert not late, f"{late} are kept beyond their deadlines"

    # -- the workers

    def start_epoch(self, *, is_blamed: bool = False) -> None:
        self.epoch += 1
        self.num_blamed += is_blamed
        self.leave_workers()
        self.worker.start_epoch(self.epoch)
        self.scheduler.start_epoch(
            epoch=self.epoch,
            tp_size=self.tp_size,
            num_kv_blocks=self.num_blocks,
            is_blamed=is_blamed,
        )
        self.flush()

    def leave_workers(self) -> None:
        """Nothing under way between core and the workers arrives any more."""
        self.sent: deque[SchedulerOutput] = deque()
        self.reports: list[deque[ModelOutput | StepDone]] = [deque() for _ in range(self.tp_size)]

    def send(self) -> bool:
        """Plan a step and send it; False when there is none."""
        output = self.scheduler.plan()
        if output is None:
            return False
        self.num_steps += 1
        assert self.scheduler.batch is not None
        num_tokens = len(self.scheduler.batch.decoding)
        num_tokens += sum(output.chunks.counts) if output.chunks is not None else 0
        assert 0 < num_tokens <= self.limits.max_num_batched_tokens
        self.sent.append(output)
        return True

    def work(self) -> bool:
        """The workers run the oldest step sent."""
        if not self.sent:
            return False
        output = self.worker.run(self.sent.popleft())
        self.reports[0].append(output)
        for rank in range(1, self.tp_size):
            self.reports[rank].append(StepDone(output.epoch, output.step, rank, output.checksum))
        return True

    def deliver(self, rank: int = 0) -> bool:
        """Core receives the oldest report of a rank."""
        if not self.reports[rank]:
            return False
        broken = self.scheduler.report(self.reports[rank].popleft(), self.now)
        assert broken is None, f"{broken}"
        self.flush()
        return True

    def fail_step(self) -> EpochBroken:
        """A rank reports an exception in the oldest step in flight; a new epoch begins."""
        assert self.scheduler.ledger is not None
        broken = self.break_epoch(self.scheduler.ledger.num_committed)
        self.start_epoch()
        return broken

    def break_epoch(self, step: int, *, rank: int = 0, is_peer_lost: bool = False) -> EpochBroken:
        """A rank reports that a step failed."""
        failed = StepFailed(self.epoch, step, rank, "it broke", is_peer_lost)
        broken = self.scheduler.report(failed, self.now)
        assert broken is not None
        self.broken.append(broken)
        self.flush()
        return broken

    def restart_core(self, *, has_epoch: bool = True) -> None:
        """Core dies; the frontend resubmits its journal to the next one, in a new epoch or none."""
        self.scheduler.leave_epoch()  # only so that its counters are complete
        self.num_preempted += self.scheduler.counters.preempted
        self.num_hit_tokens += self.scheduler.counters.hit_tokens
        self.start_core()
        self.leave_workers()
        if has_epoch:
            self.start_epoch()
        for entry in self.journal.values():
            entry.answer = None
            self.scheduler.submit(self.replay(entry), self.matcher(entry.submit))
        self.flush()

    def replay(self, entry: Entry) -> Submit:
        submit = entry.submit
        fields = {name: getattr(submit, name) for name in submit.__struct_fields__}
        changed = {"emitted": pack_ids(entry.emitted), "strikes": entry.strikes, "is_replay": True}
        return Submit(**(fields | changed))

    # -- all together

    def step(self) -> bool:
        """One step from plan to commit with nothing else in flight; False when there is none."""
        is_sent = self.send()
        while self.work():
            pass
        for rank in range(self.tp_size):
            while self.deliver(rank):
                pass
        self.scheduler.check()
        return is_sent

    def run(self, max_steps: int = 2_000) -> None:
        """Run with two steps in flight until every request is finished."""
        for _ in range(max_steps):
            if not self.scheduler.requests:
                return
            moved = self.send()
            moved |= self.send()
            moved |= self.work()
            for rank in range(self.tp_size):
                moved |= self.deliver(rank)
            self.scheduler.check()
            assert moved, f"nothing moves: {self.scheduler.requests}"
        raise AssertionError(f"{len(self.scheduler.requests)} requests are never finished")

    def outcome(self, request_id: int) -> tuple[list[int], FinishReason]:
        entry = self.closed[request_id]
        return entry.emitted, entry.finish

    def expected(self, request_id: int) -> tuple[list[int], FinishReason]:
        return reference(self.entry(request_id).submit, self.limits)

    def num_in_phase(self, phase: Phase) -> int:
        return sum(request.phase is phase for request in self.scheduler.requests.values())
