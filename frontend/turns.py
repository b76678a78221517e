"""What would hold the event loop takes turns: large bodies, and prompts and texts of many ids.

There is one turn at a time, and whatever else runs gets the loop as long behind it.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final, Protocol

from nvserve.frontend.errors import ApiError, deadline_passed, raise_again
from nvserve.frontend.held_bodies import HELD_RETRY_AFTER_S

LIMIT_S: Final = 10.0  # for which one waits for others, in all of its turns together
PIECE_S: Final = 0.002  # of one turn, where work can stop in between


class Client(Protocol):
    """Whose work it is; exchange.Exchange for one."""

    def timeout_s(self) -> float | None:
        """In how many seconds its request must end, if it said so."""

    def check_client(self) -> None:
        """Raises once nobody waits for an answer."""


class Turns:
    """Whose work is done now. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock: Final = clock
        self._lock: Final = asyncio.Lock()
        self._error: ApiError | None = None

    def end(self, error: ApiError) -> None:
        """There are no more turns: who waits for one raises this."""
        self._error = error

    @contextlib.asynccontextmanager
    async def one(self, client: Client) -> AsyncIterator[None]:
        """A turn, behind which whatever else runs gets as much time as it took.

        A 504 for who waits longer than the request may take, and a 503 for who waits too long in
        any case; ClientGone for whose client has hung up meanwhile.
        """
        async with self._turn(client, Patience(client, self._clock, LIMIT_S)):
            yield

    def patience(self, client: Client, limit_s: float) -> "Patience":
        """For several pieces of one client's work together; `limit_s` is the one for others."""
        return Patience(client, self._clock, limit_s)

    async def work_off(
        self, work: Iterator[None], client: Client, patience: "Patience | None" = None
    ) -> None:
        """Do all of it, in as many turns as it takes; raises what `one` does.

        The limits are of all turns together, and the request's own is also of the work itself.
        `patience` has those of other work as well.
        """
        patience, is_done = patience or Patience(client, self._clock, LIMIT_S), False
        while not is_done:
            async with self._turn(client, patience):
                end = self._clock() + PIECE_S
                is_done = all(self._clock() < end for _ in work)  # stops when the time is up

    @contextlib.asynccontextmanager
    async def _turn(self, client: Client, patience: "Patience") -> AsyncIterator[None]:
        await patience.acquire(self._lock)
        begun = self._clock()
        try:
            raise_again(self._error)
            client.check_client()
            yield
        finally:
            try:
                await asyncio.sleep(self._clock() - begun)
            finally:
                self._lock.release()


class Patience:
    """How long one client's work may wait yet."""

    def __init__(self, client: Client, clock: Callable[[], float], limit_s: float) -> None:
        own_s = client.timeout_s()
        self._clock: Final = clock
        self._deadline: Final = float("inf") if own_s is None else clock() + own_s
        self._limit_s: Final = limit_s
        self._left_s = limit_s

    async def acquire(self, lock: asyncio.Lock) -> None:
        """Wait for it within the limits, of which the wait is taken."""
        begun = self._clock()
        own_left_s = self._deadline - begun
        if own_left_s <= 0:
            raise deadline_passed()
        try:
            async with asyncio.timeout(min(own_left_s, self._left_s)):
                await lock.acquire()
        except TimeoutError as error:
            if own_left_s <= self._left_s:
                raise deadline_passed() from error
            text = f"the long work of others took {self._limit_s:g} s"
            raise ApiError(503, text, retry_after_s=HELD_RETRY_AFTER_S) from error
        self._left_s = max(0.0, self._left_s - (self._clock() - begun))
