"""`nvserve bench frontend`: the control path alone, from core's plan to the bytes on the wire.

A real launch whose simulated workers answer at once, and streaming clients that only count: every
client keeps one connection and asks again as soon as its stream ends. Reported are tokens streamed
per second in a window of steady load, and the CPU time each process spends per token. An event
carries several tokens when they come faster than it is sent: how many is told by the streams that
have ended, whose length is known.
"""

import asyncio
import json
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import click

from nvserve.scripts.address_option import Address
from nvserve.scripts.bench.cpu_time import child_pids, cpu_s
from nvserve.scripts.bench.event_loop import run_on_uvloop
from nvserve.scripts.bench.load import Target
from nvserve.scripts.bench.output_file import OutputFile
from nvserve.scripts.children import API_KEY_VARIABLE
from nvserve.scripts.finite_float import SECONDS, FiniteFloat
from nvserve.scripts.own_server import endpoint_or_own

EVENT: Final = b'data: {"'
DONE: Final = b"data: [DONE]\n\n\r\n0\r\n\r\n"
TARGET_TOKENS_PER_S: Final = 40_000
CONNECT_LIMIT_S: Final = 30.0
STALL_LIMIT_S: Final = 20.0  # without any event of any stream
TICK_S: Final = 0.1
MAX_SHOWN: Final = 1000  # bytes of an answer that is an error
LOADER: Final = "load generator"


@dataclass(frozen=True, slots=True)
class Report:
    """What one run measured; rates over the window."""

    num_clients: int
    max_tokens: int
    num_ranks: int  # 0 for a server whose processes are not of this machine and user
    window_s: float
    tokens_per_s: float
    tokens_per_event: float | None  # None: no stream has ended, and each event counts as one
    requests_per_s: float
    cpu_us_per_token: dict[str, float]  # by process
    cpu_share: dict[str, float]  # of one core, by process
    is_on_target: bool


class BenchFailed(click.ClickException):
    """The run is worth nothing: one line saying why."""


class Totals:
    """What all streams together have received."""

    def __init__(self) -> None:
        self.num_events = 0
        self.num_requests = 0  # that have ended
        self.num_ended_events = 0  # of these
        self.failure = ""


def _one_line(answer: bytes) -> str:
    """Status and body of an answer that is none to a request for tokens."""
    head, _, body = answer.decode(errors="replace").partition("\r\n\r\n")
    return f"{head.partition(chr(13))[0]} {body}".strip()


