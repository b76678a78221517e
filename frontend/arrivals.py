"""Requests that come together are begun few at a time: streams have the event loop in between.

To plan and submit one takes some tenths of a millisecond. All of a burst in one pass of the loop
would be a pause of every stream. Behind its turn nothing spreads them any more: those whose texts
go through a thread come back as it is done with them, sometimes several in a pass.
"""

import asyncio
from collections import deque
from typing import Final

MAX_A_PASS: Final = 16  # requests; one to four milliseconds


class Arrivals:
    """Who may be begun in the present pass of the loop; first come, first served."""

    def __init__(self) -> None:
        self._waiting: Final[deque[asyncio.Future[None]]] = deque()
        self._num_begun = 0  # in this pass

    async def turn(self) -> None:
        """Wait for the pass in which this request is begun: as many passes as others need.

        Its client may have left meanwhile.
        """
        loop = asyncio.get_running_loop()
        if self._num_begun < MAX_A_PASS and not self._waiting:
            if not self._num_begun:
                loop.call_soon(self._next_pass)
            self._num_begun += 1
            return
        place: asyncio.Future[None] = loop.create_future()
        self._waiting.append(place)
        await place

    def _next_pass(self) -> None:
        self._num_begun = 0
        while self._waiting and self._num_begun < MAX_A_PASS:
            place = self._waiting.popleft()
            if not place.done():  # its task was not cancelled
                place.set_result(None)
                self._num_begun += 1
        if self._num_begun:
            asyncio.get_running_loop().call_soon(self._next_pass)
