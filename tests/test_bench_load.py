"""The load generator: exact times by an injected clock, and real sockets against a small server."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from nvserve.scripts.bench.load import Answer, BadTarget, Connection, Pool, Target, run_load

TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
END = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


class Wire(asyncio.Transport):
    """Keeps what is written; closes silently."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def abort(self) -> None:
        self.is_closed = True


class Bench:
    """One connection on a wire, with the time under the test's hand."""

    def __init__(self, *, keep_events: bool = False) -> None:
        self.now = 10.0
        self.wire = Wire()
        self.connection = Connection(lambda: self.now, keep_events=keep_events)
        self.connection.connection_made(self.wire)
        self.answer = Answer()

    def ask(self) -> "asyncio.Future[None]":
        return self.connection.ask(b"request", self.answer, timeout_s=60.0)

    def receive(self, at: float, data: bytes) -> None:
        self.now = at
        self.connection.data_received(data)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(bounded())


def test_each_event_gets_the_time_of_the_bytes_that_completed_it() -> None:
    async def scene() -> None:
        bench = Bench()
        done = bench.ask()
        bench.receive(10.5, HEAD + chunk(TOKEN))
        bench.receive(11.0, chunk(TOKEN[:9]))
        bench.receive(11.25, chunk(TOKEN[9:] + TOKEN))
        bench.receive(12.0, chunk(USAGE) + chunk(END) + LAST_CHUNK)
        await done
        assert bench.answer.start_s == 10.0
        assert bench.answer.event_times == [10.5, 11.25, 11.25]
        assert (bench.answer.num_prompt_tokens, bench.answer.num_output_tokens) == (3, 2)
        assert bench.answer.is_complete
        assert bench.wire.written == b"request"

    run(scene)


def test_usage_inside_the_last_token_event_keeps_that_event() -> None:
    async def scene() -> None:
        bench = Bench(keep_events=True)
        done = bench.ask()
        last = b'data: {"choices":[{"text":"b"}],"usage":{"completion_tokens":2}}\n\n'
        bench.receive(11.0, HEAD + chunk(TOKEN) + chunk(last + END) + LAST_CHUNK)
        await done
        assert bench.answer.event_times == [11.0, 11.0]
        assert bench.answer.num_output_tokens == 2
        assert [json.loads(event)["choices"][0]["text"] for event in bench.answer.events] == [
            "a",
            "b",
        ]

    run(scene)


def test_comments_and_carriage_returns_are_no_events() -> None:
    async def scene() -> None:
        bench = Bench()
        done = bench.ask()
        body = b": ping\r\n\r\n" + TOKEN.replace(b"\n", b"\r\n") + END.replace(b"\n", b"\r\n")
        for place, byte in enumerate(body):  # borders anywhere
            bench.receive(11.0 + place, (HEAD if place == 0 else b"") + chunk(bytes([byte])))
        bench.receive(100.0, LAST_CHUNK)
        await done
        assert len(bench.answer.event_times) == 1
        assert bench.answer.num_output_tokens == 1
        assert bench.answer.is_complete

    run(scene)


def test_the_role_that_opens_a_chat_is_no_token() -> None:
    async def scene() -> None:
        bench = Bench()
        done = bench.ask()
        role = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
        word = b'data: {"choices":[{"delta":{"content":"a \\"role\\""}}]}\n\n'
        bench.receive(11.0, HEAD + chunk(role))
        bench.receive(12.0, chunk(word))
        bench.receive(13.0, chunk(word + END) + LAST_CHUNK)
        await done
        assert bench.answer.event_times == [12.0, 13.0]
        assert bench.answer.is_complete

    run(scene)


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        (HEAD + chunk(TOKEN) + LAST_CHUNK, "the stream ended without [DONE]"),
        (HEAD + chunk(b'data: {"error":{"code":5}}\n\n') + LAST_CHUNK, 'error event: {"code": 5}'),
        (b"HTTP/1.1 429 Busy\r\nContent-Length: 4\r\n\r\nfull", "HTTP 429: full"),
        (HEAD + chunk(b"data: {]\n\n") + LAST_CHUNK, "an event is not JSON: b' {]'"),
        (b"nonsense\r\n\r\n", "the answer is not HTTP"),
    ],
)
def test_a_failed_answer_says_why(received: bytes, expected: str) -> None:
    async def scene() -> None:
        bench = Bench()
        done = bench.ask()
        bench.receive(11.0, received)
        await done
        assert bench.answer.error.startswith(expected)

    run(scene)