class StreamClient(asyncio.Protocol):
    """One connection: sends the request, counts events, and sends it again at the end."""

    def __init__(self, request: bytes, totals: Totals) -> None:
        self._request: Final = request
        self._totals: Final = totals
        self._transport: asyncio.Transport | None = None
        self._tail = b""  # of what came last: an event or the end may be cut anywhere
        self._num_events = 0  # of the stream under way
        self._refusal = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as TCP's
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        joined = self._tail + data
        num_new = joined.count(EVENT) - self._tail.count(EVENT)
        self._num_events += num_new
        self._totals.num_events += num_new
        self._tail = joined[-len(DONE) :]
        if self._tail == DONE:
            self._tail = b""
            self._totals.num_requests += 1
            self._totals.num_ended_events += self._num_events
            self._num_events = 0
            if self._transport is not None:
                self._transport.write(self._request)
        elif self._refusal:
            self._refuse(self._refusal + data)
        elif joined.startswith(b"HTTP/1.1 ") and joined[9:12] not in (b"200", b"20", b"2", b""):
            self._refuse(joined)

    def _refuse(self, answer: bytes) -> None:
        """What has come of an answer that is none; its reason may follow its head."""
        self._refusal = answer[:MAX_SHOWN]
        self._totals.failure = _one_line(self._refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._totals.failure = self._totals.failure or f"a connection was lost: {exc}"

    def close(self) -> None:
        """Leave without that counting as a loss."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()


# -- one run ---------------------------------------------------------------------------------------


def make_request(target: Target, number: int, *, num_prompt: int, max_tokens: int) -> bytes:
    """One client's request: a prompt of its own, in ids, and a fixed number of tokens."""
    body = {
        "prompt": [5 + (number * 7 + index) % 90 for index in range(num_prompt)],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    return target.request(json.dumps(body).encode())


class Reading:
    """CPU seconds of every process, events and the time, at one moment."""

    def __init__(self, pids: dict[str, int], totals: Totals) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.time_s = time.monotonic()
        self.cpu_s = {name: cpu_s(pid) for name, pid in pids.items()}
        self.cpu_s[LOADER] = usage.ru_utime + usage.ru_stime
        self.num_events = totals.num_events
        self.num_requests = totals.num_requests
        self.num_ended_events = totals.num_ended_events


async def drive(
    target: Target,
    requests: Sequence[bytes],
    pids: dict[str, int],
    *,
    warm_up_s: float,
    window_s: float,
) -> tuple[Reading, Reading]:
    """Load the server with one client for each request; readings at both ends of the window."""
    loop = asyncio.get_running_loop()
    totals = Totals()
    clients: list[StreamClient] = []
    try:
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                for request in requests:
                    client = StreamClient(request, totals)
                    await loop.create_connection(partial(_same, client), target.host, target.port)
                    clients.append(client)
        except OSError as error:
            text = str(error) or f"no answer within {CONNECT_LIMIT_S:g} s"
            raise BenchFailed(f"{target.host}:{target.port}: {text}") from error
        await _watch(totals, warm_up_s)
        before = Reading(pids, totals)
        await _watch(totals, window_s)
        return before, Reading(pids, totals)
    finally:
        for client in clients:
            client.close()


def _same(client: StreamClient) -> StreamClient:
    return client


async def _watch(totals: Totals, duration_s: float) -> None:
    """Let the load run for a while; fail when a stream fails or nothing moves."""
    end_s = last_s = time.monotonic()
    end_s += duration_s
    num_events = totals.num_events
    while (now_s := time.monotonic()) < end_s:
        await asyncio.sleep(min(TICK_S, end_s - now_s))
        if totals.failure:
            raise BenchFailed(totals.failure)
        if totals.num_events != num_events:
            num_events, last_s = totals.num_events, now_s
        elif now_s - last_s > STALL_LIMIT_S:
            raise BenchFailed(f"no token for {STALL_LIMIT_S:g} s")


def summarize(
    before: Reading, after: Reading, *, num_clients: int, max_tokens: int, num_ranks: int
) -> Report:
    """Differences over the window."""
    window_s = after.time_s - before.time_s
    num_events = after.num_events - before.num_events
    if not num_events:
        raise BenchFailed("no token was streamed in the window")
    ended = after.num_ended_events
    tokens_per_event = after.num_requests * max_tokens / ended if ended else None
    num_tokens = num_events * (tokens_per_event or 1.0)
    spent = {name: after.cpu_s[name] - before.cpu_s[name] for name in after.cpu_s}
    return Report(
        num_clients=num_clients,
        max_tokens=max_tokens,
        num_ranks=num_ranks,
        window_s=round(window_s, 2),
        tokens_per_s=round(num_tokens / window_s, 1),
        tokens_per_event=tokens_per_event and round(tokens_per_event, 3),
        requests_per_s=round((after.num_requests - before.num_requests) / window_s, 2),
        cpu_us_per_token={name: round(s * 1e6 / num_tokens, 2) for name, s in spent.items()},
        cpu_share={name: round(s / window_s, 3) for name, s in spent.items()},
        is_on_target=num_tokens / window_s >= TARGET_TOKENS_PER_S,
    )


def print_report(report: Report) -> None:
    """A table for people."""
    click.echo(
        f"{report.num_clients} streams, {report.max_tokens} tokens each, tp {report.num_ranks}: "
        f"{report.tokens_per_s:,.0f} tokens/s, {report.requests_per_s:,.1f} requests/s "
        f"(target {TARGET_TOKENS_PER_S:,} tokens/s)"
    )
    if report.tokens_per_event is None:
        click.echo("no stream has ended: each event counts as one token")
    else:
        click.echo(f"{report.tokens_per_event:.2f} tokens an event")
    click.echo(f"{'process':<16}{'CPU us/token':>14}{'share of a core':>17}")
    for name, microseconds in report.cpu_us_per_token.items():
        click.echo(f"{name:<16}{microseconds:>14.2f}{report.cpu_share[name]:>16.0%}")


@click.command(context_settings={"show_default": True})
@click.option("--endpoint", type=Address(), help="Of a running server.  [default: an own one]")
@click.option("--clients", type=click.IntRange(1), default=256, help="Streams at once.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=16, help="Of each request.")
@click.option("--max-tokens", type=click.IntRange(1), default=512, help="Of each request.")
@click.option("--tp", type=click.IntRange(1), help="Simulated ranks of an own one.  [default: 1]")
@click.option("--warm-up", "warm_up_s", type=FiniteFloat(0), default=3.0, help="Seconds.")
@click.option("--window", "window_s", type=SECONDS, default=10.0, help="Seconds measured.")
@click.option("--output", type=OutputFile(), help="JSON file of the result.")
def frontend(
    endpoint: str | None,
    clients: int,
    prompt_tokens: int,
    max_tokens: int,
    tp: int | None,
    warm_up_s: float,
    window_s: float,
    output: Path | None,
) -> None:
    """Tokens streamed per second over HTTP by the control path alone, and where the time goes."""
    if endpoint is not None and tp is not None:
        raise click.UsageError("--tp is for a new server, not for --endpoint")
    if endpoint is not None and not endpoint.startswith("http://"):
        raise click.UsageError("--endpoint: the streams are counted over plain http:// alone")
    flags = ["--device", "sim", "--tp", str(tp or 1), "--max-num-seqs", str(clients)]
    with endpoint_or_own(endpoint, flags) as url:
        base_url = url.rstrip("/").removesuffix("/v1")
        target = Target.parse(base_url, "/v1/completions", os.environ.get(API_KEY_VARIABLE, ""))
        pids = child_pids(base_url)
        requests = [
            make_request(target, number, num_prompt=prompt_tokens, max_tokens=max_tokens)
            for number in range(clients)
        ]
        before, after = run_on_uvloop(
            drive(target, requests, pids, warm_up_s=warm_up_s, window_s=window_s)
        )
    num_ranks = sum(name.startswith("worker") for name in pids)
    report = summarize(
        before, after, num_clients=clients, max_tokens=max_tokens, num_ranks=num_ranks
    )
    print_report(report)
    if output is not None:
        output.write_text(json.dumps(asdict(report), indent=2) + "\n")
