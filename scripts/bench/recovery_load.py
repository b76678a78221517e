"""The load of `bench recovery`: streams over ZeroMQ, each of which asks again when it has ended.

Notes when every stream had tokens and which ones; judges nothing (recovery_report.py).
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self

from nvserve.frontend.client import AsyncClient
from nvserve.frontend.client_session import RequestError, Result
from nvserve.scripts.bench.recovery_report import Reference, Ride

REFUSED_S: Final = 0.2  # before a stream whose request failed asks again
REQUEST_LIMIT_S: Final = 600.0

Clock = Callable[[], float]


class NoTokens(RuntimeError):
    """Streams had no token for too long; the message says which."""


def greedy(num_tokens: int) -> dict[str, Any]:
    """Fields of a request for exactly so many tokens."""
    return {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0}


async def take_references(
    client: AsyncClient, prompts: Sequence[list[int]], num_tokens: int, limit_s: float
) -> list[Reference]:
    """The answers to the prompts, all asked at once of a server that nobody disturbs."""

    async def ask(prompt: list[int]) -> Result:
        return await client.generate(prompt, limit_s=limit_s, logprobs=2, **greedy(num_tokens))

    results = await asyncio.gather(*map(ask, prompts))
    return [
        Reference(
            prompt, result.token_ids, [_gap(one.top_logprobs) for one in result.logprobs or ()]
        )
        for prompt, result in zip(prompts, results, strict=True)
    ]


def _gap(best: Sequence[float]) -> float:
    """Between the two best; nothing comes near a token that is the only possible one."""
    return best[0] - best[1] if len(best) > 1 else float("inf")


class Load:
    """One stream for each reference, from entering the context until `finish` or its end."""

    def __init__(
        self,
        client: AsyncClient,
        references: Sequence[Reference],
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self.rides: Final[list[Ride]] = []
        self.arrivals_s: Final[list[list[float]]] = [[] for _ in references]  # by stream
        self._client: Final = client
        self._references: Final = references
        self._clock: Final = clock
        self._news: Final = asyncio.Event()
        self._is_stopping = False
        self._streams: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        count = len(self._references)
        self._streams = [asyncio.create_task(self._stream(number)) for number in range(count)]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)

    def forget(self) -> None:
        """Drop the arrivals so far: a long run would hold millions."""
        for arrivals_s in self.arrivals_s:
            arrivals_s.clear()

    async def wait_flowing(self, since_s: float, limit_s: float) -> None:
        """Until every stream has had a token after `since_s`; NoTokens when it lasts too long."""

        def silent() -> list[int]:
            return [
                number
                for number, arrivals_s in enumerate(self.arrivals_s)
                if not arrivals_s or arrivals_s[-1] <= since_s
            ]

        try:
            async with asyncio.timeout(limit_s):
                while silent():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise NoTokens(f"no token within {limit_s:g} s for streams {silent()}") from None

    async def finish(self, limit_s: float) -> None:
        """Let the open requests end; those that are late get an error."""
        self._is_stopping = True
        await asyncio.wait(self._streams, timeout=limit_s)
        for ride in self.rides:
            if math.isinf(ride.ended_s):
                ride.error = f"not ended within {limit_s:g} s of the last fault"

    def judgeable(self) -> list[Ride]:
        """All requests but those that run."""
        return [ride for ride in self.rides if ride.error or not math.isinf(ride.ended_s)]

    async def _stream(self, number: int) -> None:
        while not self._is_stopping:
            ride = Ride(number, self._clock())
            self.rides.append(ride)
            try:
                await self._ride(ride)
            except (RequestError, TimeoutError) as error:
                ride.error = f"{type(error).__name__}: {error}"
                await asyncio.sleep(REFUSED_S)  # who is refused at once shall not ask all the time
            except Exception as error:  # the client's end: no server, or tokens missing or doubled
                ride.error = f"{type(error).__name__}: {error}"
                return
            finally:
                ride.ended_s = self._clock()

    async def _ride(self, ride: Ride) -> None:
        """One request from its start to its end."""
        reference = self._references[ride.stream]
        arrivals_s = self.arrivals_s[ride.stream]
        fields = greedy(len(reference.ids))
        request = await self._client.submit(reference.prompt, **fields)
        async for piece in self._client.pieces(request, REQUEST_LIMIT_S):
            if piece.token_ids:
                ride.ids += piece.token_ids
                arrivals_s.append(self._clock())
                self._news.set()
