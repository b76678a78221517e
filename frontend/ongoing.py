"""Counts what is being done for clients, so that a drain can wait for it."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Final


class Ongoing:
    """What is under way, of one kind."""

    def __init__(self) -> None:
        self._num = 0
        self._none: Final = asyncio.Event()
        self._none.set()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Around one thing that is being done."""
        self._num += 1
        self._none.clear()
        try:
            yield
        finally:
            self._num -= 1
            if not self._num:
                self._none.set()

    async def end(self) -> None:
        """Wait until nothing is under way."""
        await self._none.wait()


async def have_ended(limit_s: float, *kinds: Ongoing) -> bool:
    """Wait for the end of all these; False when they have not ended in time."""
    try:
        async with asyncio.timeout(limit_s):
            for kind in kinds:
                await kind.end()
    except TimeoutError:
        return False
    return True
