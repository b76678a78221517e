"""Sends requests to an OpenAI-compatible server and notes when each event of an answer arrived.

One protocol object per connection, no task per event: an event costs a split, an append and its
share of one clock reading, JSON is parsed once per answer. Every wait has a limit. Knows HTTP and
server-sent events; never what the times mean (report.py).
"""

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

import httptools

CONNECT_LIMIT_S: Final = 30.0
MAX_IDLE_S: Final = 2.0  # a server may close a kept connection after a few seconds
MAX_ERROR_CHARS: Final = 500
DONE: Final = b"data: [DONE]"

Clock = Callable[[], float]


class BadTarget(ValueError):
    """An address that is not a usable http(s) URL."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go: the parts of a URL, and the headers every request carries."""

    host: str
    port: int
    path: str
    is_tls: bool = False
    api_key: str = field(default="", repr=False)

    @staticmethod
    def parse(base_url: str, endpoint: str, api_key: str = "") -> "Target":
        """From `http://host:port[/prefix]` and `/v1/...`; BadTarget when it is no such URL."""
        try:
            parts = urlsplit(base_url)
            port = parts.port
            (parts.hostname or "").encode("idna")  # raises when it is no name
        except ValueError as error:
            raise BadTarget(f"{base_url!r} is no URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadTarget(f"{base_url!r} is no http:// or https:// URL")
        is_tls = parts.scheme == "https"
        path = parts.path.rstrip("/") + "/" + endpoint.lstrip("/")
        return Target(parts.hostname, port or (443 if is_tls else 80), path, is_tls, api_key)

    def request(self, body: bytes, method: str = "POST") -> bytes:
        """One HTTP/1.1 request with this body."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Accept: text/event-stream, application/json",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass(slots=True)
class Answer:
    """What came back for one request; times are readings of the clock, in seconds."""

    start_s: float = 0.0  # written to the socket
    queue_s: float = 0.0  # waited before that for one of the allowed concurrent requests
    event_times: list[float] = field(default_factory=list)  # events that carry a choice
    num_prompt_tokens: int = 0  # as the server counted them, 0 = not told
    num_output_tokens: int = 0
    error: str = ""  # empty = success
    events: list[bytes] = field(default_factory=list)  # their JSON, if kept
    body: bytes = b""  # of an answer that is no event stream

    @property
    def is_complete(self) -> bool:
        return not self.error


class Connection(asyncio.Protocol):
    """One kept-alive HTTP/1.1 connection that carries one request at a time."""

    def __init__(self, clock: Clock, *, keep_events: bool) -> None:
        self._clock: Final = clock
        self._keep_events: Final = keep_events
        self._parser: Final = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0
        self._rest = b""  # of an event that is not whole yet
        self._last = b""  # the last event but [DONE]
        self._is_done = False  # [DONE] was seen
        self._is_stream = False
        self.idle_since = 0.0
        self.is_open = False

    def ask(self, request: bytes, answer: Answer, timeout_s: float) -> "asyncio.Future[None]":
        """Send one request; the future ends, never with an exception, when `answer` is final."""
        assert self._transport is not None, "ask() before the connection was made"
        assert self._answer is None, "ask() while an answer is still coming"
        loop = asyncio.get_running_loop()
        self._answer, self._done = answer, loop.create_future()
        self._rest = self._last = b""
        self._is_done = self._is_stream = False
        limit = loop.call_later(timeout_s, self.abort, f"no end within {timeout_s:g} s")
        self._done.add_done_callback(lambda _: limit.cancel())
        answer.start_s = self._clock()
        self._transport.write(request)
        return self._done

    def abort(self, reason: str) -> None:
        """Give up on the answer that is coming, if any, and close."""
        self._finish(reason)
        self.close()

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's side ----------------------------------------------------------------------------

    def connection_made(  # type: ignore[override]  # a stream socket gives a Transport
        self, transport: asyncio.Transport
    ) -> None:
        self._transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.abort(f"the answer is not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._finish(f"the connection was lost: {exc or 'closed by the server'}")

    # -- the parser's side -------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type" and b"event-stream" in value:
            self._is_stream = True

    def on_body(self, body: bytes) -> None:
        answer = self._answer
        if answer is None:
            return  # after the limit
        if not self._is_stream:
            answer.body += body
            return
        if b"\r" in body:
            body = body.replace(b"\r", b"")  # only line ends hold it: JSON escapes its own
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            if event == DONE:
                self._is_done = True
            elif event.startswith(b"data:"):
                self._last = event
                if not answer.event_times and _is_opening(event[5:]):
                    continue
                answer.event_times.append(self._now)
                if self._keep_events:
                    answer.events.append(event[5:])

    def on_message_complete(self) -> None:
        if self._answer is None:
            return
        status = self._parser.get_status_code()
        error = self._close_answer(self._answer, status)
        if not self._parser.should_keep_alive():
            self.close()
        self._finish(error)

    def _close_answer(self, answer: Answer, status: int) -> str:
        """Read the token counts off the last event; the error, if there is one."""
        if status != 200:
            text = (answer.body or self._last or self._rest)[:MAX_ERROR_CHARS]
            return f"HTTP {status}: {text.decode(errors='replace')}"
        if not self._is_stream:
            return ""
        if self._last:
            error = _read_last_event(answer, self._last[5:])
            if error:
                return error
        return "" if self._is_done else "the stream ended without [DONE]"

    def _finish(self, error: str) -> None:
        if self._answer is None or self._done is None:
            return
        self._answer.error = error
        self._answer = None
        self.idle_since = self._clock()
        if not self._done.done():
            self._done.set_result(None)


def _is_opening(event: bytes) -> bool:
    """A chat's first event may hold the role alone, and be sent before there is a token."""
    if b'"role"' not in event:
        return False
    try:
        delta = json.loads(event)["choices"][0]["delta"]
    except (ValueError, LookupError, TypeError):
        return False  # malformed, or text that holds the word
    return "role" in delta and not delta.get("content")


def _read_last_event(answer: Answer, event: bytes) -> str:
    """Take usage off an answer's last event, which is no token when it has no choice."""
    try:
        content = json.loads(event)
    except ValueError:
        return f"an event is not JSON: {event[:MAX_ERROR_CHARS]!r}"
    if "error" in content:
        answer.event_times.pop()
        return f"error event: {json.dumps(content['error'])[:MAX_ERROR_CHARS]}"
    if not content.get("choices"):
        answer.event_times.pop()
        if answer.events:
            answer.events.pop()
    usage = content.get("usage") or {}
    answer.num_prompt_tokens = usage.get("prompt_tokens", 0)
    answer.num_output_tokens = usage.get("completion_tokens", len(answer.event_times))
    return ""


class Pool:
    """Connections to one server, reused while they are fresh; leaving the `with` closes all."""

    def __init__(
        self,
        target: Target,
        *,
        timeout_s: float,
        keep_events: bool = False,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._target: Final = target
        self._timeout_s: Final = timeout_s
        self._keep_events: Final = keep_events
        self._clock: Final = clock
        self._made: Final[list[Connection]] = []
        self._idle: Final[list[Connection]] = []
        self._ssl: Final = ssl.create_default_context() if target.is_tls else None

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exc: object) -> None:
        for connection in self._made:
            connection.close()

    async def ask(self, body: bytes, *, method: str = "POST") -> Answer:
        """The answer to one request; failures are in its `error`."""
        answer = Answer()
        try:
            connection = await self._connect()
        except (OSError, TimeoutError) as error:
            answer.start_s = self._clock()
            answer.error = f"no connection to {self._target.host}:{self._target.port}: {error}"
            return answer
        await connection.ask(self._target.request(body, method), answer, self._timeout_s)
        if connection.is_open:
            self._idle.append(connection)
        return answer

    async def _connect(self) -> Connection:
        while self._idle:
            kept = self._idle.pop()
            if kept.is_open and self._clock() - kept.idle_since < MAX_IDLE_S:
                return kept
            kept.close()
        async with asyncio.timeout(CONNECT_LIMIT_S):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self._clock, keep_events=self._keep_events),
                self._target.host,
                self._target.port,
                ssl=self._ssl,
            )
        self._made.append(connection)
        return connection


async def run_load(
    pool: Pool,
    bodies: Sequence[bytes],
    arrivals_s: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_answer: Callable[[Answer], object] = lambda _: None,
    clock: Clock = time.perf_counter,
) -> tuple[list[Answer], float]:
    """Send body i at `arrivals_s[i]` after the start; all answers in order, and the duration.

    A request over `max_concurrency` waits for an earlier one to end; that time is its `queue_s`.
    """
    gate = asyncio.Semaphore(max_concurrency or len(bodies) or 1)

    async def send(body: bytes) -> Answer:
        due_s = clock()
        async with gate:
            waited_s = clock() - due_s
            answer = await pool.ask(body)
        answer.queue_s = waited_s
        on_answer(answer)
        return answer

    start_s = clock()
    async with asyncio.TaskGroup() as tasks:
        sent = []
        for body, arrival_s in zip(bodies, arrivals_s, strict=True):
            wait_s = start_s + arrival_s - clock()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            sent.append(tasks.create_task(send(body)))
    return [task.result() for task in sent], clock() - start_s
