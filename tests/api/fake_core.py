"""A core without scheduler or workers: the real messages on real sockets, tokens by a formula.

Runs in a thread. Each pass of its loop is a step that gives every running request one token. Tests
hold it back, script its tokens and make it lose, repeat and delay emits.
"""

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import zmq

from nvserve.protocol.channel import Inbox, Outbox, core_to_frontend, frontend_to_core
from nvserve.protocol.codec import decode_to_core, encode
from nvserve.protocol.messages import (
    Abort,
    Accepted,
    CoreStats,
    Emits,
    Finish,
    FinishReason,
    Hello,
    Logprobs,
    RefusalKind,
    Refused,
    Submit,
    unpack_ids,
)

T = TypeVar("T")

EVENT_LIMIT_S = 30.0  # for whatever surely comes: what has happened costs nobody this time
EOS = 1
FIRST_TOKEN, NUM_TOKENS = 261, 700  # ordinary tokens of the demo model's vocabulary
NUM_BLOCKS = 64


def token_at(prompt: Sequence[int], seed: int, index: int) -> int:
    """The output token of this index, whatever company the request has."""
    return FIRST_TOKEN + (sum(prompt) * 31 + seed * 17 + index * 7) % NUM_TOKENS


def tokens_of(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    return [token_at(prompt, seed, index) for index in range(count)]


@dataclass(slots=True)
class Running:
    submit: Submit
    prompt: list[int]
    output: list[int] = field(default_factory=list)


class FakeCore:
    """One life of core. Attributes may be set from the test's thread before it needs them."""

    def __init__(
        self,
        launch_dir: str,
        frontend_life: int,
        core_life: int,
        most_tokens: int | None = None,
    ) -> None:
        self.lives = (core_life, frontend_life)
        self.script: list[int] | None = None  # tokens of every request, then EOS
        self.most_tokens = most_tokens  # of a request in this life; then it waits for another
        self.refusal: Refused | None = None
        self.is_silent = False  # does not answer submits
        self.is_held = threading.Event()  # set: no steps
        self.step_s = 0.001
        self.received: list[msgspec.Struct] = []
        self.alter: Callable[[Emits], list[Emits]] = lambda emits: [emits]
        self.running: dict[int, Running] = {}
        self.num_finished = 0
        self.with_logprobs = True
        self.finish_with: FinishReason | None = None  # instead of the next token
        self.stats_changes: dict[str, Any] = {}  # fields of the statistics told otherwise
        self._launch_dir = launch_dir
        self._news = threading.Condition()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # -- for tests -------------------------------------------------------------------------------

    def wait_until(
        self, test: Callable[["FakeCore"], bool], limit_s: float = EVENT_LIMIT_S
    ) -> None:
        """Until a test holds, which is made while core stands still."""
        with self._news:
            assert self._news.wait_for(lambda: test(self), limit_s), f"not within {limit_s} s"

    def of_type(self, message_type: type[T]) -> list[T]:
        return [message for message in self.received if isinstance(message, message_type)]

    def kill(self) -> None:
        """End this life without another word."""
        self._is_over.set()
        self._thread.join(EVENT_LIMIT_S)
        assert not self._thread.is_alive()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        core_life, frontend_life = self.lives
        inbox = Inbox(context, frontend_to_core(self._launch_dir, frontend_life, core_life))
        outbox = Outbox(context, core_to_frontend(self._launch_dir, frontend_life, core_life))
        outbox.send(encode(Hello(core_life)))
        next_stats = 0.0
        while not self._is_over.is_set():
            frame = inbox.receive(1 if self.running and not self.is_held.is_set() else 20)
            with self._news:
                while frame is not None:
                    self._take(decode_to_core(frame), outbox)
                    frame = inbox.receive()
                self._news.notify_all()
            if time.monotonic() > next_stats:
                next_stats = time.monotonic() + 0.2
                outbox.send(encode(self._stats()))
            if self.running and not self.is_held.is_set():
                self._step(outbox)
                self._is_over.wait(self.step_s)
        inbox.close()
        outbox.close()
        context.destroy(linger=0)

    def _take(self, message: msgspec.Struct, outbox: Outbox) -> None:
        self.received.append(message)
        match message:
            case Submit():
                self._submit(message, outbox)
            case Abort() | Finish():
                for request_id in message.request_ids:
                    self.running.pop(request_id, None)

    def _submit(self, submit: Submit, outbox: Outbox) -> None:
        core_life, frontend_life = self.lives
        if self.is_silent:
            return
        if self.refusal is not None:
            answer = msgspec.structs.replace(
                self.refusal,
                core_life=core_life,
                frontend_life=frontend_life,
                request_id=submit.request_id,
            )
            outbox.send(encode(answer))
            return
        request = Running(submit, unpack_ids(submit.prompt), unpack_ids(submit.emitted))
        self.running[submit.request_id] = request
        outbox.send(encode(Accepted(core_life, frontend_life, [submit.request_id])))

    def _step(self, outbox: Outbox) -> None:
        with self._news:
            rows = [(number, one) for number, one in self.running.items() if self._is_due(one)]
            altered = self.alter(self._emits(rows)) if rows else []
            self._news.notify_all()
        for emits in altered:
            outbox.send(encode(emits))

    def _is_due(self, request: Running) -> bool:
        return self.most_tokens is None or len(request.output) < self.most_tokens

    def _emits(self, rows: list[tuple[int, Running]]) -> Emits:
        core_life, frontend_life = self.lives
        firsts, tokens, finishes = [], [], []
        logprobs: list[Logprobs | None] = []
        scores: list[Logprobs | None] = []
        for request_id, request in rows:
            scores.append(None if request.output else _prompt_logprobs(request))
            firsts.append(len(request.output))
            token = self._next_token(request)
            request.output.append(token)
            tokens.append(token)
            finish = self.finish_with or self._finish_of(request, token)
            finishes.append(finish)
            if finish:
                self.running.pop(request_id, None)
                self.num_finished += 1
            wants = request.submit.sampling.logprobs
            logprobs.append(_logprobs(token, wants) if wants >= 0 else None)
        return Emits(
            core_life=core_life,
            frontend_life=frontend_life,
            request_ids=[request_id for request_id, _ in rows],
            firsts=firsts,
            counts=[1] * len(rows),
            tokens=array("i", tokens).tobytes(),
            finishes=finishes,
            cached=[3] * len(rows),
            logprobs=logprobs if any(logprobs) else None,
            prompt_logprobs=scores if any(scores) else None,
        )

    def _next_token(self, request: Running) -> int:
        index = len(request.output)
        if self.script is not None:
            return self.script[index] if index < len(self.script) else EOS
        seed = 0 if request.submit.sampling.is_greedy else request.submit.seed
        return token_at(request.prompt, seed, index)

    def _finish_of(self, request: Running, token: int) -> FinishReason:
        sampling = request.submit.sampling
        if (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            return FinishReason.STOP
        if len(request.output) >= sampling.max_tokens:
            return FinishReason.LENGTH
        return FinishReason.NONE

    def _stats(self) -> CoreStats:
        core_life, frontend_life = self.lives
        stats = CoreStats(
            core_life=core_life,
            frontend_life=frontend_life,
            epoch=0,
            step=0,
            time=time.time(),
            last_step_time=0.0,  # the frontend sees the steps itself
            num_running=len(self.running),
            num_waiting=0,
            num_blocks=NUM_BLOCKS,
            num_free_blocks=NUM_BLOCKS,
            accepted_total=len(self.of_type(Submit)),
            finished_totals=[0] * len(FinishReason),
            refused_total=0,
            preempted_total=0,
            prompt_tokens_total=0,
            generated_tokens_total=0,
            prefix_queries_total=0,
            prefix_hits_total=0,
            dropped_total=0,
            recovered_total=0,
        )
        return msgspec.structs.replace(stats, **self.stats_changes)


def _logprobs(token: int, num_tops: int) -> Logprobs:
    """The chosen token at -0.5, then its followers at -1, -2, ..."""
    ids = [token, *range(token + 1, token + num_tops)][:num_tops]
    values = [-0.5, *(-float(i) for i in range(1, num_tops))][:num_tops]
    return Logprobs(
        rows=[0],
        chosen=array("f", [-0.5]).tobytes(),
        num_tops=[num_tops],
        top_ids=array("i", ids).tobytes(),
        top_values=array("f", values).tobytes(),
    )


def _prompt_logprobs(request: Running) -> Logprobs | None:
    """Each prompt token but the first as `_logprobs` has it, where they are asked for."""
    num_tops = request.submit.sampling.prompt_logprobs
    if num_tops < 0:
        return None
    each = [_logprobs(token, num_tops) for token in request.prompt[1:]]
    return Logprobs(
        rows=list(range(1, len(request.prompt))),
        chosen=b"".join(one.chosen for one in each),
        num_tops=[num_tops] * len(each),
        top_ids=b"".join(one.top_ids for one in each),
        top_values=b"".join(one.top_values for one in each),
    )


def busy(kind: RefusalKind, message: str, retry_after_s: float = 0.0) -> Refused:
    """What a test sets as `refusal`; lives and id are filled in."""
    return Refused(0, 0, 0, kind, message, retry_after_s=retry_after_s)
