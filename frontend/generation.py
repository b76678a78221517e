"""One client request as its choices: submitted together, turned into text, ended together.

A Choice is one request of core with its detokenizer and stop strings; a Generation is the n choices
of each prompt of one client request. What a choice puts out goes to a sink at once, from within the
step's fan-out; there is no task per token. Knows nothing of HTTP, SSE or ZMQ.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from nvserve.frontend.detokenizer import Detokenizer, Vocabulary
from nvserve.frontend.engine import Engine
from nvserve.frontend.errors import ApiError, deadline_passed, raise_again
from nvserve.frontend.grammars import Grammar, broken_grammar, named_by_client
from nvserve.frontend.journal import Entry
from nvserve.frontend.listener import EmitExtras
from nvserve.frontend.metrics import RequestMetrics
from nvserve.frontend.params import TextRules, derive_seed
from nvserve.frontend.stop_strings import StopMatcher
from nvserve.frontend.token_logprobs import PromptScores, ScoreRun, output_entries
from nvserve.frontend.tools import ToolPlan
from nvserve.protocol.client_messages import TokenLogprob
from nvserve.protocol.messages import FinishReason
from nvserve.protocol.sampling import SamplingParams

ACCEPT_LIMIT_S: Final = 300.0  # for core's answer, loading and recoveries included

FINISH_NAMES: Final = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class Delta(msgspec.Struct, gc=False):
    """What one emit adds to a choice; `finish_reason` is set in its last delta."""

    text: str
    token_ids: Sequence[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: str | None
    prompt_logprobs: ScoreRun | None = None  # those that became known


class Plan(msgspec.Struct, frozen=True):
    """One client request, checked: what to submit and how to put it out.

    `is_score_only`: the client wants no output, only scores of its prompt or core's word on its
    grammar. One token is sampled behind it all the same, and never shown.
    """

    prompts: list["array[int]"]  # of lists, every garbage collection would look at each id
    sampling: list[SamplingParams]  # by prompt, as their room for output differs
    rules: TextRules
    num_choices: int = 1  # of each prompt
    seed: int | None = None
    priority: int = 0
    salt: str = ""
    is_score_only: bool = False
    timeout_s: float | None = None  # None takes the server's
    grammar: Grammar | None = None
    tools: ToolPlan = ToolPlan()


Sink = Callable[["Choice", Delta], None]


class Choice:
    """One sampled continuation of one prompt. It is the engine's listener for its request."""

    __slots__ = (
        "_ends",
        "_eos_ids",
        "_generation",
        "_is_begun",
        "_min_tokens",
        "_plan",
        "_stop",
        "_tokens_out",
        "_vocabulary",
        "cached",
        "detokenizer",
        "entry",
        "finish_reason",
        "index",
        "num_prompt_tokens",
        "num_tops",
        "scores",
        "seed",
    )

    def __init__(
        self, generation: "Generation", index: int, prompt: Sequence[int], sampling: SamplingParams
    ) -> None:
        rules = generation.plan.rules
        self._generation: Generation | None = generation  # until it is over
        self._plan: Final = generation.plan
        self._vocabulary: Final = generation.vocabulary
        self._eos_ids: Final = generation.eos_ids
        self._stop = StopMatcher(rules.stops, include=rules.include_stop) if rules.stops else None
        self._ends: frozenset[int] = (
            frozenset()
            if rules.include_stop
            else frozenset(sampling.stop_token_ids) | self._eos_ids
        )
        self._min_tokens: Final = sampling.min_tokens
        self._tokens_out = 0
        self.index: Final = index
        self.num_prompt_tokens: Final = len(prompt)
        self.num_tops: Final = sampling.logprobs  # with each token of the text, an echo's too
        self._is_begun = False
        self.cached = 0
        self.seed = 0
        self.entry: Entry | None = None
        self.finish_reason: str | None = None
        self.scores: Final = PromptScores(prompt) if sampling.prompt_logprobs >= 0 else None
        self.detokenizer: Final = self.new_detokenizer()

    def new_detokenizer(self) -> Detokenizer:
        """One that stands where the output begins."""
        plan, vocabulary = self._plan, self._vocabulary
        prompt = plan.prompts[self.index // plan.num_choices]
        return vocabulary.detokenizer(
            prompt,
            skip_special=plan.rules.skip_special,
            is_start=vocabulary.special_ids.issuperset(prompt),
        )

    @property
    def num_output_tokens(self) -> int:
        """Tokens put out; behind a stop string there are none."""
        return self._tokens_out

    @property
    def num_scored(self) -> int:
        """Scores of the prompt so far; they begin at its second token."""
        return 0 if self.scores is None else self.scores.num_taken

    @property
    def _no_logprobs(self) -> list[TokenLogprob] | None:
        """What a delta without tokens carries."""
        return [] if self.num_tops >= 0 else None

    def let_go(self) -> None:
        """Its generation is over; no call of the engine's reaches it any more."""
        self._generation = None

    # -- the engine's calls ----------------------------------------------------------------------

    def on_accepted(self) -> None:
        if self._generation is not None:
            self._generation.note_accepted()

    def on_refused(self, error: ApiError) -> None:
        self._fail(named_by_client(error, self._plan.grammar))

    def on_failure(self, error: Exception) -> None:
        self._fail(ApiError(500, "the server failed on this request"))

    def on_tokens(
        self, tokens: Sequence[int], finish: FinishReason, cached: int, emit: EmitExtras | None
    ) -> None:
        generation = self._generation
        if generation is None:
            return
        if finish > FinishReason.LENGTH:
            generation.fail(_failure_of(finish, self._plan.grammar))
            return
        if not self._is_begun:  # a core that replays has another cache
            self._is_begun, self.cached = True, cached
        scores = None
        if emit is not None and emit.prompt_logprobs is not None and self.scores is not None:
            scores = self.scores.take(emit.prompt_logprobs)
        if self._plan.is_score_only:
            reason = "length" if finish else None
            generation.put_out(self, Delta("", [], self._no_logprobs, reason, scores))
            return
        text, num_used, is_stopped = self.advance(tokens, finish)
        if num_used < len(tokens):
            tokens = tokens[:num_used]
        logprobs = self._no_logprobs
        if tokens and logprobs is not None:
            assert emit is not None, "core sends the logprobs that were asked for"
            assert emit.logprobs is not None, "core sends the logprobs that were asked for"
            logprobs = output_entries(emit.logprobs, tokens, num_skipped=emit.num_skipped)
        delta = Delta(text, tokens, logprobs, None, scores)
        if is_stopped:
            delta.finish_reason = "stop"
            if not finish and self.entry is not None:
                generation.engine.finish(self.entry)
        elif finish:
            delta.finish_reason = FINISH_NAMES[finish]
        generation.put_out(self, delta)

    def resume(self, emitted: Sequence[int], sampling: SamplingParams) -> str | None:
        """Take ids whose text is out already; the finish reason when nothing is left to do."""
        if emitted and self.advance(emitted, FinishReason.NONE)[2]:
            return "stop"
        ends = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= self._eos_ids
        if len(emitted) > sampling.min_tokens and emitted[-1] in ends:
            return "stop"
        return "length" if len(emitted) >= sampling.max_tokens else None

    def advance(self, tokens: Sequence[int], finish: FinishReason) -> tuple[str, int, bool]:
        """Text of these ids, how many of them it took, and whether a stop string ended it."""
        self._tokens_out += len(tokens)
        feed = self.detokenizer.feed
        visible = tokens
        if finish is FinishReason.STOP and tokens and tokens[-1] in self._ends:
            visible = tokens[:-1]  # what ends the text is no part of it
        if self._stop is None:
            text = feed(visible[0]) if len(visible) == 1 else "".join(map(feed, visible))
            return (text + self.detokenizer.flush() if finish else text), len(tokens), False
        return self._advance_to_stop(tokens, len(visible), finish)

    def _fail(self, error: ApiError) -> None:
        if self._generation is not None:
            self._generation.fail(error)

    def _advance_to_stop(
        self, tokens: Sequence[int], num_visible: int, finish: FinishReason
    ) -> tuple[str, int, bool]:
        assert self._stop is not None, "only called with stop strings"
        parts: list[str] = []
        num_uncounted = self._min_tokens - (self._tokens_out - len(tokens))
        for index in range(num_visible):
            text = self.detokenizer.feed(tokens[index])
            text, is_stopped = self._stop.feed(text, counts=index >= num_uncounted)
            parts.append(text)
            if is_stopped:
                self._tokens_out -= len(tokens) - index - 1
                return "".join(parts), index + 1, True
        if finish:
            text = self.detokenizer.flush()
            text, is_stopped = self._stop.feed(text, counts=len(tokens) > num_uncounted)
            parts.append(text if is_stopped else text + self._stop.flush())
            return "".join(parts), len(tokens), is_stopped
        return "".join(parts), len(tokens), False


class Generation:
    """All choices of one client request. `accepted` and `done` are awaited by its owner.

    `is_resumable`: its client can go on at another frontend with the ids that it holds.
    """

    def __init__(
        self,
        engine: Engine,
        vocabulary: Vocabulary,
        eos_ids: frozenset[int],
        plan: Plan,
        *,
        is_resumable: bool = False,
    ) -> None:
        self.engine: Final = engine
        self.vocabulary: Final = vocabulary
        self.eos_ids: Final = eos_ids
        self.plan: Final = plan
        self.is_resumable: Final = is_resumable
        self.needs_logprobs: Final = plan.sampling[0].logprobs >= 0
        self.metrics: Final = RequestMetrics(len(plan.prompts) * plan.num_choices)
        self.choices: Final = [
            Choice(self, number * plan.num_choices + index, prompt, sampling)
            for number, (prompt, sampling) in enumerate(
                zip(plan.prompts, plan.sampling, strict=True)
            )
            for index in range(plan.num_choices)
        ]
        self._sink: Sink | None = None
        self._num_unaccepted = len(self.choices)
        self._num_unfinished = len(self.choices)
        loop = asyncio.get_running_loop()
        self._accepted: asyncio.Future[ApiError | None] = loop.create_future()  # None, or why not
        self._done: asyncio.Future[ApiError | None] = loop.create_future()

    @property
    def is_over(self) -> bool:
        return self._done.done()

    def on_over(self, callback: "Callable[[Generation], object]") -> None:
        """Call back when the last delta is out or the generation has failed."""
        self._done.add_done_callback(lambda _: callback(self))

    def start(self, sink: Sink, emitted: Sequence[int] = ()) -> None:
        """Submit every choice; an ApiError leaves none behind. `emitted` is known to the client."""
        self._sink = sink
        try:
            prompts = [prompt.tobytes() for prompt in self.plan.prompts]
            for choice in self.choices:
                self._start_choice(choice, prompts, emitted)
        except ApiError:
            self._abort_all()
            raise

    async def accepted(self) -> None:
        """Wait until core has taken every choice, or raise why not."""
        try:
            async with asyncio.timeout(ACCEPT_LIMIT_S):
                raise_again(await asyncio.shield(self._accepted))
        except TimeoutError:
            text = f"no answer from the engine within {ACCEPT_LIMIT_S:g} s"
            self.fail(ApiError(503, text))
            raise ApiError(503, text) from None

    async def done(self) -> None:
        """Wait for the last delta, or raise why there is none.

        Without a limit of its own: its deadline and the launcher's watch end it.
        """
        raise_again(await asyncio.shield(self._done))  # whose owner may be cancelled

    def abort(self, error: ApiError | None = None) -> None:
        """End every choice now; who waits gets the error, by default that the client left."""
        self.fail(error or ApiError(499, "the client closed the connection"))

    # -- the choices' calls ----------------------------------------------------------------------

    def note_accepted(self) -> None:
        """One more choice is accepted."""
        self._num_unaccepted -= 1
        if self._num_unaccepted == 0 and not self._accepted.done():
            self._accepted.set_result(None)

    def put_out(self, choice: Choice, delta: Delta) -> None:
        """Pass a delta on, and end with the last one."""
        assert self._sink is not None, "tokens come after start"
        if delta.token_ids:
            self.metrics.note_tokens(choice.index)
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
            self._num_unfinished -= 1
        self._sink(choice, delta)
        if self._num_unfinished == 0 and not self._done.done():
            self.metrics.note_finish(self)
            self._done.set_result(None)
            self._let_go()

    def fail(self, error: ApiError) -> None:
        """One choice cannot go on, so none shall; who waits gets the error."""
        if self._done.done():
            return
        self._abort_all()
        for future in (self._accepted, self._done):
            if not future.done():
                future.set_result(error)
        self._let_go()

    def _let_go(self) -> None:
        """Nothing is put out any more: end the cycles with the choices and the sink.

        All goes with its last user then, and no collection, a pause of every stream, is due for it.
        """
        self._sink = None
        for choice in self.choices:
            choice.let_go()

    def _start_choice(self, choice: Choice, prompts: list[bytes], emitted: Sequence[int]) -> None:
        plan = self.plan
        number, index = divmod(choice.index, plan.num_choices)
        choice.seed = self._seed_of(index)
        settled = choice.resume(emitted, plan.sampling[number])
        if settled is not None:
            self.note_accepted()
            self.put_out(choice, Delta("", [], [] if self.needs_logprobs else None, settled))
            return
        choice.entry = self.engine.submit(
            choice,
            prompt=prompts[number],  # all choices of a prompt share it
            sampling=plan.sampling[number],
            seed=choice.seed,
            priority=plan.priority,
            salt=plan.salt,
            emitted=emitted,
            timeout_s=plan.timeout_s,
        )

    def _abort_all(self) -> None:
        for choice in self.choices:
            if choice.entry is not None and choice.finish_reason is None:
                self.engine.abort(choice.entry)

    def _seed_of(self, index: int) -> int:
        if self.plan.seed is None:
            return self.engine.draw_seed()
        return derive_seed(self.plan.seed, index)


def _failure_of(finish: FinishReason, grammar: Grammar | None) -> ApiError:
    match finish:
        case FinishReason.GRAMMAR:
            return broken_grammar(grammar)
        case FinishReason.DEADLINE:
            return deadline_passed()
        case FinishReason.ENGINE_FAULT:
            return ApiError(500, "this request crashes the engine", code="engine_fault")
        case _:
            return ApiError(503, "the server aborted the request", code="aborted")
