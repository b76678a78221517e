"""The load generator of `nvserve bench frontend` counts events however they are cut."""

import asyncio
import json
import signal
from types import FrameType

import pytest

from nvserve.scripts.bench.event_loop import run_on_uvloop
from nvserve.scripts.bench.frontend import (
    LOADER,
    BenchFailed,
    Reading,
    StreamClient,
    Totals,
    make_request,
    summarize,
)
from nvserve.scripts.bench.load import Target

STREAM = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    + b'1c\r\ndata: {"choices":[]}\n\n\r\n' * 5
    + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
)


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent.append(bytes(data))

    def abort(self) -> None:
        pass


@pytest.mark.parametrize("size", [1, 2, 3, 7, 13, 50, 1000])
def test_events_and_ends_are_counted_at_any_cut(size: int) -> None:
    totals, wire = Totals(), Wire()
    client = StreamClient(b"request", totals)
    client.connection_made(wire)
    for start in range(0, len(STREAM), size):
        client.data_received(STREAM[start : start + size])
    assert (totals.num_events, totals.num_requests, totals.failure) == (5, 1, "")
    assert totals.num_ended_events == 5
    client.data_received(STREAM[: len(STREAM) // 2])
    assert (totals.num_events > 5, totals.num_ended_events) == (True, 5)
    assert wire.sent == [b"request", b"request"]


def test_an_error_answer_is_a_failure() -> None:
    totals = Totals()
    client = StreamClient(b"", totals)
    client.connection_made(Wire())
    client.data_received(b"HTTP/1.1 429 Too Many Requests\r\n\r\n")
    assert "429" in totals.failure


def test_an_error_is_told_in_one_line() -> None:
    totals = Totals()
    client = StreamClient(b"", totals)
    client.connection_made(Wire())
    client.data_received(b'HTTP/1.1 400 Bad Request\r\ndate: now\r\n\r\n{"error":{}}')
    assert totals.failure == 'HTTP/1.1 400 Bad Request {"error":{}}'


@pytest.mark.parametrize("size", [1, 7, 30])
def test_the_reason_of_an_error_may_come_behind_its_head(size: int) -> None:
    totals = Totals()
    client = StreamClient(b"", totals)
    client.connection_made(Wire())
    answer = b'HTTP/1.1 400 Bad Request\r\ndate: now\r\n\r\n{"error":{}}'
    for start in range(0, len(answer), size):
        client.data_received(answer[start : start + size])
    assert totals.failure == 'HTTP/1.1 400 Bad Request {"error":{}}'


def test_ctrl_c_ends_the_load_and_is_told_to_who_had_it_before() -> None:
    told = []

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)
        raise KeyboardInterrupt

    async def load() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        await asyncio.sleep(30.0)

    before = signal.signal(signal.SIGINT, note)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_on_uvloop(load())
        assert signal.getsignal(signal.SIGINT) is note
    finally:
        signal.signal(signal.SIGINT, before)
    assert told == [signal.SIGINT]


def test_a_request_is_whole_http_with_its_own_prompt() -> None:
    target = Target.parse("http://host:1", "/v1/completions", "a-secret-key")
    first, second = (make_request(target, number, num_prompt=8, max_tokens=4) for number in (0, 1))
    head, _, body = first.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert b"\r\nAuthorization: Bearer a-secret-key" in head
    assert json.loads(body)["prompt"] != json.loads(second.partition(b"\r\n\r\n")[2])["prompt"]


def test_rates_are_differences_over_the_window() -> None:
    totals = Totals()
    before = Reading({}, totals)
    totals.num_events, totals.num_requests = 1000, 10
    after = Reading({}, totals)
    after.time_s = before.time_s + 2.0
    report = summarize(before, after, num_clients=1, max_tokens=100, num_ranks=1)
    assert (report.tokens_per_s, report.requests_per_s, report.is_on_target) == (500.0, 5.0, False)
    assert report.tokens_per_event is None
    with pytest.raises(BenchFailed, match="no token"):
        summarize(after, after, num_clients=1, max_tokens=100, num_ranks=1)


def test_an_event_counts_as_the_tokens_that_ended_streams_had_in_each() -> None:
    totals = Totals()
    before = Reading({}, totals)
    totals.num_events, totals.num_requests, totals.num_ended_events = 1000, 18, 900
    after = Reading({}, totals)
    after.time_s = before.time_s + 2.0
    after.cpu_s[LOADER] = before.cpu_s[LOADER] + 0.002
    report = summarize(before, after, num_clients=2, max_tokens=100, num_ranks=1)
    assert (report.tokens_per_s, report.tokens_per_event) == (1000.0, 2.0)
    assert report.cpu_us_per_token == {LOADER: 1.0}
