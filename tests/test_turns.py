"""The queue of large bodies: nobody waits for ever, and nothing keeps it closed."""

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nvserve.frontend import turns as turns_module
from nvserve.frontend.errors import ApiError
from nvserve.frontend.exchange import ClientGone
from nvserve.frontend.turns import Turns


def exchange(timeout_s: float | None = None, *, is_gone: bool = False) -> Any:
    def check_client() -> None:
        if is_gone:
            raise ClientGone

    return SimpleNamespace(timeout_s=lambda: timeout_s, check_client=check_client)


async def decode(turns: Turns, *, of: Any) -> str:
    async with turns.one(of):
        return "decoded"


@pytest.mark.parametrize(
    ("timeout_s", "limit_s", "status", "retry_after_s"),
    [(0.01, 10.0, 504, None), (None, 0.01, 503, 1.0), (60.0, 0.01, 503, 1.0)],
)
def test_who_waits_too_long_is_refused(
    timeout_s: float | None,
    limit_s: float,
    status: int,
    retry_after_s: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns_module, "LIMIT_S", limit_s)

    async def run() -> None:
        turns = Turns()
        async with turns.one(exchange()):
            with pytest.raises(ApiError) as caught:
                await decode(turns, of=exchange(timeout_s))
            assert (caught.value.status, caught.value.retry_after_s) == (status, retry_after_s)
        assert await decode(turns, of=exchange()) == "decoded"

    asyncio.run(run())


def test_a_body_whose_client_has_gone_is_not_decoded() -> None:
    async def run() -> None:
        turns = Turns()
        with pytest.raises(ClientGone):
            await decode(turns, of=exchange(is_gone=True))
        assert await decode(turns, of=exchange()) == "decoded"

    asyncio.run(run())


def test_a_turn_ends_whatever_cuts_it_short() -> None:
    """An error inside, a cancellation inside, and one while it waits."""

    async def hold(turns: Turns, begun: asyncio.Event) -> None:
        async with turns.one(exchange()):
            begun.set()
            await asyncio.Event().wait()

    async def run() -> None:
        turns, begun = Turns(), asyncio.Event()
        with pytest.raises(ValueError, match="no JSON"):
            async with turns.one(exchange()):
                raise ValueError("no JSON")
        holding = asyncio.create_task(hold(turns, begun))
        await begun.wait()
        waiting = asyncio.create_task(decode(turns, of=exchange()))
        await asyncio.sleep(0)
        waiting.cancel()
        holding.cancel()
        await asyncio.wait([holding, waiting])
        assert holding.cancelled()
        assert waiting.cancelled()
        assert await decode(turns, of=exchange()) == "decoded"

    asyncio.run(run())


def one_look_a_turn() -> Turns:
    """A millisecond passes with each look at the clock, which is all of a turn."""
    return Turns(itertools.count(100.0, 0.001).__next__)


def test_work_that_takes_longer_than_its_request_may_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns_module, "PIECE_S", 0.0)

    async def run() -> None:
        turns, work = one_look_a_turn(), iter([None] * 1000)
        with pytest.raises(ApiError) as caught:
            await turns.work_off(work, exchange(0.05))
        assert caught.value.status == 504
        assert 0 < len(list(work)) < 1000
        await turns.work_off(iter([None] * 10), exchange())

    asyncio.run(run())


def test_works_with_one_patience_have_one_limit_together() -> None:
    async def run() -> None:
        turns, client = one_look_a_turn(), exchange(0.05)
        patience = turns.patience(client, 10.0)
        num_done = 0

        async def work_often() -> None:
            nonlocal num_done
            while num_done < 1000:
                await turns.work_off(iter([None]), client, patience)
                num_done += 1

        with pytest.raises(ApiError) as caught:
            await work_often()
        assert caught.value.status == 504
        assert num_done > 0
        await turns.work_off(iter([None]), client)

    asyncio.run(run())


def test_waiting_between_many_turns_has_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait for one turn each, and so never too long."""
    monkeypatch.setattr(turns_module, "PIECE_S", 0.0)
    monkeypatch.setattr(turns_module, "LIMIT_S", 0.05)

    async def bustle(turns: Turns) -> None:
        while True:
            with contextlib.suppress(ApiError):  # it waits for a turn as well
                await decode(turns, of=exchange())

    async def run() -> None:
        turns, work = one_look_a_turn(), iter([None] * 1000)
        others = asyncio.create_task(bustle(turns))
        with pytest.raises(ApiError) as caught:
            await turns.work_off(work, exchange(60.0))
        assert (caught.value.status, caught.value.retry_after_s) == (503, 1.0)
        assert 0 < len(list(work)) < 1000
        others.cancel()
        await asyncio.wait([others])
        assert others.cancelled()
        assert await decode(turns, of=exchange()) == "decoded"

    asyncio.run(run())


def test_work_is_done_in_order_and_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "PIECE_S", 0.0)
    done: list[str] = []

    def work(name: str) -> Iterator[None]:
        for number in range(3):
            done.append(f"{name}{number}")
            yield
        done.append(f"{name} ends")

    async def run() -> None:
        turns = Turns()
        await asyncio.gather(*(turns.work_off(work(name), exchange()) for name in "ab"))

    asyncio.run(run())
    assert done == ["a0", "b0", "a1", "b1", "a2", "b2", "a ends", "b ends"]
