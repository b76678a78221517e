"""The ZMQ door: what clients of protocol/client_messages.py ask for, and what they get.

Bounded in connections, requests of each, and bytes that are being planned; a client that leaves
loses its requests. Knows plans and generations; never core, nor bytes on the wire.
"""

import asyncio
import hmac
import logging
from array import array
from typing import Final, assert_never

import msgspec

from nvserve.frontend.errors import ApiError
from nvserve.frontend.generation import Choice, Delta, Plan
from nvserve.frontend.params import resolve_timeout
from nvserve.frontend.schema import explain
from nvserve.frontend.service import Service
from nvserve.frontend.zmq_connection import (
    Connection,
    Request,
    accepted_message,
    emitted_of,
    error_message,
    id_of,
    message_of,
    prompt_of,
)
from nvserve.frontend.zmq_wire import Listener, Wire
from nvserve.protocol.client_messages import (
    BEAT_S,
    CLIENT_PROTOCOL,
    Abort,
    BadClientFrame,
    Beat,
    Emit,
    Finished,
    Hello,
    Submit,
    ToClient,
    Welcome,
    encode_client,
)

logger = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 1024
MAX_REQUESTS: Final = 1024  # open ones of one connection
# Frames whose submits are being planned: beyond it a connection is not read until some are.
MAX_PLANNED_BYTES: Final = 16 << 20  # of one connection
MAX_ALL_PLANNED_BYTES: Final = 128 << 20
IDLE_BEATS: Final = 20  # a connection without requests gets every 20th beat, to find it gone


