"""A small HTTP client that notes when each token came; light, since it shares the server's cores.

Knows one connection a request and nothing of retries: whatever breaks is what a client would see.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

ANSWER_LIMIT_S = 240.0  # for one whole request


class BadAnswer(Exception):
    """An error where tokens were due; `status` is 0 when it came within a stream."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(f"{status}: {error}")
        self.status = status
        self.code = error.get("code")


@dataclass
class Answer:
    """What one request got so far; times are CLOCK_MONOTONIC seconds, one an event with ids."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    times: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    is_complete: bool = False

    def take(self, choice: dict[str, Any]) -> None:
        self.text += choice.get("text") or ""
        ids = choice.get("token_ids") or []
        if ids:
            self.ids += ids
            self.times.append(time.monotonic())
        self.finish_reason = choice.get("finish_reason") or self.finish_reason


class Client:
    """Requests to one server, from coroutines or one by one."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.address = (parts.hostname, parts.port)

    async def post(self, body: dict[str, Any], answer: Answer) -> None:
        """POST /v1/completions; fills the answer as it comes. OSError, EOFError or BadAnswer."""
        async with asyncio.timeout(ANSWER_LIMIT_S):
            connection = await _Connection.open(self.address, "POST", "/v1/completions", body)
            try:
                await _read_answer(connection, answer)
            finally:
                await connection.close()

    async def get(self, path: str) -> tuple[int, str]:
        """Status and body."""
        async with asyncio.timeout(ANSWER_LIMIT_S):
            connection = await _Connection.open(self.address, "GET", path, None)
            try:
                return connection.status, (await connection.body()).decode()
            finally:
                await connection.close()

    def complete(self, body: dict[str, Any]) -> Answer:
        """One plain completion."""
        answer = Answer()
        asyncio.run(self.post(body, answer))
        return answer

    def fetch(self, path: str) -> tuple[int, str]:
        return asyncio.run(self.get(path))


class _Connection:
    """One request and its response."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.status = 0
        self._length = -1  # chunked

    @classmethod
    async def open(
        cls, address: tuple[str, int], method: str, path: str, body: dict[str, Any] | None
    ) -> Self:
        """Send the request, read status and headers."""
        connection = cls(*await asyncio.open_connection(*address))
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n"
        if body is not None:
            head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n"
        connection._writer.write(head.encode() + b"\r\n" + data)
        try:
            await connection._read_head()
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _read_head(self) -> None:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        self.status = int(lines[0].split()[1])
        for line in lines[1:]:
            name, _, value = line.partition(":")
            if name.lower() == "content-length":
                self._length = int(value)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The pieces of the body; EOFError (IncompleteReadError) when it breaks off."""
        if self._length >= 0:
            yield await self._reader.readexactly(self._length)
            return
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            piece = await self._reader.readexactly(size + 2)
            yield piece[:-2]
        await self._reader.readexactly(2)

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.chunks()])

    async def close(self) -> None:
        self._writer.transport.abort()
        with contextlib.suppress(OSError):  # it broke before
            await self._writer.wait_closed()


async def _read_answer(connection: _Connection, answer: Answer) -> None:
    if connection.status != 200:
        raise BadAnswer(connection.status, json.loads(await connection.body())["error"])
    rest = b""
    is_stream = False
    async for piece in connection.chunks():
        rest += piece
        is_stream |= rest.startswith(b"data:")
        while is_stream and b"\n\n" in rest:
            event, _, rest = rest.partition(b"\n\n")
            _take_event(event, answer)
    if not is_stream:
        answer.take(json.loads(rest)["choices"][0])
        answer.is_complete = True


def _take_event(event: bytes, answer: Answer) -> None:
    value = event.removeprefix(b"data: ")
    if value == b"[DONE]":
        answer.is_complete = True
        return
    message = json.loads(value)
    if "error" in message:
        raise BadAnswer(0, message["error"])
    for choice in message["choices"]:
        answer.take(choice)
