"""The HTTP routes: OpenAI's API, tokenizing, health and metrics, as one ASGI application.

Each handler reads a bounded body, has the service plan and start a generation, and answers with a
whole document or a stream. The status line of a generation waits for core's answer.
"""

import asyncio
import importlib.metadata
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from starlette.routing import Route, Router

from nvserve.frontend import metrics, openapi
from nvserve.frontend.bulk import FREE_BYTES
from nvserve.frontend.chat_output import ChatOutput
from nvserve.frontend.cors import Cors
from nvserve.frontend.errors import ApiError, invalid
from nvserve.frontend.exchange import ClientGone, Exchange, Receive, Scope, Send
from nvserve.frontend.generation import Generation, Plan
from nvserve.frontend.id_texts import IdTexts
from nvserve.frontend.params import check_ids
from nvserve.frontend.responses import (
    Chunks,
    Collector,
    Shape,
    is_laborious,
    whole_response,
)
from nvserve.frontend.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse,
    plain_messages,
)
from nvserve.frontend.service import Service
from nvserve.frontend.streaming import Streaming
from nvserve.protocol.control import State

FAREWELL_LIMIT_S: Final = 0.5  # for a reader to take the answer of a process that ends

logger = logging.getLogger(__name__)

Handler = Callable[[Exchange], Awaitable[None]]
T = TypeVar("T", bound=msgspec.Struct)

_encode: Final = msgspec.json.Encoder().encode


def application(service: Service, api_key: str) -> Router:
    """Every route, guarded by the API key where one is set; only health is open to all."""
    api = _Api(service)
    cors = Cors(service.config.cors_origins)
    guarded: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/completions", api.completions),
        ("POST", "/v1/chat/completions", api.chat),
        ("POST", "/v1/embeddings", _embeddings),
        ("GET", "/v1/models", api.models),
        ("GET", "/v1/models/{name:path}", api.model),
        ("POST", "/tokenize", api.tokenize),
        ("POST", "/detokenize", api.detokenize),
        ("GET", "/version", api.version),
        ("GET", "/metrics", api.metrics),
        ("GET", "/openapi.json", api.openapi),
    ]
    open_to_all: list[tuple[str, str, Handler]] = [
        ("GET", "/health", api.health),
        ("GET", "/ready", api.ready),
    ]
    routes = [
        Route(path, _Endpoint(method, handler, key, cors, service.farewell))
        for key, group in ((api_key, guarded), ("", open_to_all))
        for method, path, handler in group
    ]
    default = _Endpoint("", _not_found, "", cors, service.farewell)
    return Router(routes, redirect_slashes=False, default=default)


async def _embeddings(exchange: Exchange) -> None:
    raise ApiError(
        400, "this server generates text; embeddings are not supported", code="not_supported"
    )


async def _not_found(exchange: Exchange) -> None:
    raise ApiError(404, f"there is no {exchange.scope['path'][:200]}", code="not_found")


class _Endpoint:
    """One route as an ASGI application: method, key, handler, and every error as a document.

    No method takes all. HEAD is GET, of whose answer the server below leaves the body out.
    """

    def __init__(
        self,
        method: str,
        handler: Handler,
        api_key: str,
        cors: Cors,
        farewell: Callable[[], str],
    ) -> None:
        """`farewell` says why the process ends."""
        self._methods: Final = {"GET": ["GET", "HEAD"], "": []}.get(method, [method])
        self._cors: Final = cors
        self._handler: Final = handler
        self._api_key: Final = api_key
        self._farewell: Final = farewell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._cors)
        try:
            if exchange.is_preflight:  # a browser sends it without the key
                await exchange.respond_preflight()
                return
            if self._methods and exchange.method not in self._methods:
                await self._refuse_method(exchange)
                return
            if self._api_key:
                exchange.check_key(self._api_key)
            await self._handler(exchange)
        except ClientGone:
            return
        except ApiError as error:
            await self._answer(exchange, error)
        except asyncio.CancelledError:  # the process ends, and a drain has waited long enough
            # Not raised again: uvicorn would log it as a failure of ours, and end the task as well.
            await self._answer_last(exchange)
        except Exception:  # the edge: a bug costs this request alone, and its text stays here
            logger.exception("unexpected failure of %s", scope["path"])
            await self._answer(exchange, ApiError(500, "the server failed on this request"))

    async def _refuse_method(self, exchange: Exchange) -> None:
        text = f"use {self._methods[0]} for this path"
        error = ApiError(405, text, code="method_not_allowed")
        allow = (b"allow", ", ".join(self._methods).encode())
        await exchange.respond(error.body(), status=error.status, headers=[allow])

    async def _answer_last(self, exchange: Exchange) -> None:
        try:
            async with asyncio.timeout(FAREWELL_LIMIT_S):
                await self._answer(exchange, ApiError(503, self._farewell(), code="aborted"))
        except TimeoutError:
            exchange.transport.abort()

    async def _answer(self, exchange: Exchange, error: ApiError) -> None:
        if exchange.is_started:
            exchange.transport.abort()
        elif error.status != 499:
            await exchange.respond_error(error)


