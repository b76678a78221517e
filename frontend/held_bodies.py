"""The room that all large bodies share while they are read or wait for their decoder.

A body takes room only by what has come of it. One that hardly grows keeps its room until another
one needs it: a client that sends slowly harms nobody by that alone, and one that stops in the midst
of its body shuts nobody out. A drain ends those that are still being read. Knows sizes and times;
what is in a body is bulk.py's affair.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final

from nvserve.frontend.bulk import FREE_BYTES
from nvserve.frontend.errors import ApiError, raise_again

MAX_HELD_BYTES: Final = 256 << 20  # of all large bodies together, less the free ones of each
HELD_RETRY_AFTER_S: Final = 1.0
# A body is slow when it has not grown by this share of itself in this time. One that comes evenly
# and within exchange.BODY_LIMIT_S, whatever its size, does so in three quarters of it.
GROWTH: Final = 1 / 16
SLOW_S: Final = 5.0


class HeldBodies:
    """All of them; `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock: Final = clock
        self._num_bytes = 0
        self._bodies: Final[set[HeldBody]] = set()

    @contextlib.contextmanager
    def one(self) -> Iterator["HeldBody"]:
        """While a body is held."""
        body = HeldBody(self)
        self._bodies.add(body)
        try:
            yield body
        finally:
            self._bodies.remove(body)
            self._free(body)

    def end_uploads(self, error: ApiError) -> None:
        """Those that are still being read raise this; what has come is left alone."""
        for body in self._bodies:
            if body.is_arriving:
                body.end(error)

    def take(self, body: "HeldBody", num_more: int) -> None:
        """Give a body more room, that of slow ones if need be; a 503 when there is none."""
        while self._num_bytes + num_more > MAX_HELD_BYTES:
            slow = [one for one in self._bodies if one is not body and one.is_slow]
            if not slow:
                text = f"large bodies of more than {MAX_HELD_BYTES} bytes are being read"
                raise ApiError(503, text, retry_after_s=HELD_RETRY_AFTER_S)
            largest = max(slow, key=lambda one: one.num_held)
            self._free(largest)
            text = "the body came too slowly, and others needed the room that it took"
            largest.end(ApiError(408, text, retry_after_s=HELD_RETRY_AFTER_S))
        body.num_held += num_more
        self._num_bytes += num_more

    def _free(self, body: "HeldBody") -> None:
        self._num_bytes -= body.num_held
        body.num_held = 0


class HeldBody:
    """One body and the room that it has."""

    def __init__(self, bodies: HeldBodies) -> None:
        self.num_held = 0
        self._bodies: Final = bodies
        self._end: Callable[[], None] | None = None  # of its upload, while that goes on
        self._error: ApiError | None = None  # with which its upload was ended
        self._mark_bytes = 0  # its size when it had last grown by its share, ...
        self._mark_s = 0.0  # ... and when that was

    @contextlib.contextmanager
    def arriving(self, end: Callable[[], None]) -> Iterator[None]:
        """While it is read: `end` is called if it must not go on, at most once."""
        self._end, self._mark_s = end, self._bodies.clock()
        try:
            yield
        finally:
            self._end = None

    def grow(self, num_bytes: int) -> None:
        """Its size is this now; a 503 when there is no room, and what `check` raises."""
        self.check()
        if num_bytes >= self._mark_bytes * (1 + GROWTH):
            self._mark_bytes, self._mark_s = num_bytes, self._bodies.clock()
        num_more = num_bytes - FREE_BYTES - self.num_held
        if num_more > 0:
            self._bodies.take(self, num_more)

    def check(self) -> None:
        """Raise what it was ended with: a 408 when its room went to others, a drain's 503."""
        raise_again(self._error)

    @property
    def is_arriving(self) -> bool:
        """It is being read."""
        return self._end is not None

    @property
    def is_slow(self) -> bool:
        """It has room, and has not grown by its share for too long."""
        if not (self.is_arriving and self.num_held):
            return False
        return self._bodies.clock() - self._mark_s > SLOW_S

    def end(self, error: ApiError) -> None:
        """Whoever reads it shall raise this instead."""
        assert self._end is not None, "only a body that is being read can be ended"
        end, self._end = self._end, None
        self._error = error
        end()
