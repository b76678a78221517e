"""Which requests have run out of time; knows ids and times, never the clock."""

import heapq
from collections.abc import Container, Iterator
from typing import Final


class Deadlines:
    """A heap of deadlines; entries of requests that ended meanwhile are dropped now and then."""

    def __init__(self) -> None:
        self._heap: Final[list[tuple[float, int]]] = []  # UNIX seconds, request id

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline: float, request_id: int, alive: Container[int]) -> None:
        """`alive` holds the ids that still matter."""
        heapq.heappush(self._heap, (deadline, request_id))
        if len(self._heap) & (len(self._heap) - 1) == 0:  # at each power of two
            self._heap[:] = [entry for entry in self._heap if entry[1] in alive]
            heapq.heapify(self._heap)

    def pop_passed(self, now: float) -> Iterator[int]:
        """Ids whose deadline is at or before `now`, earliest first."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]
