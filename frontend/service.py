"""What both doors share: from a checked body to a running generation, and whether we are open.

Owns the tokenizer, the engine, the room and the turns of large bodies, and the set of open
generations. Knows bodies and plans; never a connection.
"""

import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Final

import msgspec

from nvserve.frontend.arrivals import Arrivals
from nvserve.frontend.bulk import MAX_PROMPTS
from nvserve.frontend.chat_parts import END_THINK, THINK, Splitter
from nvserve.frontend.engine import Engine
from nvserve.frontend.errors import ApiError, invalid
from nvserve.frontend.generation import Generation, Plan, Sink
from nvserve.frontend.grammars import Grammar, resolve_grammar
from nvserve.frontend.held_bodies import HeldBodies
from nvserve.frontend.ongoing import Ongoing, have_ended
from nvserve.frontend.params import (
    Limits,
    check_all_params,
    check_prompt,
    resolve_max_tokens,
    resolve_priority,
    resolve_salt,
    resolve_sampling,
    resolve_seed,
    resolve_text_rules,
    with_max_tokens,
)
from nvserve.frontend.schema import (
    ChatBody,
    CompletionBody,
    check_chat,
    check_completion,
    plain_messages,
    split_prompts,
)
from nvserve.frontend.tokenizer import Tokenizer
from nvserve.frontend.tools import ToolPlan, resolve_tools, shown_tools, splitter
from nvserve.frontend.turns import Client, Turns
from nvserve.protocol.client_messages import SamplingFields
from nvserve.protocol.config import Config
from nvserve.protocol.control import Condition, State
from nvserve.protocol.grammars import split_grammar
from nvserve.protocol.sampling import SamplingParams

NO_TOOLS: Final = ToolPlan()
COMPLETION_TOKENS: Final = 16  # OpenAI's default of max_tokens for completions
CLOSED_RETRY_AFTER_S: Final = 5.0
GROUP_CHARS: Final = 64_000  # of many texts, encoded at once
INLINE_IDS: Final = 100_000  # of given prompts; more are checked and packed in turns


