"""The room of large bodies: what has come takes it, and who stops gives it up to those in need."""

import asyncio
import contextlib
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest

from nvserve.frontend import held_bodies
from nvserve.frontend.bulk import FREE_BYTES
from nvserve.frontend.cors import Cors
from nvserve.frontend.errors import ApiError
from nvserve.frontend.exchange import BODY_LIMIT_S, MAX_BODY_BYTES, Exchange
from nvserve.frontend.held_bodies import MAX_HELD_BYTES, SLOW_S, HeldBodies, HeldBody

MAX_NUM = MAX_HELD_BYTES // (MAX_BODY_BYTES - FREE_BYTES)  # of the largest bodies
PIECE = 64 << 10
LIMIT_S = 30.0


class Uploads:
    """Bodies that are being read, under a clock of the test's own."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.now = 100.0
        self.room = HeldBodies(lambda: self.now)
        self.ended: list[HeldBody] = []
        self._stack = stack

    def begin(self, num_bytes: int = 0) -> HeldBody:
        """One of which so much has come at once."""
        body = self._stack.enter_context(self.room.one())
        self._stack.enter_context(body.arriving(lambda: self.ended.append(body)))
        body.grow(num_bytes)
        return body


@pytest.fixture
def uploads() -> Iterator[Uploads]:
    with contextlib.ExitStack() as stack:
        yield Uploads(stack)


def refusal(body: HeldBody, num_bytes: int) -> int:
    with pytest.raises(ApiError) as caught:
        body.grow(num_bytes)
    assert caught.value.retry_after_s is not None
    return caught.value.status


def test_who_stops_in_the_midst_makes_room_for_others(uploads: Uploads) -> None:
    stopped = [uploads.begin(MAX_BODY_BYTES - 1) for _ in range(MAX_NUM)]
    assert refusal(uploads.begin(), MAX_BODY_BYTES) == 503  # it may go on any moment
    uploads.now += SLOW_S + 0.1
    uploads.begin(MAX_BODY_BYTES)
    assert len(uploads.ended) == 1
    assert refusal(uploads.ended[0], MAX_BODY_BYTES) == 408
    for _ in range(MAX_NUM - 1):
        uploads.begin(MAX_BODY_BYTES)
    assert set(uploads.ended) == set(stopped)
    assert refusal(uploads.begin(), MAX_BODY_BYTES) == 503


def test_a_drop_now_and_then_is_not_enough(uploads: Uploads) -> None:
    dripping = [uploads.begin(MAX_BODY_BYTES - 1000) for _ in range(MAX_NUM)]
    for second in range(int(SLOW_S) + 1):
        uploads.now += 1.0
        for body in dripping:
            body.grow(MAX_BODY_BYTES - 1000 + second)
    uploads.begin(MAX_BODY_BYTES)
    assert len(uploads.ended) == 1


def test_the_slow_one_with_the_most_goes_first(uploads: Uploads) -> None:
    little, much = uploads.begin(2 * FREE_BYTES), uploads.begin(20 * FREE_BYTES)
    uploads.now += SLOW_S + 0.1
    for _ in range(MAX_NUM):
        uploads.begin(MAX_BODY_BYTES)
    assert uploads.ended == [much]
    little.grow(2 * FREE_BYTES + 1)


@pytest.mark.parametrize("num_bytes", [2 * FREE_BYTES, 10 * FREE_BYTES, MAX_BODY_BYTES])
def test_an_even_upload_that_is_in_time_is_never_slow(uploads: Uploads, num_bytes: int) -> None:
    body, begun = uploads.begin(), uploads.now
    for so_far in range(PIECE, num_bytes + 1, PIECE):
        uploads.now = begun + BODY_LIMIT_S * so_far / num_bytes
        assert not body.is_slow
        body.grow(so_far)


def test_a_slow_one_is_left_alone_while_there_is_room(uploads: Uploads) -> None:
    slow = uploads.begin(20 * FREE_BYTES)
    uploads.now += BODY_LIMIT_S
    for _ in range(MAX_NUM - 1):
        uploads.begin(MAX_BODY_BYTES)
    assert not uploads.ended
    slow.grow(20 * FREE_BYTES + 1)


def test_what_waits_for_its_decoder_keeps_its_room() -> None:
    now = 100.0
    room = HeldBodies(lambda: now)
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_NUM):
            body = stack.enter_context(room.one())
            with body.arriving(lambda: pytest.fail("it has come")):
                body.grow(MAX_BODY_BYTES)
        now += BODY_LIMIT_S
        with room.one() as another:
            assert refusal(another, MAX_BODY_BYTES) == 503
    with room.one() as another:
        another.grow(MAX_BODY_BYTES)


def test_all_that_are_being_read_can_be_ended(uploads: Uploads) -> None:
    with uploads.room.one() as come:
        come.grow(MAX_BODY_BYTES)
        arriving = [uploads.begin(MAX_BODY_BYTES) for _ in range(2)]
        for _ in range(2):
            uploads.room.end_uploads(ApiError(503, "closed", retry_after_s=5.0))
        assert sorted(map(id, uploads.ended)) == sorted(map(id, arriving))
        assert [refusal(one, MAX_BODY_BYTES) for one in arriving] == [503, 503]
        come.check()


# -- an exchange whose room goes to another one ----------------------------------------------------


async def read(room: HeldBodies, num_bytes: int, *, stops: asyncio.Event | None = None) -> int:
    """Upload a body of this size, or stop at its end and say so; its size as it was read."""
    pieces = iter(range(0, num_bytes, PIECE))

    async def receive() -> dict[str, Any]:
        if next(pieces, None) is not None:
            return {"type": "http.request", "body": b"x" * PIECE, "more_body": True}
        if stops is not None:
            stops.set()
            await asyncio.Event().wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        pytest.fail(f"nothing is answered here: {message}")

    scope = {"headers": [(b"content-type", b"application/json")]}
    exchange = Exchange(scope, receive, send, Cors([]))
    with room.one() as held:
        return len(await exchange.read_json(held))


def test_an_upload_that_stopped_is_a_408_for_the_sake_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_bodies, "MAX_HELD_BYTES", 4 * FREE_BYTES)
    now = 100.0

    async def story() -> None:
        nonlocal now
        room, has_stopped = HeldBodies(lambda: now), asyncio.Event()
        stopped = asyncio.create_task(read(room, 4 * FREE_BYTES, stops=has_stopped))
        await has_stopped.wait()
        with pytest.raises(ApiError) as caught:
            await read(room, 4 * FREE_BYTES)
        assert caught.value.status == 503
        now += SLOW_S + 0.1
        assert await read(room, 4 * FREE_BYTES) == 4 * FREE_BYTES
        with pytest.raises(ApiError) as caught:
            await stopped
        assert (caught.value.status, caught.value.message[:8]) == (408, "the body")

    async def within() -> None:
        async with asyncio.timeout(LIMIT_S):
            await story()

    asyncio.run(within())
