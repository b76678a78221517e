"""A long life of one server: nothing that it holds grows with what it has served or survived."""

import math
import os
import signal

import pytest
from chaos.cases import Case, Texts
from chaos.conftest import Row
from chaos.flatness import Moment
from chaos.rig import Rig, rig, wait_dead
from chaos.traffic import Amounts, Traffic
from process.server import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NUM_REQUESTS = 20_000
NUM_DISCONNECTS = 500
NUM_PREEMPTIONS = 200
NUM_KILLS = 20
NUM_AT_ONCE = 24
VICTIMS = ("worker 1", "core", "frontend", "worker 1")  # in turn; worker 0 lives through it all
POOL = ("--block-size", "4", "--num-kv-blocks", "72", "--max-model-len", "192")
EARLY, QUIET = 0.2, 0.6  # shares of the requests: warm by then; no kill from then on
PART_LIMIT_S = 900.0


class Soak:
    """One server under traffic, and what happened to it."""

    def __init__(self, rig: Rig, traffic: Traffic) -> None:
        self.rig = rig
        self.traffic = traffic
        self.num_kills = 0
        self.num_preempted = 0
        self._last_preempted = 0

    def serve(self, until: int, num_kills: int) -> Moment:
        """Requests up to this number, with kills spread over them; what is held afterwards."""
        traffic, begun = self.traffic, self.traffic.num_ended
        thread = traffic.run(until)
        for number in range(num_kills):
            due = begun + (until - begun) * (number + 1) // (num_kills + 1)
            wait_for(f"{due} requests", lambda due=due: self._has_come(due), PART_LIMIT_S)  # type: ignore[misc]
            self._kill()
        wait_for(f"{until} requests", lambda: not thread.is_alive(), PART_LIMIT_S)
        assert not traffic.wrong, traffic.wrong[:5]
        self._count_preemptions()
        return Moment.of(self.rig)

    def _has_come(self, due: int) -> bool:
        return bool(self.traffic.num_ended >= due or self.traffic.wrong)

    def _kill(self) -> None:
        self._count_preemptions()
        name = VICTIMS[self.num_kills % len(VICTIMS)]
        self.num_kills += 1
        pid = self.rig.pid(name)
        if name == "frontend":
            self.traffic.frontend_deaths.append(math.inf)  # whoever comes may meet the dying
        os.kill(pid, signal.SIGKILL)
        dead = wait_dead(pid)
        if name == "frontend":
            self.traffic.frontend_deaths[-1] = dead
        wait_for("replaced", lambda: self.rig.server.pids().get(name, pid) != pid)
        self.rig.settled()
        if name == "core":
            self._last_preempted = 0

    def _count_preemptions(self) -> None:
        """Core counts since its own start."""
        now = wait_for("core's totals", self._preemptions) - 1
        self.num_preempted += max(0, now - self._last_preempted)
        self._last_preempted = now

    def _preemptions(self) -> int | None:
        """One more than core's count; None while it has told the frontend nothing."""
        count = self.rig.metrics().get("num_preemptions_total")
        return None if count is None else round(count) + 1


def test_nothing_grows(row: Row, texts: Texts, cases: list[Case]) -> None:
    scale = float(os.environ.get("NVSERVE_TEST_SCALE", "0.1"))
    num_kills = max(4, round(NUM_KILLS * scale))
    amounts = Amounts(round(NUM_REQUESTS * scale), round(NUM_DISCONNECTS * scale), NUM_AT_ONCE)
    with rig(texts, cases, *POOL) as server:
        soak = Soak(server, Traffic(server.url, texts, cases, amounts, row.seed))
        early = soak.serve(round(EARLY * amounts.num_requests), num_kills // 4)
        quiet = soak.serve(round(QUIET * amounts.num_requests), num_kills - num_kills // 4)
        late = soak.serve(amounts.num_requests, 0)
    row.num_rounds = soak.num_kills
    counts = dict(soak.traffic.counts)
    row.notes.append(f"{counts}, {soak.num_kills} kills, {soak.num_preempted} preemptions")
    row.notes.extend(moment.describe() for moment in (early, quiet, late))
    assert soak.traffic.num_ended == amounts.num_requests
    assert counts["left"] == amounts.num_disconnects
    assert soak.num_kills == num_kills
    assert soak.num_preempted >= NUM_PREEMPTIONS * scale
    assert early.complaints(late) == []
    assert quiet.complaints(late) == []
