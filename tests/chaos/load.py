"""The load of a chaos round: 16 streams, 4 plain requests and 2 new ones a second.

Runs on a thread of its own; every request becomes a Ride, which is judged against its case.
"""

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from chaos.cases import NUM_TOKENS, Case, Texts
from chaos.client import Answer, BadAnswer, Client
from process.server import wait_for

NUM_STREAMS = 16
NUM_PLAIN = 4
ARRIVALS_PER_S = 2.0
NUM_PLAIN_TOKENS = 60
NUM_ARRIVAL_TOKENS = 24
END_LIMIT_S = 270.0


@dataclass
class Ride:
    """One request from its start to its end."""

    kind: str  # stream, plain or arrival
    case: Case
    num_tokens: int
    begun: float
    answer: Answer = field(default_factory=Answer)
    error: Exception | None = None
    ended: float = 0.0

    @property
    def is_live(self) -> bool:
        return not self.ended

    def complaint(self, texts: Texts) -> str | None:
        """Why this is not the whole right answer; None when it is."""
        expected = self.case.ids[: self.num_tokens]
        where = f"{self.kind} after {len(self.answer.ids)} of {self.num_tokens} tokens"
        got = self.answer.ids
        if got != expected[: len(got)]:
            first = next(i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b)
            return f"{where}: id {first} is {got[first]}, not {expected[first]}"
        if self.error is not None:
            return f"{where}: {type(self.error).__name__}: {self.error}"
        if got != expected or not self.answer.is_complete:
            return f"{where}: incomplete"
        if self.answer.text != texts.decode(expected):
            return f"{where}: right ids, other text: {self.answer.text!r}"
        return None

    def pause_s(self, since: float, until: float) -> float | None:
        """The longest silence that overlaps the time given; None when it had no tokens around."""
        times = self.answer.times
        gaps = [b - a for a, b in itertools.pairwise(times) if b > since and a < until]
        return max(gaps, default=None)


class Load:
    """Use as a context: enter starts the requests, `finish` lets them end."""

    def __init__(
        self,
        url: str,
        cases: list[Case],
        *,
        seed: int,
        num_streams: int = NUM_STREAMS,
        num_plain: int = NUM_PLAIN,
        num_tokens: int = NUM_TOKENS,
        arrivals_per_s: float = ARRIVALS_PER_S,
        extra_bodies: tuple[dict[str, Any], ...] = (),
    ) -> None:
        self.rides: list[Ride] = []
        self.extras: list[Ride] = []
        self._client = Client(url)
        self._random = random.Random(seed)
        self._cases = cases
        self._num_streams = num_streams
        self._num_plain = num_plain
        self._num_tokens = num_tokens
        self._arrivals_per_s = arrivals_per_s
        self._extra_bodies = extra_bodies
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_stopping.set()
        self._thread.join(END_LIMIT_S)

    @property
    def streams(self) -> list[Ride]:
        return [ride for ride in self.rides if ride.kind == "stream"]

    def wait_flowing(self, num_tokens: int = 4) -> None:
        """Every stream has had some tokens."""

        def flows() -> bool:
            streams = self.streams
            return len(streams) == self._num_streams and all(
                len(ride.answer.ids) >= num_tokens or not ride.is_live for ride in streams
            )

        wait_for("all streams flow", flows, 60.0)

    def wait(self, what: str, probe: Callable[[list[Ride]], bool], limit_s: float = 60.0) -> None:
        wait_for(what, lambda: probe(self.rides), limit_s)

    def finish(self) -> list[Ride]:
        """No more arrivals; all that was begun, once it has ended."""
        self._is_stopping.set()
        self._thread.join(END_LIMIT_S)
        live = [ride for ride in self.rides if ride.is_live]
        assert not self._thread.is_alive(), f"{len(live)} requests hang: {live[:3]}"
        return self.rides

    # -- on the thread

    async def _run(self) -> None:
        choose = self._choices()
        tasks = [
            asyncio.create_task(self._ride("stream", next(choose), self._num_tokens))
            for _ in range(self._num_streams)
        ]
        tasks += [
            asyncio.create_task(self._ride("plain", next(choose), NUM_PLAIN_TOKENS))
            for _ in range(self._num_plain)
        ]
        tasks += [asyncio.create_task(self._extra(body)) for body in self._extra_bodies]
        due = time.monotonic()
        while not self._is_stopping.is_set():
            await asyncio.sleep(0.02)
            if self._arrivals_per_s and time.monotonic() >= due:
                due += 1 / self._arrivals_per_s
                tasks.append(
                    asyncio.create_task(self._ride("arrival", next(choose), NUM_ARRIVAL_TOKENS))
                )
        await asyncio.gather(*tasks)

    def _choices(self) -> Iterator[Case]:
        """All cases in random order, again and again."""
        while True:
            yield from self._random.sample(self._cases, len(self._cases))

    async def _ride(self, kind: str, case: Case, num_tokens: int) -> None:
        ride = Ride(kind, case, num_tokens, time.monotonic())
        self.rides.append(ride)
        body = case.body(num_tokens) | {"stream": kind == "stream"}
        await self._send(ride, body)

    async def _extra(self, body: dict[str, Any]) -> None:
        ride = Ride("extra", Case([], []), body["max_tokens"], time.monotonic())
        self.extras.append(ride)
        await self._send(ride, body)

    async def _send(self, ride: Ride, body: dict[str, Any]) -> None:
        try:
            await self._client.post(body, ride.answer)
        except (OSError, EOFError, TimeoutError, BadAnswer, asyncio.LimitOverrunError) as error:
            ride.error = error
        ride.ended = time.monotonic()


def complaints(rides: list[Ride], texts: Texts) -> list[str]:
    return [text for ride in rides if (text := ride.complaint(texts)) is not None]