class Door:
    """The connections and their requests."""

    def __init__(self, service: Service, api_key: str) -> None:
        self._service: Final = service
        self._api_key: Final = api_key.encode()
        self._listener: Final = Listener(self._take, self._lose)
        self._connections: Final[dict[Wire, Connection]] = {}
        self._tasks: Final[set[asyncio.Task[None]]] = set()
        self._num_planned_bytes = 0
        self._num_beats = 0
        self._is_open = False
        self.num_dropped = 0

    async def open(self, endpoint: str) -> str:
        """Listen, and return the address with its real port; an empty endpoint leaves it closed."""
        if not endpoint:
            return ""
        address = await self._listener.open(endpoint)
        self._is_open = True
        asyncio.get_running_loop().call_later(BEAT_S, self._beat)
        return address

    def close(self) -> None:
        """Abort every request and close every connection."""
        self._is_open = False
        self._listener.close()
        for wire in list(self._connections):
            self._lose(wire)

    # -- messages in -----------------------------------------------------------------------------

    def _take(self, wire: Wire, frame: bytes | None) -> None:
        if frame is None:  # a message of several frames
            self.num_dropped += 1
            return
        connection = self._connections.get(wire)
        try:
            message = message_of(frame)
        except BadClientFrame as error:
            self.num_dropped += 1
            if connection is not None:
                _send(connection, error_message(id_of(frame), explain(str(error))))
            return
        if isinstance(message, Hello):
            self._greet(wire, message)
        elif connection is None:
            self.num_dropped += 1
        elif isinstance(message, Submit):
            self._submit(connection, message, len(frame))
        elif isinstance(message, Abort):
            request = connection.requests.pop(message.id, None)
            if request is not None:
                request.abort()
            else:  # it ended meanwhile: a benign race
                self.num_dropped += 1
        else:
            assert_never(message)

    def _greet(self, wire: Wire, hello: Hello) -> None:
        refusal = self._refusal(hello)
        if refusal is not None:
            wire.send(encode_client(error_message(None, refusal)))
            return
        if wire not in self._connections:
            wire.welcome()
            self._connections[wire] = Connection(wire)
        config = self._service.config
        model, length = config.served_model_names[0], config.max_model_len
        welcome = Welcome(version=CLIENT_PROTOCOL, model=model, max_model_len=length)
        wire.send(encode_client(welcome))

    def _refusal(self, hello: Hello) -> ApiError | None:
        if hello.version != CLIENT_PROTOCOL:
            text = f"this server speaks protocol {CLIENT_PROTOCOL}, not {hello.version}"
            return ApiError(400, text, param="version")
        if not hmac.compare_digest(hello.api_key.encode(errors="replace"), self._api_key):
            return ApiError(401, "a valid API key is required", code="invalid_api_key")
        if len(self._connections) >= MAX_CONNECTIONS:
            return ApiError(503, "too many connections")
        return None

    def _submit(self, connection: Connection, submit: Submit, num_bytes: int) -> None:
        if submit.id in connection.requests:
            error = ApiError(409, f"request {submit.id} is open already", param="id")
            logger.info("a client used the id of an open request again")
            _send(connection, error_message(None, error))
        elif len(connection.requests) >= MAX_REQUESTS:
            error = ApiError(429, f"{MAX_REQUESTS} requests of this connection are open")
            _send(connection, error_message(submit.id, error))
        else:
            request = Request(submit, num_bytes)
            connection.requests[submit.id] = request
            self._note_planned(connection, num_bytes)
            task = asyncio.create_task(self._run(connection, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _note_planned(self, connection: Connection, num_more: int) -> None:
        """Count bytes that wait for their plan; who sends too many is not read meanwhile."""
        connection.num_planned_bytes += num_more
        self._num_planned_bytes += num_more
        is_full = self._num_planned_bytes > MAX_ALL_PLANNED_BYTES
        if num_more > 0 and (is_full or connection.num_planned_bytes > MAX_PLANNED_BYTES):
            connection.is_held = True
            connection.wire.hold()
        elif num_more < 0 and not is_full:
            for one in self._connections.values():
                if one.is_held and one.num_planned_bytes <= MAX_PLANNED_BYTES:
                    one.is_held = False
                    one.wire.go_on()

    # -- one request -----------------------------------------------------------------------------

    async def _run(self, connection: Connection, request: Request) -> None:
        try:
            with self._service.working(is_resumable=True):
                last = await self._generate(connection, request)
        except ApiError as error:
            last = error_message(request.id, error)
        except Exception:  # the edge: a bug costs this request alone
            logger.exception("a request over ZMQ failed")
            last = error_message(request.id, ApiError(500, "the server failed on this request"))
        if request.generation is not None:
            request.generation.abort()
        if not request.is_gone:
            del connection.requests[request.id]
            _send(connection, last)

    async def _planned(self, request: Request) -> tuple[Plan, list[int]]:
        """What is to be done, and the ids that the client holds of it."""
        submit = request.take_submit()
        await self._service.arrivals.turn()
        request.check_wanted()
        self._service.check_open(is_resumable=True)
        limits, params = self._service.limits, submit.params
        plan = await self._service.plan_client(
            params, prompt_of(submit, limits), params.logprobs, params.prompt_logprobs
        )
        timeout_s = resolve_timeout(params.timeout_s, "timeout_s")
        plan = msgspec.structs.replace(plan, timeout_s=timeout_s)
        return plan, emitted_of(submit, limits, plan.sampling[0].max_tokens)

    async def _generate(self, connection: Connection, request: Request) -> ToClient:
        try:
            plan, emitted = await self._planned(request)
        finally:
            self._note_planned(connection, -request.num_bytes)
        generation = self._service.generation(plan, is_resumable=True)
        request.check_wanted()
        request.generation = generation

        def sink(choice: Choice, delta: Delta) -> None:
            _emit(connection, request, choice, delta)

        self._service.start(generation, sink, emitted)
        await generation.accepted()
        choice = generation.choices[0]
        _send(connection, accepted_message(request.id, choice))
        early, request.early = request.early or [], None
        for emit in early:
            _send(connection, emit)
        await generation.done()
        assert choice.finish_reason is not None, "a generation is done with its last delta"
        return Finished(
            id=request.id,
            finish_reason=choice.finish_reason,
            num_prompt_tokens=choice.num_prompt_tokens,
            num_output_tokens=choice.num_output_tokens,
            num_cached_tokens=choice.cached,
        )

    # -- connections -----------------------------------------------------------------------------

    def _beat(self) -> None:
        if not self._is_open:
            return
        self._num_beats += 1
        for connection in self._connections.values():
            if connection.requests or self._num_beats % IDLE_BEATS == 0:
                _send(connection, Beat())
        asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def _lose(self, wire: Wire) -> None:
        """The client left, or was closed: free what it asked for."""
        connection = self._connections.pop(wire, None)
        if connection is None:
            return
        requests, connection.requests = connection.requests, {}
        for request in requests.values():
            request.abort()


def _send(connection: Connection, message: ToClient) -> None:
    connection.wire.send(encode_client(message))


def _emit(connection: Connection, request: Request, choice: Choice, delta: Delta) -> None:
    run = delta.prompt_logprobs
    scores = None if run is None else list(run.entries())
    if not (delta.token_ids or delta.text or scores):
        return
    emit = Emit(
        id=request.id,
        first=request.num_sent,
        tokens=array("i", delta.token_ids).tobytes(),
        text=delta.text,
        logprobs=delta.logprobs,
        prompt_first=0 if run is None else run.start,
        prompt_logprobs=scores,
    )
    request.num_sent += len(delta.token_ids)
    if request.early is not None:
        request.early.append(emit)
    else:
        _send(connection, emit)
