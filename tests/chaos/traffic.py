"""Traffic of a soak: very many short requests, several at a time, some of whose clients leave.

Runs on a thread of its own. Every answer is compared with its reference as soon as it is there, so
that nothing is kept of the right ones.
"""

import asyncio
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass

from chaos.cases import Case, Texts
from chaos.client import Answer, BadAnswer, Client
from chaos.load import Ride

MAX_TOKENS = 8
LONG_SHARE, LONG_TOKENS = 0.1, 48  # these outgrow a small pool, and somebody is preempted
BROKEN = (OSError, EOFError, TimeoutError, BadAnswer, asyncio.LimitOverrunError)
STRUCK_S = 0.2  # who comes so soon after a death may still have met the dead
END_LIMIT_S = 600.0


@dataclass(frozen=True)
class Amounts:
    """How much of each thing shall have happened at the end."""

    num_requests: int
    num_disconnects: int
    num_at_once: int


class ClientLeft(Exception):
    """Raised within a request to leave it."""


class LeavingAnswer(Answer):
    """An answer whose reader goes away once it has seen a beginning."""

    def take(self, choice: dict[str, object]) -> None:
        super().take(choice)
        if self.ids:
            raise ClientLeft


class Traffic:
    """Served in parts: `run(until)` sends requests until so many have ended, then none is open."""

    def __init__(self, url: str, texts: Texts, cases: list[Case], amounts: Amounts, seed: int):
        self.counts: Counter[str] = Counter()  # right, left, cut (by a death of the frontend)
        self.wrong: list[str] = []
        self.frontend_deaths: list[float] = []  # monotonic times
        self._client = Client(url)
        self._texts = texts
        self._cases = cases
        self._amounts = amounts
        self._chance = random.Random(seed)
        self._num_begun = 0

    @property
    def num_ended(self) -> int:
        return self.counts["right"] + self.counts["left"] + len(self.wrong)

    def run(self, until: int) -> threading.Thread:
        """Begin sending; the thread ends when `until` requests in all have ended."""
        thread = threading.Thread(target=lambda: asyncio.run(self._send_all(until)), daemon=True)
        thread.start()
        return thread

    async def _send_all(self, until: int) -> None:
        await asyncio.gather(*(self._send_some(until) for _ in range(self._amounts.num_at_once)))

    async def _send_some(self, until: int) -> None:
        """One client: one request after the other."""
        while self._num_begun < until and not self.wrong:
            self._num_begun += 1
            share = self._amounts.num_disconnects / self._amounts.num_requests
            # evenly spread, so that the number is exact
            number = self._num_begun
            if int(number * share) > int((number - 1) * share):
                await self._leave()
            else:
                await self._ask()

    async def _ask(self) -> None:
        """One request to its right end, begun again when it died with a frontend."""
        case = self._chance.choice(self._cases)
        is_long = self._chance.random() < LONG_SHARE
        num_tokens = LONG_TOKENS if is_long else self._chance.randint(1, MAX_TOKENS)
        kind = self._chance.choice(["stream", "plain"])
        while True:
            ride = Ride(kind, case, num_tokens, time.monotonic())
            try:
                body = case.body(num_tokens) | {"stream": kind == "stream"}
                await self._client.post(body, ride.answer)
            except BROKEN as error:
                ride.error = error
            complaint = ride.complaint(self._texts)
            if complaint is None:
                self.counts["right"] += 1
                return
            got = ride.answer.ids
            if not self._was_struck(ride.begun) or got != case.ids[: len(got)]:
                self.wrong.append(complaint)
                return
            self.counts["cut"] += 1

    async def _leave(self) -> None:
        """One request whose client hangs up after the first tokens."""
        case = self._chance.choice(self._cases)
        answer, begun = LeavingAnswer(), time.monotonic()
        try:
            await self._client.post(case.body(len(case.ids)) | {"stream": True}, answer)
        except ClientLeft:
            if answer.ids != case.ids[: len(answer.ids)]:
                self.wrong.append(f"one that left after {answer.ids}")
        except BROKEN as error:
            if not self._was_struck(begun):
                self.wrong.append(f"one that would leave: {error!r}")
        self.counts["left"] += 1

    def _was_struck(self, begun: float) -> bool:
        """Was it open when a frontend died?"""
        return any(begun < at + STRUCK_S for at in self.frontend_deaths)