class _Api:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service: Final = service
        self._tokenizer: Final = service.tokenizer
        self._texts: Final = IdTexts(service.tokenizer.vocabulary, service.turns)

    async def _body(self, body_type: type[T], exchange: Exchange) -> T:
        """The body, checked. Its reader is counted as working: a drain ends what has not come."""
        self._service.check_open()
        max_ids = self._service.config.max_model_len
        with self._service.bodies.one() as held:
            raw = await exchange.read_json(held)
            await self._service.arrivals.turn()
            exchange.check_client()
            if len(raw) <= FREE_BYTES:
                return parse(body_type, raw, max_ids)
            async with self._service.turns.one(exchange):
                self._service.check_open()
                return parse(body_type, raw, max_ids)

    # -- generation ------------------------------------------------------------------------------

    async def completions(self, exchange: Exchange) -> None:
        """POST /v1/completions."""
        with self._service.working():
            await self._generate(exchange, *await self._completion(exchange))

    async def chat(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        with self._service.working():
            await self._generate(exchange, *await self._chat(exchange))

    # These hold the body no longer than it takes to plan it, since its prompt may be very long.

    async def _completion(self, exchange: Exchange) -> tuple[Plan, Shape, list[str]]:
        timeout_s = exchange.timeout_s()
        body = await self._body(CompletionBody, exchange)
        self._service.check_model(body.model)
        plan = msgspec.structs.replace(
            await self._service.plan_completion(body, exchange), timeout_s=timeout_s
        )
        echoed = await self._echoed(body, plan, exchange) if body.echo else []
        return plan, self._shape(body, is_chat=False), echoed

    async def _chat(self, exchange: Exchange) -> tuple[Plan, Shape, list[str]]:
        timeout_s = exchange.timeout_s()
        body = await self._body(ChatBody, exchange)
        self._service.check_model(body.model)
        plan = msgspec.structs.replace(await self._service.plan_chat(body), timeout_s=timeout_s)
        return plan, self._shape(body, is_chat=True), []

    async def _echoed(self, body: CompletionBody, plan: Plan, exchange: Exchange) -> list[str]:
        """Each choice's prompt as text."""
        texts = _given_texts(body)
        if not texts:
            skip_special = plan.rules.skip_special
            texts = await self._texts.of(plan.prompts, exchange, skip_special=skip_special)
        return [text for text in texts for _ in range(plan.num_choices)]

    def _shape(self, body: CompletionBody | ChatBody, *, is_chat: bool) -> Shape:
        options = body.stream_options
        shows_special = body.skip_special_tokens is False
        is_of_ids = isinstance(body, CompletionBody) and not _given_texts(body)
        return Shape.new(
            model=body.model or self._service.config.served_model_names[0],
            is_chat=is_chat,
            is_stream=bool(body.stream),
            has_token_ids=bool(body.return_token_ids),
            has_usage=bool(options and options.include_usage),
            num_prompt_logprobs=-1 if body.prompt_logprobs is None else body.prompt_logprobs,
            echoes_special=shows_special and is_of_ids,
        )

    async def _generate(
        self, exchange: Exchange, plan: Plan, shape: Shape, echoed: list[str]
    ) -> None:
        generation = self._service.generation(plan)
        splitters = self._service.splitters(plan) if shape.is_chat else None
        outputs = None if splitters is None else [ChatOutput(one) for one in splitters]
        try:
            async with exchange.watching(generation.abort):
                if shape.is_stream:
                    await self._stream(exchange, generation, shape, echoed, outputs)
                else:
                    await self._answer_whole(exchange, generation, shape, echoed, outputs)
        finally:
            generation.abort()  # whatever failed here, core frees the request

    async def _answer_whole(
        self,
        exchange: Exchange,
        generation: Generation,
        shape: Shape,
        echoed: list[str],
        outputs: list[ChatOutput] | None,
    ) -> None:
        collector = Collector(len(generation.choices))
        self._service.start(generation, collector.sink)
        await generation.accepted()
        await generation.done()
        make = partial(whole_response, shape, generation, collector, echoed, outputs)
        body = await asyncio.to_thread(make) if is_laborious(generation) else make()
        await exchange.respond(body)

    async def _stream(
        self,
        exchange: Exchange,
        generation: Generation,
        shape: Shape,
        echoed: list[str],
        outputs: list[ChatOutput] | None,
    ) -> None:
        chunks = Chunks(shape, generation.vocabulary, outputs)
        streaming = Streaming(exchange, generation, chunks, echoed, self._service.turns)
        self._service.start(generation, streaming.sink)
        await streaming.run()

    # -- models and tokens -----------------------------------------------------------------------

    async def models(self, exchange: Exchange) -> None:
        """GET /v1/models."""
        cards = [self._card(name) for name in self._service.config.served_model_names]
        await exchange.respond(_encode({"object": "list", "data": cards}))

    async def model(self, exchange: Exchange) -> None:
        """GET /v1/models/{name}."""
        name = exchange.scope["path_params"]["name"]
        self._service.check_model(name)
        await exchange.respond(_encode(self._card(name)))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._service.started,
            "owned_by": "nvserve",
            "max_model_len": self._service.config.max_model_len,
        }

    async def tokenize(self, exchange: Exchange) -> None:
        """POST /tokenize."""
        with self._service.working():
            body = await self._body(TokenizeBody, exchange)
            self._service.check_model(body.model)
            if (body.prompt is None) == (body.messages is None):
                raise invalid("prompt", "give either prompt or messages")
            if body.messages is not None and body.add_special_tokens:
                raise invalid("add_special_tokens", "the chat template writes them itself")
            if body.messages is None and body.add_generation_prompt is not None:
                raise invalid("add_generation_prompt", "needs messages")
            if body.messages is not None:
                tokens = await self._tokenizer.encode_chat(
                    plain_messages(body.messages),
                    add_generation_prompt=body.add_generation_prompt is not False,
                )
            else:
                (tokens,) = await self._tokenizer.encode(
                    [body.prompt or ""],
                    param="prompt",
                    add_special_tokens=body.add_special_tokens is not False,
                )
            document = {
                "count": len(tokens),
                "max_model_len": self._service.config.max_model_len,
                "tokens": tokens,
            }
            await exchange.respond(_encode(document))

    async def detokenize(self, exchange: Exchange) -> None:
        """POST /detokenize."""
        with self._service.working():
            body = await self._body(DetokenizeBody, exchange)
            self._service.check_model(body.model)
            num_tokens, most = len(body.tokens), self._service.config.max_model_len
            if num_tokens > most:
                raise invalid("tokens", f"holds {num_tokens} ids, at most {most} are allowed")
            check_ids(body.tokens, self._service.limits, "tokens")
            (text,) = await self._texts.of([body.tokens], exchange, skip_special=False)
            await exchange.respond(_encode({"prompt": text}))

    # -- the server itself -----------------------------------------------------------------------

    async def version(self, exchange: Exchange) -> None:
        """GET /version."""
        await exchange.respond(_encode({"version": _version()}))

    async def openapi(self, exchange: Exchange) -> None:
        """GET /openapi.json."""
        await exchange.respond(openapi.document(_version()))

    async def metrics(self, exchange: Exchange) -> None:
        """GET /metrics."""
        await exchange.respond(metrics.exposition(), content_type=metrics.CONTENT_TYPE)

    async def health(self, exchange: Exchange) -> None:
        """GET /health: 200 while the process serves, unless the launcher has given up."""
        condition = self._service.condition
        state = self._service.state
        status = 503 if state is State.FAILED else 200
        document = {
            "status": "ok" if state is State.READY else state.value,
            "reason": condition.reason,
        }
        await exchange.respond(_encode(document), status=status)

    async def ready(self, exchange: Exchange) -> None:
        """GET /ready: 200 when a request would be served now, else 503 with the reason."""
        state = self._service.state
        age_s = self._service.engine.last_step_age_s
        document = {
            "status": "ok" if state is State.READY else state.value,
            "reason": self._service.condition.reason,
            "last_step_age_s": None if age_s is None else round(age_s, 3),
        }
        status = 200 if state is State.READY else 503
        await exchange.respond(_encode(document), status=status)


def _given_texts(body: CompletionBody) -> list[str]:
    """The prompts that are no ids: all of them, or none, as the first one tells."""
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not given or not isinstance(given[0], str):  # a million ids, it may be
        return []
    return [text for text in given if isinstance(text, str)]


def _version() -> str:
    try:
        return importlib.metadata.version("nvserve")
    except importlib.metadata.PackageNotFoundError:
        return "0+checkout"
