"""From a complete step to the Emits of its new tokens.

Appends returned tokens to their requests and finds who ends by them; frees nothing.
"""

from nvserve.core import logprobs
from nvserve.core.request import Phase, Request
from nvserve.core.step_ledger import Step
from nvserve.protocol.messages import Emits, FinishReason, Logprobs, pack_ids


class Emission:
    """The columns of one Emits, filled row by row."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.firsts: list[int] = []
        self.token_ids: list[int] = []
        self.finished: list[tuple[int, FinishReason]] = []  # index into `requests`, reason
        self.logprobs: dict[int, Logprobs] = {}  # by index
        self.scores: dict[int, Logprobs] = {}  # prompt logprobs by index
        self._num_sampled = 0  # the leading requests have one token each, the others none

    def add_step(self, step: Step) -> None:
        """Hand each row's token to its request; one that has ended drops it."""
        assert step.output is not None
        assert step.token_ids is not None
        requests, firsts, kept = self.requests, self.firsts, self.token_ids
        finished_phase = Phase.FINISHED
        pieces = logprobs.split(step.output.logprobs) if step.output.logprobs is not None else {}
        for row, (request, token_id) in enumerate(zip(step.rows, step.token_ids, strict=True)):
            if request.phase is finished_phase:  # ended while the step was in flight
                continue
            tokens = request.tokens
            firsts.append(len(tokens) - request.num_prompt)
            requests.append(request)
            kept.append(token_id)
            tokens.append(token_id)
            if request.constraint is not None:
                request.constraint.advance(token_id)
                self._finish_row(request)
            elif token_id in request.stop_ids or len(tokens) >= request.max_total:
                self._finish_row(request)
            if row in pieces:
                self.logprobs[len(requests) - 1] = pieces[row]
        self._num_sampled = len(requests)
        if step.output.prompt_logprobs is not None:
            self._add_scores(step, step.output.prompt_logprobs)

    def add_final(self, request: Request, reason: FinishReason) -> None:
        """End a request without a new token."""
        self.finished.append((len(self.requests), reason))
        self._add_empty(request)

    def message(self, *, core_life: int, frontend_life: int) -> Emits:
        num_requests = len(self.requests)
        finishes = [FinishReason.NONE] * num_requests
        for index, reason in self.finished:
            finishes[index] = reason
        num_empty = num_requests - self._num_sampled
        indices = range(num_requests)
        return Emits(
            core_life,
            frontend_life,
            request_ids=[request.request_id for request in self.requests],
            firsts=self.firsts,
            counts=[1] * self._num_sampled + [0] * num_empty,
            tokens=pack_ids(self.token_ids),
            finishes=finishes,
            cached=[max(0, request.num_cached) for request in self.requests],
            logprobs=[self.logprobs.get(index) for index in indices] if self.logprobs else None,
            prompt_logprobs=[self.scores.get(index) for index in indices] if self.scores else None,
        )

    def _finish_row(self, request: Request) -> None:
        reason = request.finish_reason()
        if reason is not FinishReason.NONE:  # NONE: a stop id before min_tokens
            self.finished.append((len(self.requests) - 1, reason))

    def _add_empty(self, request: Request) -> None:
        self.requests.append(request)
        self.firsts.append(request.num_output)

    def _add_scores(self, step: Step, scores: list[Logprobs | None]) -> None:
        """Prompt logprobs by chunk, each position once: a resumed request scores some again."""
        index_of = {request.request_id: index for index, request in enumerate(self.requests)}
        for (request, _, _), score in zip(step.chunks, scores, strict=True):
            if request.is_finished or score is None:
                continue
            fresh = logprobs.between(score, request.num_scored, request.num_prompt)
            if fresh is None:
                continue
            request.num_scored = fresh.rows[-1] + 1
            index = index_of.get(request.request_id)
            if index is None:
                index = len(self.requests)
                self._add_empty(request)
            self.scores[index] = fresh
