"""Requests that wait for a slot and blocks, in the order of their turn: priority, then arrival."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Final

from nvserve.core.request import Phase, Request

MAX_BLOCKED: Final = 8  # requests without room that one pass looks beyond


class WaitingQueue:
    """A sorted list; a preempted request returns to its old place.

    A request that finds no room may be passed by others, but only `max_bypasses` times: then nobody
    behind it is admitted before it.
    """

    def __init__(self, max_bypasses: int) -> None:
        self._max_bypasses: Final = max_bypasses
        self._requests: Final[list[Request]] = []

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_order)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, request.order, key=_order)
        assert self._requests[index] is request, f"{request.request_id} does not wait"
        del self._requests[index]

    def turns(self) -> "Turns":
        """One pass in order; say of each request whether it was taken or is blocked, if either."""
        return Turns(self._requests, self._max_bypasses)

    def check(self) -> None:
        """Assert the order, and that everybody here waits with nothing in hand."""
        orders = [request.order for request in self._requests]
        assert orders == sorted(set(orders)), f"out of order: {orders}"
        for request in self._requests:
            assert request.phase is Phase.WAITING
            assert (request.blocks, request.slot) == ([], -1), f"waits with blocks: {request}"
            assert request.num_bypassed <= self._max_bypasses, f"passed too often: {request}"


class Turns:
    """A pass over the queue that ends where bypassing must end."""

    def __init__(self, requests: list[Request], max_bypasses: int) -> None:
        self._requests: Final = requests
        self._max_bypasses: Final = max_bypasses
        self._blocked: Final[list[Request]] = []
        self._next = 0

    def __iter__(self) -> Iterator[Request]:
        while self._next < len(self._requests) and not self._is_over():
            self._next += 1
            yield self._requests[self._next - 1]

    def take(self) -> None:
        """The request of this turn leaves the queue, before those blocked so far."""
        self._next -= 1
        self._requests.pop(self._next).num_bypassed = 0
        for request in self._blocked:
            request.num_bypassed += 1

    def block(self) -> None:
        """The request of this turn has no room now."""
        self._blocked.append(self._requests[self._next - 1])

    def _is_over(self) -> bool:
        return len(self._blocked) > MAX_BLOCKED or any(
            request.num_bypassed >= self._max_bypasses for request in self._blocked
        )


def _order(request: Request) -> tuple[int, float, int]:
    return request.order
