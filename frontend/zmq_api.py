"""The ZMQ door: clients of protocol/client_messages.py on one ROUTER socket.

Bounded in connections, requests and unsent bytes for each; a client that cannot be reached, or does
not read, loses its requests. Knows plans and generations; never core.
"""

import asyncio
import hmac
import logging
from array import array
from typing import Final, assert_never

import msgspec
import zmq

from nvserve.frontend.errors import ApiError
from nvserve.frontend.generation import Choice, Delta
from nvserve.frontend.params import check_ids, resolve_timeout
from nvserve.frontend.schema import explain
from nvserve.frontend.service import Service
from nvserve.frontend.zmq_connection import (
    Connection,
    Request,
    accepted_message,
    error_message,
    id_of,
    ids_of,
    message_of,
    prompt_of,
)
from nvserve.protocol.client_messages import (
    BEAT_S,
    CLIENT_PROTOCOL,
    MAX_CLIENT_FRAME_BYTES,
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
# Of one connection, beyond what the socket queues: some seconds of a whole batch, as an offline
# client with hundreds of streams needs while it looks elsewhere.
MAX_UNSENT_BYTES: Final = 32 << 20
MAX_ALL_UNSENT_BYTES: Final = 256 << 20  # of all; beyond it the connection with most is dropped
MAX_FRAMES_AT_ONCE: Final = 64  # read before other callbacks get their turn
QUEUED_FRAMES: Final = 1000  # in the socket, for one connection and each direction
RETRY_S: Final = 0.02
IDLE_BEATS: Final = 20  # a connection without requests gets every 20th beat, to find it gone
HEARTBEAT_MS: Final = 2000  # of the transport, which finds dead machines


class Door:
    """The socket and its connections."""

    def __init__(
        self, service: Service, context: "zmq.Context[zmq.Socket[bytes]]", api_key: str
    ) -> None:
        self._service: Final = service
        self._context: Final = context
        self._api_key: Final = api_key.encode()
        self._socket: zmq.Socket[bytes] | None = None
        self._fd = -1
        self._connections: dict[bytes, Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_drain_due = False
        self._is_retry_due = False
        self._num_beats = 0
        self._num_unsent_bytes = 0  # of all connections
        self.num_dropped = 0

    def open(self, endpoint: str) -> str:
        """Bind, and return the address with its real port; an empty endpoint leaves it closed."""
        if not endpoint:
            return ""
        router = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_CLIENT_FRAME_BYTES),
            (zmq.RCVHWM, QUEUED_FRAMES),
            (zmq.SNDHWM, QUEUED_FRAMES),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, 2 * HEARTBEAT_MS),
        ):
            router.setsockopt(option, value)
        router.bind(endpoint)
        self._socket = router
        self._fd = int(router.getsockopt(zmq.FD))
        loop = asyncio.get_running_loop()
        loop.add_reader(self._fd, self._drain)
        loop.call_later(BEAT_S, self._beat)
        return bytes(router.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def close(self) -> None:
        """Abort every request and close the socket."""
        for connection in list(self._connections.values()):
            self._drop(connection)
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            self._socket.close(linger=0)
            self._socket = None

    # -- frames in -------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Read all there is: the descriptor signals edges, and sending may swallow one."""
        self._is_drain_due = False
        for _ in range(MAX_FRAMES_AT_ONCE):
            if self._socket is None:
                return
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if len(parts) == 2:
                self._take(parts[0], parts[1])
            else:
                self.num_dropped += 1
        self._drain_soon()  # whoever sends without end does not stop the loop

    def _drain_soon(self) -> None:
        if not self._is_drain_due:
            self._is_drain_due = True
            asyncio.get_running_loop().call_soon(self._drain)

    def _take(self, identity: bytes, frame: bytes) -> None:
        connection = self._connections.get(identity)
        try:
            message = message_of(frame)
        except BadClientFrame as error:
            self.num_dropped += 1
            if connection is not None:
                self._send(connection, error_message(id_of(frame), explain(str(error))))
            return
        if isinstance(message, Hello):
            self._greet(identity, message)
        elif connection is None:
            self.num_dropped += 1
        elif isinstance(message, Submit):
            self._submit(connection, message)
        elif isinstance(message, Abort):
            request = connection.requests.pop(message.id, None)
            if request is not None:
                request.abort()
            else:  # it ended meanwhile: a benign race
                self.num_dropped += 1
        else:
            assert_never(message)

    def _greet(self, identity: bytes, hello: Hello) -> None:
        connection = self._connections.get(identity) or Connection(identity)
        refusal = self._refusal(identity, hello)
        if refusal is not None:
            self._try_send(connection, encode_client(error_message(None, refusal)))
            return
        self._connections[identity] = connection
        config = self._service.config
        model, length = config.served_model_names[0], config.max_model_len
        self._send(connection, Welcome(version=CLIENT_PROTOCOL, model=model, max_model_len=length))

    def _refusal(self, identity: bytes, hello: Hello) -> ApiError | None:
        if not identity.startswith(b"\0"):  # such names are the client's choice, and can be reused
            text = "routing_id: must not be set: replies could reach another client"
            return ApiError(400, text, param="routing_id")
        if hello.version != CLIENT_PROTOCOL:
            text = f"this server speaks protocol {CLIENT_PROTOCOL}, not {hello.version}"
            return ApiError(400, text, param="version")
        if not hmac.compare_digest(hello.api_key.encode(errors="replace"), self._api_key):
            return ApiError(401, "a valid API key is required", code="invalid_api_key")
        if len(self._connections) >= MAX_CONNECTIONS:
            return ApiError(503, "too many connections")
        return None

    def _submit(self, connection: Connection, submit: Submit) -> None:
        if submit.id in connection.requests:
            error = ApiError(409, f"request {submit.id} is open already", param="id")
            logger.info("a client used the id of an open request again")
            self._send(connection, error_message(None, error))
        elif len(connection.requests) >= MAX_REQUESTS:
            error = ApiError(429, f"{MAX_REQUESTS} requests of this connection are open")
            self._send(connection, error_message(submit.id, error))
        else:
            request = Request(submit)
            connection.requests[submit.id] = request
            task = asyncio.create_task(self._run(connection, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    # -- one request -----------------------------------------------------------------------------

    async def _run(self, connection: Connection, request: Request) -> None:
        request_id = request.submit.id
        try:
            with self._service.working():
                last = await self._generate(connection, request)
        except ApiError as error:
            last = error_message(request_id, error)
        except Exception:  # the edge: a bug costs this request alone
            logger.exception("a request over ZMQ failed")
            last = error_message(request_id, ApiError(500, "the server failed on this request"))
        if request.generation is not None:
            request.generation.abort()
        if not request.is_gone:
            del connection.requests[request_id]
            self._send(connection, last)

    async def _generate(self, connection: Connection, request: Request) -> ToClient:
        submit = request.submit
        self._service.check_open()
        params = submit.params
        plan = await self._service.plan_client(
            params, prompt_of(submit), params.logprobs, params.prompt_logprobs
        )
        timeout_s = resolve_timeout(params.timeout_s, "timeout_s")
        plan = msgspec.structs.replace(plan, timeout_s=timeout_s)
        emitted = ids_of(submit.emitted, "emitted")
        check_ids(emitted, self._service.limits, "emitted")
        if len(emitted) > plan.sampling[0].max_tokens:
            raise ApiError(400, "emitted: is longer than max_tokens", param="emitted")
        generation = self._service.generation(plan)
        if request.is_gone:
            raise ApiError(499, "aborted")
        request.generation = generation

        def sink(choice: Choice, delta: Delta) -> None:
            self._emit(connection, request, choice, delta)

        self._service.start(generation, sink, emitted)
        await generation.accepted()
        choice = generation.choices[0]
        self._send(connection, accepted_message(submit.id, choice))
        early, request.early = request.early or [], None
        for emit in early:
            self._send(connection, emit)
        await generation.done()
        assert choice.finish_reason is not None, "a generation is done with its last delta"
        return Finished(
            id=submit.id,
            finish_reason=choice.finish_reason,
            num_prompt_tokens=choice.num_prompt_tokens,
            num_output_tokens=choice.num_output_tokens,
            num_cached_tokens=choice.cached,
        )

    def _emit(self, connection: Connection, request: Request, choice: Choice, delta: Delta) -> None:
        scores = delta.prompt_logprobs
        if not (delta.token_ids or delta.text or scores):
            return
        emit = Emit(
            id=request.submit.id,
            first=request.num_sent,
            tokens=array("i", delta.token_ids).tobytes(),
            text=delta.text,
            logprobs=delta.logprobs,
            prompt_first=choice.num_scored - len(scores) + 1 if scores else 0,
            prompt_logprobs=scores,
        )
        request.num_sent += len(delta.token_ids)
        if request.early is not None:
            request.early.append(emit)
        else:
            self._send(connection, emit)

    # -- frames out ------------------------------------------------------------------------------

    def _send(self, connection: Connection, message: ToClient) -> None:
        if connection.is_dropped:  # what came later would follow a gap
            return
        frame = encode_client(message)
        if not connection.unsent and self._try_send(connection, frame):
            return
        connection.unsent.append(frame)
        self._retry_later()
        connection.num_unsent_bytes += len(frame)
        self._num_unsent_bytes += len(frame)
        if connection.num_unsent_bytes > MAX_UNSENT_BYTES:
            self._cut(connection)
        elif self._num_unsent_bytes > MAX_ALL_UNSENT_BYTES:
            self._cut(max(self._connections.values(), key=lambda one: one.num_unsent_bytes))

    def _cut(self, connection: Connection) -> None:
        logger.info("a ZMQ client does not read: its requests are aborted")
        self._drop(connection)

    def _try_send(self, connection: Connection, frame: bytes) -> bool:
        """Send one frame; False when the client is behind. One that left is dropped."""
        if self._socket is None:
            return True
        self._drain_soon()  # sending can swallow the descriptor's next signal
        try:
            self._socket.send_multipart([connection.identity, frame], zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._drop(connection)
        return True

    def _retry_later(self) -> None:
        if not self._is_retry_due:
            self._is_retry_due = True
            asyncio.get_running_loop().call_later(RETRY_S, self._send_unsent)

    def _send_unsent(self) -> None:
        self._is_retry_due = False
        for connection in list(self._connections.values()):
            while connection.unsent and self._try_send(connection, connection.unsent[0]):
                if connection.unsent:  # not dropped meanwhile
                    num_bytes = len(connection.unsent.popleft())
                    connection.num_unsent_bytes -= num_bytes
                    self._num_unsent_bytes -= num_bytes
            if connection.unsent:
                self._retry_later()

    def _beat(self) -> None:
        if self._socket is None:
            return
        self._num_beats += 1
        for connection in list(self._connections.values()):
            if connection.requests or self._num_beats % IDLE_BEATS == 0:
                self._send(connection, Beat())
        asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def _drop(self, connection: Connection) -> None:
        """The client left, or does not read: free what it asked for."""
        connection.is_dropped = True
        self._connections.pop(connection.identity, None)
        requests, connection.requests = connection.requests, {}
        connection.unsent.clear()
        self._num_unsent_bytes -= connection.num_unsent_bytes
        connection.num_unsent_bytes = 0
        for request in requests.values():
            request.abort()
