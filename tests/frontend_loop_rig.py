"""The HTTP application on the test's own loop, for what one request costs it.

With the demo model's tokenizer and an engine without a core.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import zmq
from api.frontend_process import DEMO_MODEL, make_config

from nvserve.frontend.engine import Engine
from nvserve.frontend.http import application
from nvserve.frontend.http_server import TRANSPORT
from nvserve.frontend.service import Service
from nvserve.frontend.tokenizer import Tokenizer

LIMIT_S = 30.0
MAX_MODEL_LEN = 1_000_000


class Client:
    """One request to the application, and what came of it."""

    def __init__(self, path: str, body: Any, *, is_whole: bool = True) -> None:
        self.is_gone = False
        self.status = 0
        self.answer = b""
        self.is_read = False  # what there is of its body
        self._raw = json.dumps(body).encode()
        self._is_whole = is_whole
        self.transport = SimpleNamespace(
            is_closing=lambda: self.is_gone,
            write=self._take,
            get_write_buffer_size=lambda: 0,
        )
        self.scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "headers": [(b"content-type", b"application/json")],
            "extensions": {TRANSPORT: {"transport": self.transport}},
        }

    async def receive(self) -> dict[str, Any]:
        if self.is_read:
            await asyncio.Event().wait()
        self.is_read = True
        return {"type": "http.request", "body": self._raw, "more_body": not self._is_whole}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.answer += message.get("body", b"")

    def _take(self, chunk: bytes) -> None:
        """An HTTP chunk, written past `send`."""
        self.answer += chunk.split(b"\r\n", 1)[1].removesuffix(b"\r\n")


class Served:
    """The application, and how often others got the loop while a request was in it."""

    def __init__(self, folder: Path, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        config = make_config(max_model_len=MAX_MODEL_LEN)
        engine = Engine(config, life=0, launch_dir=str(folder), context=context)
        self.tokenizer = Tokenizer(DEMO_MODEL, MAX_MODEL_LEN)
        self.service = Service(config, self.tokenizer, engine)
        self._app = application(self.service, "")

    async def answer(self, client: Client, on_turn: Callable[[int], object] = int) -> int:
        """Have the request answered; `on_turn` is told how often others have had the loop."""
        num_turns = 0

        async def count() -> None:
            nonlocal num_turns
            while True:
                await asyncio.sleep(0)
                num_turns += 1
                on_turn(num_turns)

        counting = asyncio.create_task(count())
        try:
            async with asyncio.timeout(LIMIT_S):
                await self._app(client.scope, client.receive, client.send)
        finally:
            counting.cancel()
        return num_turns


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Served]:
    with zmq.Context() as context:
        served = Served(folder, context)
        yield served
        served.tokenizer.close()


def run(folder: Path, story: Callable[[Served], Awaitable[None]]) -> None:
    async def within() -> None:
        with serving(folder) as served:
            await story(served)

    asyncio.run(within())