def test_an_answer_that_never_ends_is_given_up_at_its_limit() -> None:
    async def scene() -> None:
        bench = Bench()
        done = bench.connection.ask(b"request", bench.answer, timeout_s=0.01)
        bench.receive(11.0, HEAD + chunk(TOKEN))
        await done
        assert bench.answer.error == "no end within 0.01 s"
        assert bench.wire.is_closed
        bench.receive(12.0, chunk(TOKEN))  # late bytes reach nobody
        assert bench.answer.event_times == [11.0]

    run(scene)


def test_a_target_keeps_a_path_prefix_and_brackets_ipv6() -> None:
    target = Target.parse("http://[::1]:9/base/", "/v1/completions", "secret-key")
    request = target.request(b"{}").decode()
    assert request.startswith("POST /base/v1/completions HTTP/1.1\r\nHost: [::1]:9\r\n")
    assert "Authorization: Bearer secret-key\r\n" in request
    assert request.endswith("Content-Length: 2\r\nAuthorization: Bearer secret-key\r\n\r\n{}")
    assert "secret-key" not in repr(target)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:port"])
def test_an_address_that_is_no_http_url_is_refused(url: str) -> None:
    with pytest.raises(BadTarget, match="URL"):
        Target.parse(url, "/v1/completions")


# -- real sockets ----------------------------------------------------------------------------------


class Server:
    """Answers every request with `num_tokens` events, after `work`; counts connections."""

    def __init__(self, num_tokens: int, work: Callable[[], None] = lambda: None) -> None:
        self.num_tokens = num_tokens
        self.work = work
        self.num_connections = 0
        self.bodies: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length:")[2].split()[0])
                self.bodies.append(await reader.readexactly(length))
                self.work()
                usage = {"prompt_tokens": 3, "completion_tokens": self.num_tokens}
                last = json.dumps({"choices": [], "usage": usage}).encode()
                writer.write(HEAD + b"".join([chunk(TOKEN)] * self.num_tokens))
                writer.write(chunk(b"data: " + last + b"\n\n" + END) + LAST_CHUNK)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client is done
        finally:
            writer.close()

    async def start(self) -> tuple[asyncio.Server, Target]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        return server, Target.parse(f"http://127.0.0.1:{port}", "/v1/completions")


def test_every_request_is_answered_over_as_few_connections_as_run_at_once() -> None:
    async def scene() -> None:
        fake = Server(num_tokens=5)
        server, target = await fake.start()
        async with server:
            bodies = [b"%d" % i for i in range(40)]
            with Pool(target, timeout_s=10) as pool:
                answers, _ = await run_load(pool, bodies, [0.0] * 40, max_concurrency=4)
        assert [answer.error for answer in answers] == [""] * 40
        assert {answer.num_output_tokens for answer in answers} == {5}
        assert sorted(fake.bodies) == sorted(bodies)
        assert fake.num_connections == 4

    run(scene)


def test_waiting_for_a_free_place_counts_as_queue_time_not_as_latency() -> None:
    now = 100.0

    def clock() -> float:
        return now

    def work() -> None:  # every answer takes a quarter of a second of this clock
        nonlocal now
        now += 0.25

    async def scene() -> None:
        server, target = await Server(num_tokens=1, work=work).start()
        async with server:
            with Pool(target, timeout_s=10, clock=clock) as pool:
                (first, second), took_s = await run_load(
                    pool, [b"1", b"2"], [0, 0], max_concurrency=1, clock=clock
                )
        assert (first.queue_s, second.queue_s, took_s) == (0.0, 0.25, 0.5)
        assert first.event_times[0] - first.start_s == 0.25
        assert second.event_times[0] - second.start_s == 0.25

    run(scene)


def test_a_server_that_is_not_there_fails_the_request_and_names_it() -> None:
    async def scene() -> None:
        server, target = await Server(num_tokens=1).start()
        server.close()
        await server.wait_closed()
        answer = await Pool(target, timeout_s=10).ask(b"")
        assert answer.error.startswith(f"no connection to 127.0.0.1:{target.port}")

    run(scene)
