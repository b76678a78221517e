"""Input of every bad kind against a whole server: no crash, no hang, no error but a documented one.

How many of each: NVSERVE_TEST_SCALE of the number in the test (0.1 by default). A seed that ever
failed is kept in its list and always runs.
"""

import asyncio
import os
import random
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from process.server import Server
from surface.asking import NUM_TRIES, Asker, in_time
from surface.mutations import broken, mutated_body, raw_stream

from nvserve.frontend.client import Client
from nvserve.protocol.client_messages import Abort, ClientParams, Hello, Submit, encode_client

SCALE = float(os.environ.get("NVSERVE_TEST_SCALE", "0.1"))
LIMIT_S = 2.0  # for a refusal; one that was late is asked for again, alone
ANSWER_LIMIT_S = 120.0  # for the tokens of what is accepted, by many and on a full machine
NUM_CONNECTIONS = 16
KEPT_BODIES: list[int] = []
KEPT_STREAMS: list[int] = []
KEPT_FRAMES: list[int] = []
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def target() -> Iterator[Asker]:
    """A short context, so that whatever is accepted ends soon."""
    server = Server.launch(
        *("--spares", "0", "--zmq-port", "0", "--num-kv-blocks", "500"),
        *("--max-model-len", "128", "--log-level", "error"),
    )
    try:
        yield Asker(server, server.wait_ready())
    finally:
        server.close()


def seeds(count: int, kept: list[int]) -> list[int]:
    return kept + list(range(round(count * SCALE)))


# -- HTTP ------------------------------------------------------------------------------------------


class Session:
    """One keep-alive connection; opened again whenever the server closes it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.writer: asyncio.StreamWriter | None = None

    async def post(self, path: str, body: bytes) -> int:
        """The status; the whole answer has been read."""
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writer.write(head.encode() + body)
        headers = await self.reader.readuntil(b"\r\n\r\n")
        status = int(headers.split(b" ", 2)[1])
        lines = headers.lower().split(b"\r\n")
        if b"transfer-encoding: chunked" in lines:
            while (await self._chunk()) > 0:
                pass
        else:
            [length] = [line for line in lines if line.startswith(b"content-length:")]
            await self.reader.readexactly(int(length.partition(b":")[2]))
        if b"connection: close" in lines:
            self.close()
        return status

    async def _chunk(self) -> int:
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        await self.reader.readexactly(size + 2)
        return size

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.writer = None


def test_mutated_bodies(target: Asker) -> None:
    queue = seeds(100_000, KEPT_BODIES)[::-1]
    wrong: list[str] = []
    late: list[int] = []
    counts: dict[int, int] = {}

    async def work() -> None:
        session = Session(target.port)
        while queue:
            seed = queue.pop()
            path, body = mutated_body(seed)
            begun = time.monotonic()
            try:
                async with asyncio.timeout(ANSWER_LIMIT_S):
                    status = await session.post(path, body)
            except (TimeoutError, OSError, EOFError) as error:
                wrong.append(f"{seed}: {type(error).__name__}")
                session.close()
                continue
            counts[status] = counts.get(status, 0) + 1
            if status >= 500 and status != 503:
                wrong.append(f"{seed}: {status}")
            elif status != 200 and time.monotonic() - begun > LIMIT_S:
                late.append(seed)
        session.close()

    async def run() -> None:
        await asyncio.gather(*(work() for _ in range(NUM_CONNECTIONS)))

    asyncio.run(run())
    assert not wrong, wrong[:20]
    for seed in late:
        in_time(LIMIT_S, lambda seed=seed: target.post(*mutated_body(seed)))  # type: ignore[misc]
    assert counts[200] > 50 * SCALE, "next to nothing was accepted"
    assert counts[400] > 50 * SCALE, "next to nothing was refused"
    target.check_alive()


def test_raw_bytes(target: Asker) -> None:
    queue = seeds(20_000, KEPT_STREAMS)[::-1]
    wrong: list[str] = []
    late: list[int] = []

    async def exchange(stream: bytes, draw: random.Random) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        try:
            cut = draw.randrange(len(stream) + 1)
            for part in (stream[:cut], stream[cut:]):
                writer.write(part)
                await asyncio.sleep(0)
            writer.write_eof()
            answer = await reader.read()
            for line in answer.split(b"\r\n"):
                if line.startswith(b"HTTP/1.1 5") and not line.startswith(b"HTTP/1.1 503"):
                    raise ValueError(line.decode())
        finally:
            writer.close()

    async def work() -> None:
        while queue:
            seed = queue.pop()
            stream = raw_stream(seed)
            try:
                async with asyncio.timeout(LIMIT_S):
                    await exchange(stream, random.Random(seed))
            except TimeoutError:
                late.append(seed)
            except OSError:  # the server may cut a client that still sends
                continue
            except ValueError as error:
                wrong.append(f"{seed}: {error}")

    async def run() -> None:
        await asyncio.gather(*(work() for _ in range(NUM_CONNECTIONS)))

    asyncio.run(run())
    for _ in range(NUM_TRIES):
        queue, late = late, []
        asyncio.run(work())
    wrong += [f"{seed}: no end within {LIMIT_S} s" for seed in late]
    assert not wrong, wrong[:20]
    target.check_alive()


# -- ZMQ -------------------------------------------------------------------------------------------


def frame(seed: int) -> list[bytes]:
    """A multipart message: mutated messages of the protocol, other msgpack, or noise."""
    draw = random.Random(seed)
    messages: list[Hello | Abort | Submit] = [
        Hello(version=draw.choice([1, 1, 0, 2**40])),
        Abort(id=draw.randrange(5)),
        Submit(id=draw.randrange(5), prompt="a", params=ClientParams(max_tokens=2)),
        Submit(id=-(2**63), prompt_ids=b"\7\0\0\0", emitted=b"\7\0\0\0"),
    ]
    good = encode_client(draw.choice(messages))
    kind = draw.randrange(6)
    if kind == 0:
        return [draw.randbytes(draw.randrange(0, 300))]
    if kind == 1:
        value: object = draw.choice(
            [1, "x", [], {}, {"type": "Submit"}, {"type": 5}, [[[]]], None, 2.5]
        )
        return [msgspec.msgpack.encode(value)]
    if kind == 2:
        return [good] * draw.randrange(2, 5)
    if kind == 3:
        return [b"\x91" * draw.randrange(1, 5000)]
    return [broken(draw, good) if kind == 4 else good]


def test_frames(target: Asker) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        for number, chunk in enumerate(_chunks(seeds(50_000, KEPT_FRAMES), 250)):
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 1000)
            socket.connect(target.zmq_endpoint)
            if number % 4:  # every fourth connection never introduces itself
                socket.send(encode_client(Hello(version=1)))
            for seed in chunk:
                socket.send_multipart(frame(seed))
            with Client(target.zmq_endpoint) as client:
                result = client.generate(
                    [5, 6], max_tokens=2, limit_s=ANSWER_LIMIT_S, ignore_eos=True
                )
                assert result.num_output_tokens == 2, f"behind seeds {chunk[0]} to {chunk[-1]}"
            socket.close(linger=1000)
    finally:
        context.destroy(linger=0)
    target.check_alive()


def _chunks(items: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
