"""Requests of a burst are begun few in each pass of the loop, in their order, and none is left."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from frontend_loop_rig import LIMIT_S, Client, Served
from frontend_loop_rig import run as run_served

from nvserve.frontend import http
from nvserve.frontend.arrivals import MAX_A_PASS, Arrivals
from nvserve.frontend.errors import ApiError
from nvserve.frontend.zmq_api import Door
from nvserve.frontend.zmq_wire import Wire
from nvserve.protocol.client_messages import (
    CLIENT_PROTOCOL,
    Abort,
    Hello,
    Submit,
    encode_client,
)
from nvserve.protocol.messages import pack_ids

NUM_ARRIVALS = 5 * MAX_A_PASS + 3


class Passes:
    """Counts the passes of the loop."""

    def __init__(self) -> None:
        self.num = 0
        self._is_over = False
        asyncio.get_running_loop().call_soon(self._count)

    def _count(self) -> None:
        self.num += 1
        if not self._is_over:
            asyncio.get_running_loop().call_soon(self._count)

    def end(self) -> None:
        self._is_over = True


def run(story: Callable[[Arrivals, Passes], Awaitable[None]]) -> None:
    async def within() -> None:
        passes = Passes()
        async with asyncio.timeout(LIMIT_S):
            await story(Arrivals(), passes)
        passes.end()

    asyncio.run(within())


def test_few_are_begun_in_a_pass_and_in_their_order() -> None:
    async def story(arrivals: Arrivals, passes: Passes) -> None:
        begun: list[tuple[int, int]] = []

        async def arrive(number: int) -> None:
            await arrivals.turn()
            begun.append((passes.num, number))

        await asyncio.gather(*map(arrive, range(NUM_ARRIVALS)))
        assert [number for _, number in begun] == list(range(NUM_ARRIVALS))
        assert max(Counter(num for num, _ in begun).values()) == MAX_A_PASS

    run(story)


def test_one_that_comes_alone_does_not_wait() -> None:
    async def story(arrivals: Arrivals, passes: Passes) -> None:
        for _ in range(3):
            with pytest.raises(StopIteration):
                arrivals.turn().send(None)
            for _ in range(2):
                await asyncio.sleep(0)

    run(story)


def test_those_that_leave_while_they_wait_keep_nobody_waiting() -> None:
    async def story(arrivals: Arrivals, _: Passes) -> None:
        tasks = [asyncio.create_task(arrivals.turn()) for _ in range(NUM_ARRIVALS)]
        await asyncio.sleep(0)
        left = tasks[MAX_A_PASS : 3 * MAX_A_PASS]
        for task in left:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(result is None for result in results) == NUM_ARRIVALS - len(left)

    run(story)


def test_a_burst_of_requests_is_submitted_in_several_passes(tmp_path: Path) -> None:
    async def story(served: Served) -> None:
        journal = served.service.engine.journal
        nums = [0]
        clients = [Client("/v1/completions", {"prompt": [5]}) for _ in range(NUM_ARRIVALS)]
        tasks = [asyncio.create_task(served.answer(client)) for client in clients]
        async with asyncio.timeout(LIMIT_S):
            while nums[-1] < NUM_ARRIVALS:
                await asyncio.sleep(0)
                nums.append(len(journal))
        assert max(after - before for before, after in pairwise(nums)) <= MAX_A_PASS
        await served.service.drain(0.0)
        await asyncio.gather(*tasks)
        assert {client.status for client in clients} == {503}

    run_served(tmp_path, story)


def test_who_leaves_before_its_turn_costs_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(served: Served) -> None:
        parsed: list[bytes] = []

        def parse(body_type: Any, raw: bytes, max_ids: int) -> Any:
            parsed.append(raw)
            raise ApiError(400, "parsed")

        monkeypatch.setattr(http, "parse", parse)
        clients = [Client("/v1/completions", {"prompt": [5]}) for _ in range(NUM_ARRIVALS)]
        tasks = [asyncio.create_task(served.answer(client)) for client in clients]
        async with asyncio.timeout(LIMIT_S):
            while not parsed:
                await asyncio.sleep(0)
        assert len(parsed) == MAX_A_PASS
        for client in clients:
            client.is_gone = not client.status
        await asyncio.gather(*tasks)
        assert len(parsed) == MAX_A_PASS

    run_served(tmp_path, story)


def test_what_is_aborted_over_zmq_before_its_turn_costs_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(served: Served) -> None:
        planned: list[list[int]] = []

        async def plan(_: Any, prompt: list[int], *__: Any) -> Any:
            planned.append(prompt)
            raise ApiError(400, "planned")

        monkeypatch.setattr(served.service, "plan_client", plan)
        door = Door(served.service, "")
        wire = Mock(spec=Wire)
        door._take(wire, encode_client(Hello(version=CLIENT_PROTOCOL)))
        for number in range(NUM_ARRIVALS):
            submit = Submit(id=number, prompt_ids=pack_ids([5]))
            door._take(wire, encode_client(submit))
        await asyncio.sleep(0)
        assert len(planned) == MAX_A_PASS
        for number in range(MAX_A_PASS, NUM_ARRIVALS):
            door._take(wire, encode_client(Abort(id=number)))
        await asyncio.gather(*door._tasks)
        assert len(planned) == MAX_A_PASS

    run_served(tmp_path, story)