class Service:
    """The frontend behind its doors."""

    def __init__(self, config: Config, tokenizer: Tokenizer, engine: Engine) -> None:
        self.config: Final = config
        self.tokenizer: Final = tokenizer
        self.engine: Final = engine
        self.bodies: Final = HeldBodies()
        self.turns: Final = Turns()
        self.arrivals: Final = Arrivals()
        self.condition = Condition(State.LOADING)
        self.is_draining = False
        self._is_restarting = False  # draining for another frontend's sake
        self.started: Final = int(time.time())
        self.limits: Final = Limits(
            max_model_len=config.max_model_len,
            vocab_size=config.facts.vocab_size,
            sampling_defaults=tokenizer.sampling_defaults,
        )
        self._eos_ids: Final = frozenset(config.facts.eos_token_ids)
        self._open: set[Generation] = set()
        self._bound: Final = Ongoing()  # to this frontend: a client could not go on elsewhere
        self._resumable: Final = Ongoing()
        self._passing: Final = Ongoing()  # resumable, begun during the drain for a restart

    # -- open or closed --------------------------------------------------------------------------

    def check_open(self, *, is_resumable: bool = False) -> None:
        """Refuse while draining, or when the launcher has given up.

        What its client resumes at another frontend is taken until this one is replaced.
        """
        is_closed = self.is_draining and not (is_resumable and self._is_restarting)
        if is_closed or self.condition.state in (State.FAILED, State.DRAINING):
            raise self._closed()

    @property
    def state(self) -> State:
        """The launcher's word, held back while core's side is not connected."""
        if self.is_draining:
            return State.DRAINING
        if self.condition.state is State.READY and not self.engine.is_connected:
            return State.RECOVERING
        return self.condition.state

    def check_model(self, name: str | None) -> None:
        """A 404 for a model we do not serve; no name means ours."""
        if name is not None and name not in self.config.served_model_names:
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist",
                param="model",
                code="model_not_found",
            )

    def working(self, *, is_resumable: bool = False) -> AbstractContextManager[None]:
        """Around everything a drain has to wait for."""
        if not is_resumable:
            return self._bound.one()
        return (self._passing if self._is_restarting else self._resumable).one()

    async def drain(self, timeout_s: float, *, is_restart: bool = False) -> None:
        """Refuse what is new, wait for what runs, and end the rest after the timeout.

        A body that has not come whole yet is new. For a restart what is resumable goes on: its
        client takes it to the next frontend.
        """
        self.is_draining, self._is_restarting = True, is_restart
        self.bodies.end_uploads(self._closed())
        kinds = [self._bound, self._resumable] + ([] if is_restart else [self._passing])
        if await have_ended(timeout_s, *kinds):
            return
        aborted = ApiError(503, self.farewell(), code="aborted")
        self.turns.end(aborted)
        for generation in list(self._open):
            if not (is_restart and generation.is_resumable):
                generation.abort(aborted)
        await have_ended(1.0, *([self._bound] if is_restart else kinds))

    def _closed(self) -> ApiError:
        """The 503 of what comes too late; after a failure, another try would not help."""
        is_failed = self.condition.state is State.FAILED
        retry_after_s = None if is_failed else CLOSED_RETRY_AFTER_S
        return ApiError(503, self.farewell(), retry_after_s=retry_after_s)

    def farewell(self) -> str:
        """Why nothing is accepted any more, and what was accepted ends now."""
        if self.condition.state is State.FAILED:
            reason = self.condition.reason or "the engine cannot be restarted"
            return f"the server has failed: {reason}"
        if self._is_restarting and self.condition.state is not State.DRAINING:
            return "the frontend is being restarted"
        return "the server is shutting down"

    # -- bodies to plans -------------------------------------------------------------------------

    async def plan_completion(self, body: CompletionBody, client: Client) -> Plan:
        """What /v1/completions asks for; also raises what `Turns.work_off` does for the client."""
        check_completion(body)
        if body.prompt_logprobs is not None and body.prompt_logprobs < 0:
            raise invalid("prompt_logprobs", "must not be negative")
        prompts = split_prompts(body.prompt)
        num_choices = body.n or 1
        if len(prompts) * num_choices > MAX_PROMPTS:
            raise invalid("n", f"prompts x n is more than {MAX_PROMPTS}")
        return self._plan(
            body,
            await self._packed(prompts, client),
            default=COMPLETION_TOKENS,
            num_choices=num_choices,
            logprobs=body.logprobs,
            # An echo with logprobs shows those of the prompt as well.
            prompt_logprobs=_most(body.prompt_logprobs, body.logprobs if body.echo else None),
        )

    async def plan_chat(self, body: ChatBody) -> Plan:
        """What /v1/chat/completions asks for."""
        check_chat(body)
        template = self.tokenizer.tool_template
        tools = resolve_tools(
            body,
            self.config.tool_call_parser,
            knows_tools=template is not None and template.knows_tools,
        )
        prompt = await self.tokenizer.encode_chat(
            plain_messages(body.messages), tools=shown_tools(body, tools)
        )
        param, asked = "max_tokens", body.max_tokens
        if body.max_completion_tokens is not None:
            param, asked = "max_completion_tokens", body.max_completion_tokens
        if asked == 0:
            raise invalid(param, "must be positive")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        if logprobs is not None and logprobs < 0:
            raise invalid("top_logprobs", "must not be negative")
        try:
            return self._plan(
                body,
                [self._pack(prompt, "messages")],
                default=None,
                num_choices=body.n or 1,
                logprobs=logprobs,
                prompt_logprobs=body.prompt_logprobs,
                max_tokens=asked,
                tools=tools,
                max_tokens_param=param,
            )
        except ApiError as error:
            if error.param == "logprobs":
                raise invalid("top_logprobs", error.message.partition(": ")[2]) from error
            raise

    async def plan_client(
        self,
        fields: SamplingFields,
        prompt: str | list[int],
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> Plan:
        """What a submit over ZMQ asks for."""
        if not prompt:
            raise invalid("prompt", "must not be empty")
        if isinstance(prompt, str):
            prompts = await self.tokenizer.encode([prompt], param="prompt")
        else:
            prompts = [prompt]
        return self._plan(
            fields,
            [self._pack(ids, "prompt") for ids in prompts],
            default=COMPLETION_TOKENS,
            num_choices=1,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    async def _packed(
        self, prompts: list[str] | list[list[int]], client: Client
    ) -> list["array[int]"]:
        """The ids of each, checked. Of many, others get theirs in between, and none once we close.

        No more is done for a client that has gone, or behind a prompt that is refused.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        given = [prompt for prompt in prompts if isinstance(prompt, list)]
        packed: list[array[int]] = []
        for group in _grouped(texts):
            self.check_open()
            client.check_client()
            encoded = await self.tokenizer.encode(group, param="prompt")
            packed += [self._pack(ids, "prompt") for ids in encoded]
        if sum(map(len, given)) <= INLINE_IDS:
            return packed + [self._pack(ids, "prompt") for ids in given]

        def pack_given() -> Iterator[None]:
            for ids in given:
                self.check_open()
                packed.append(self._pack(ids, "prompt"))
                yield

        await self.turns.work_off(pack_given(), client)
        return packed

    def _pack(self, prompt: list[int], param: str) -> "array[int]":
        check_prompt(prompt, self.limits, param)
        return array("i", prompt)

    def _plan(
        self,
        fields: SamplingFields,
        prompts: list["array[int]"],
        *,
        default: int | None,
        num_choices: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
        max_tokens: int | None = None,
        tools: ToolPlan = NO_TOOLS,
        max_tokens_param: str = "max_tokens",
    ) -> Plan:
        asked = fields.max_tokens if max_tokens is None else max_tokens
        grammar = resolve_grammar(fields)
        if tools.grammar is not None:
            if grammar is not None:
                raise invalid(grammar.param, "cannot be combined with a forced tool_choice")
            grammar = tools.grammar
        by_max_tokens: dict[int, SamplingParams] = {}
        sampling: list[SamplingParams] = []
        for prompt in prompts:
            room = resolve_max_tokens(
                asked, len(prompt), self.limits, default=default, param=max_tokens_param
            )
            if not sampling:
                by_max_tokens[room] = resolve_sampling(
                    fields,
                    self.limits,
                    self.tokenizer.fast,
                    max_tokens=room,
                    logprobs=logprobs,
                    prompt_logprobs=prompt_logprobs,
                    grammar=grammar.text if grammar is not None else "",
                )
            elif room not in by_max_tokens:
                by_max_tokens[room] = with_max_tokens(sampling[0], room, self.limits)
            sampling.append(by_max_tokens[room])
        check_all_params(sampling[0], num_prompts=len(prompts), num_choices=num_choices)
        if self.config.device == "sim":
            _refuse_what_needs_a_model(sampling[0])
        is_score_only = asked == 0 and (prompt_logprobs is not None or grammar is not None)
        if is_score_only:  # scores come with a prefill, and a prefill ends with a token
            sampling = [msgspec.structs.replace(one, max_tokens=1) for one in sampling]
        if sampling[0].max_tokens:  # none is no work
            self._check_room(len(prompts) * num_choices, "prompt" if num_choices == 1 else "n")
        return Plan(
            prompts=prompts,
            sampling=sampling,
            rules=resolve_text_rules(fields),
            num_choices=num_choices,
            seed=resolve_seed(fields.seed),
            priority=resolve_priority(fields.priority),
            salt=resolve_salt(fields.cache_salt),
            is_score_only=is_score_only,
            grammar=grammar,
            tools=tools,
        )

    def _check_room(self, num_requests: int, param: str) -> None:
        """Refuse what could never be taken whole: trying again, as a 429 asks for, is no use."""
        room = self.config.max_num_seqs + self.config.max_queued_requests
        if num_requests > room:
            raise invalid(
                param,
                f"prompts x n is {num_requests}, and {room} requests can run or wait at once",
            )

    def splitters(self, plan: Plan) -> list[Splitter] | None:
        """Of a chat, what takes each choice's text apart; None when all of it is content."""
        has_reasoning = bool(self.config.reasoning_parser)
        tail = ""
        if has_reasoning and (plan.grammar is None or _may_think(plan.grammar)):
            tail = self.tokenizer.vocabulary.decode(plan.prompts[0][-8:], skip_special=False)
        made = [
            splitter(
                plan.tools,
                self.config.tool_call_parser,
                has_reasoning=has_reasoning,
                is_thinking=tail.rstrip().endswith(THINK),
            )
            for _ in range(plan.num_choices)
        ]
        return [one for one in made if one is not None] or None

    # -- running ---------------------------------------------------------------------------------

    def generation(self, plan: Plan, *, is_resumable: bool = False) -> Generation:
        """A generation that is not started yet."""
        return Generation(
            self.engine, self.tokenizer.vocabulary, self._eos_ids, plan, is_resumable=is_resumable
        )

    def start(self, generation: Generation, sink: Sink, emitted: Sequence[int] = ()) -> None:
        """Submit it, and count it among the open ones until it is over."""
        self.check_open(is_resumable=generation.is_resumable)
        generation.start(sink, emitted)
        self._open.add(generation)
        generation.on_over(self._open.discard)


def _grouped(texts: list[str]) -> Iterator[list[str]]:
    """The texts in order; each group but the last one has enough for a while."""
    start = num_chars = 0
    for end, text in enumerate(texts, 1):
        num_chars += len(text)
        if num_chars >= GROUP_CHARS or end == len(texts):
            yield texts[start:end]
            start, num_chars = end, 0


def _most(*counts: int | None) -> int | None:
    """The largest count that was given."""
    return max((count for count in counts if count is not None), default=None)


def _may_think(grammar: Grammar) -> bool:
    """Whether an output may close a thought that the prompt opened.

    The grammar holds from the first token on. JSON and choices spell the marker where they let it
    be; an expression may allow it without a word of it.
    """
    form, text = split_grammar(grammar.text)
    return form in ("regex", "lark") or END_THINK in text


def _refuse_what_needs_a_model(sampling: SamplingParams) -> None:
    """The simulated device has no logits: what depends on them is refused, not made up."""
    for param, is_asked in (
        ("logprobs", sampling.logprobs >= 0),
        ("prompt_logprobs", sampling.prompt_logprobs >= 0),
        ("grammar", bool(sampling.grammar)),
    ):
        if is_asked:
            raise invalid(param, "is not available on --device sim", "unsupported_parameter")
