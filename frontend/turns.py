"""Large bodies are decoded one after another, so that they cannot hold the event loop together."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Final

from nvserve.frontend.errors import ApiError, deadline_passed
from nvserve.frontend.exchange import Exchange
from nvserve.frontend.held_bodies import HELD_RETRY_AFTER_S

LIMIT_S: Final = 10.0  # for which one waits for those before it


class Turns:
    """Whose large body is decoded now."""

    def __init__(self) -> None:
        self._lock: Final = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def one(self, exchange: Exchange) -> AsyncIterator[None]:
        """A turn, behind which whatever else runs gets as much time as it took.

        A 504 for who waits longer than the request may take, and a 503 for who waits too long in
        any case; ClientGone for whose client has hung up meanwhile.
        """
        own_s = exchange.timeout_s()
        limit_s = LIMIT_S if own_s is None else min(own_s, LIMIT_S)
        try:
            async with asyncio.timeout(limit_s):
                await self._lock.acquire()
        except TimeoutError as error:
            if own_s is not None and own_s <= LIMIT_S:
                raise deadline_passed() from error
            text = f"large bodies of others were decoded for {LIMIT_S:g} s"
            raise ApiError(503, text, retry_after_s=HELD_RETRY_AFTER_S) from error
        begun = time.monotonic()
        try:
            exchange.check_client()
            yield
        finally:
            try:
                await asyncio.sleep(time.monotonic() - begun)
            finally:
                self._lock.release()
