"""Turns a Submit into a Request, or says why not: every range is checked here once more.

msgpack carries NaN and any integer, so no peer is trusted. Knows limits and lengths; never who
waits or runs.
"""

import math
from array import array
from typing import Final

from nvserve.core.constraint import Constraint, Matcher
from nvserve.core.errors import RequestRefused
from nvserve.core.limits import Limits
from nvserve.core.request import Request
from nvserve.protocol.messages import RefusalKind, Submit
from nvserve.protocol.sampling import BadParameter, SamplingParams, check_sampling


class Admission:
    """The gate for requests: few enough, valid, and able to fit alone into model and pool."""

    def __init__(self, limits: Limits) -> None:
        self._limits: Final = limits
        self.held: Final[dict[int, Request]] = {}  # unanswered until the size of the pool is known

    def take(
        self,
        submit: Submit,
        matcher: Matcher | None,
        num_usable_blocks: int | None,
    ) -> Request | None:
        """The request of a submit, None when it is held; RequestRefused names field and numbers."""
        if submit.sampling.grammar and matcher is None:
            raise RequestRefused("grammar", "grammar: was not compiled")
        request = self.make_request(submit, matcher)
        if num_usable_blocks is None:
            self.held[request.request_id] = request
            return None
        self.check_size(request, num_usable_blocks)
        return request

    def pop_held(self) -> list[Request]:
        """Let go of all, in the order they came; their size is to be checked."""
        held = list(self.held.values())
        self.held.clear()
        return held

    def pop_late(self, now: float) -> list[Request]:
        """Let go of those held whose deadline has passed."""
        late = [request for request in self.held.values() if 0 < request.deadline <= now]
        for request in late:
            del self.held[request.request_id]
        return late

    def check_load(self, *, num_waiting: int, num_running: int) -> None:
        """Refuse when more would wait, here or there, than the limit and the free slots allow."""
        num_waiting += len(self.held)
        num_free_slots = self._limits.max_num_seqs - num_running
        if num_waiting >= self._limits.max_queued_requests + num_free_slots:
            raise RequestRefused(
                "",
                f"{num_waiting} requests are waiting,"
                f" the limit is {self._limits.max_queued_requests}",
                RefusalKind.BUSY,
            )

    def make_request(self, submit: Submit, matcher: Matcher | None = None) -> Request:
        """The request of a submit, whatever the load, the pool and the want of a grammar."""
        self._check_ranges(submit)
        prompt = self._ids("prompt", submit.prompt)
        emitted = self._ids("emitted", submit.emitted)
        sampling = submit.sampling
        room = self._limits.max_model_len - len(prompt)
        if not prompt:
            raise RequestRefused("prompt", "the prompt is empty")
        if room < min(1, sampling.max_tokens):
            raise RequestRefused(
                "prompt",
                f"the prompt has {len(prompt)} tokens, which leaves no room for output:"
                f" the context has {self._limits.max_model_len}",
            )
        stop_ids = frozenset(sampling.stop_token_ids)
        request = Request(
            request_id=submit.request_id,
            tokens=prompt + emitted,
            num_prompt=len(prompt),
            max_total=len(prompt) + min(sampling.max_tokens, room),
            sampling=sampling,
            seed=submit.seed,
            stop_ids=stop_ids if sampling.ignore_eos else stop_ids | self._limits.eos_token_ids,
            priority=submit.priority,
            arrival=submit.arrival,
            deadline=submit.deadline,
            salt=submit.salt,
            strikes=submit.strikes,
            is_replay=submit.is_replay,
            num_scored=len(prompt) if emitted else 0,  # a replay's scores were sent long ago
            constraint=self._constraint(sampling, matcher),
        )
        if request.constraint is not None:
            for token_id in emitted:
                request.constraint.advance(token_id)
        return request

    def _constraint(self, sampling: SamplingParams, matcher: Matcher | None) -> Constraint | None:
        words = [word for word in sampling.bad_words if len(word) > 1]
        if not words and matcher is None:
            return None
        ignored: frozenset[int] = frozenset()
        if sampling.ignore_eos and matcher is not None:  # or it would end the grammar all the same
            ignored = self._limits.eos_token_ids.difference(sampling.stop_token_ids)
        choice = sampling.allowed_token_ids
        return Constraint(self._limits.vocab_size, words, matcher, ignored, choice)

    def _check_ranges(self, submit: Submit) -> None:
        try:
            check_sampling(submit.sampling, self._limits.vocab_size)
        except BadParameter as error:
            raise RequestRefused(error.param, str(error)) from error
        if submit.sampling.prompt_logprobs >= 0 and submit.sampling.max_tokens == 0:
            raise RequestRefused(
                "max_tokens", "max_tokens must be at least 1 with prompt_logprobs, not 0"
            )
        for param, seconds in (("arrival", submit.arrival), ("deadline", submit.deadline)):
            if not (math.isfinite(seconds) and seconds >= 0):
                raise RequestRefused(param, f"{param} must be a time, not {seconds}")
        for param, number, end in (
            ("seed", submit.seed, 2**63),
            ("request_id", submit.request_id, 2**63),
            ("strikes", submit.strikes, 2**31),
            ("priority", submit.priority + 2**31, 2**32),
            ("max_tokens", submit.sampling.max_tokens, 2**31),  # and min_tokens with it
        ):
            if not 0 <= number < end:
                raise RequestRefused(param, f"{param} is out of range")

    def _ids(self, param: str, column: bytes) -> "array[int]":
        ids = array("i")
        ids.frombytes(column)
        if ids and not (min(ids) >= 0 and max(ids) < self._limits.vocab_size):
            outside = min(ids) if min(ids) < 0 else max(ids)
            raise RequestRefused(
                param,
                f"{param} holds token id {outside}, outside 0..{self._limits.vocab_size - 1}",
            )
        return ids

    def check_size(self, request: Request, num_usable_blocks: int) -> None:
        """Refuse a request that could not run with the pool for itself: it would wait for ever."""
        size = self._limits.block_size
        num_needed = -(-(request.max_total - 1) // size)
        if num_needed <= num_usable_blocks or request.sampling.max_tokens == 0:
            return
        is_prompt_too_long = request.num_prompt > num_usable_blocks * size
        raise RequestRefused(
            "prompt" if is_prompt_too_long else "max_tokens",
            f"a prompt of {request.num_prompt} tokens with up to"
            f" {request.max_total - request.num_prompt} tokens of output needs {num_needed}"
            f" KV blocks of {size} tokens, the pool has {num_usable_blocks}",
        )
