"""Strikes of `bench recovery`: a worker killed, stopped or restarted under load, and what follows.

Sees the server as any user of this machine may: its launcher's status, signals to its processes,
and the tokens of the load. Every wait has a limit.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nvserve.scripts.bench.recovery_load import Load, NoTokens
from nvserve.scripts.bench.recovery_report import PHASES, Fault, silence
from nvserve.scripts.control_socket import Reply, ask
from nvserve.scripts.embedded import EmbeddedLaunch
from nvserve.scripts.running import Refused, find_server

ASK_LIMIT_S: Final = 5.0
LOOK_S: Final = 0.01  # between looks at the launcher: how exactly times are known
SIGNALS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
PLANNED: Final = "planned"


class NotRecovered(RuntimeError):
    """The server did not come to what was waited for; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Server:
    """The launch under test, as its control socket shows it."""

    launch: EmbeddedLaunch
    directory: Path
    has_spare: bool

    @staticmethod
    def of(launch: EmbeddedLaunch, *, has_spare: bool) -> "Server":
        """The running one; NotRecovered when its control socket cannot be found."""
        try:
            directory = find_server(int(launch.announcement.url.rpartition(":")[2]))
        except Refused as error:
            raise NotRecovered(error.message) from error
        return Server(launch, directory, has_spare)

    async def wait(self, what: str, probe: Callable[[Reply], bool], limit_s: float) -> Reply:
        """The first status for which `probe` holds; NotRecovered when none comes in time."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            if not self.launch.is_running:
                raise NotRecovered(f"the server has ended\n{self.launch.last_words()}")
            status = await self._status()
            if status is not None and probe(status):
                return status
            await asyncio.sleep(LOOK_S)
        raise NotRecovered(f"{what}: not within {limit_s:g} s")

    async def settle(self, limit_s: float) -> Reply:
        """Ready, with a warm spare if there is to be one."""

        def is_settled(status: Reply) -> bool:
            spares = [one for one in status["processes"] if one["name"] == "spare"]
            has_spare = any(spare["is_ready"] for spare in spares) or not self.has_spare
            return bool(status["state"] == "ready" and has_spare)

        what = "ready with a warm spare" if self.has_spare else "ready"
        return await self.wait(what, is_settled, limit_s)

    async def restart(self, name: str) -> int:
        """Order a planned restart; the number under which its report will be found."""
        reply = await self._ask({"command": "restart", "name": name})
        if "error" in reply:
            raise NotRecovered(str(reply["error"]))
        return int(reply["number"])

    async def _status(self) -> Reply | None:
        """None when the launcher is busy, or just gone."""
        try:
            return await self._ask({"command": "status"})
        except (OSError, ValueError):
            return None

    async def _ask(self, request: dict[str, Any]) -> Reply:
        return await asyncio.to_thread(ask, self.directory, request, ASK_LIMIT_S)


def schedule(counts: dict[str, int], tp_size: int) -> list[tuple[str, int]]:
    """(kind, rank) of every strike, in rounds: a run that is cut short has had some of each."""
    return [
        (kind, rank)
        for number in range(max(counts.values()))
        for kind, count in counts.items()
        if number < count
        for rank in range(tp_size)
    ]


async def strike(server: Server, load: Load, kind: str, rank: int, limit_s: float) -> Fault:
    """One worker struck while every stream flows, until every stream flows again.

    Each wait within has `limit_s`; NotRecovered when one is over.
    """
    before = await server.settle(limit_s)
    load.forget()
    await _wait_flowing(load, time.monotonic(), limit_s)
    fault = Fault(kind, rank)
    name = f"worker {rank}"
    fault.struck_s = time.monotonic()
    if kind == PLANNED:
        number = await server.restart(name)
        after = await server.wait(
            "restarted", lambda status: _is_restarted(status, number), limit_s
        )
        fault.planned_s = after["last_planned"]["pause_s"]
    else:
        try:
            os.kill(_pids(before)[name], SIGNALS[kind])
        except ProcessLookupError as error:
            raise NotRecovered(f"{name} was gone before it was struck") from error
        await server.wait("detected", lambda status: _is_struck(status, before), limit_s)
        fault.detected_s = time.monotonic() - fault.struck_s
        after = await server.wait(
            "recovered", lambda status: _is_recovered(status, before, name), limit_s
        )
    fault.ready_s = time.monotonic() - fault.struck_s
    fault.phases_s = {name: after["recovery_seconds"][name] for name in PHASES}
    if fault.detected_s is not None:  # it was no later than the recovery's length before its end
        fault.detected_s = min(fault.detected_s, fault.ready_s - fault.phases_s["total"])
    fault.changed = _changed(before, after, name)
    ready_s = fault.struck_s + fault.ready_s
    await _wait_flowing(load, ready_s, limit_s)
    for arrivals_s in load.arrivals_s:
        begin_s, end_s = silence(arrivals_s, fault.struck_s, ready_s)
        fault.pauses_s.append(end_s - begin_s)
        fault.resumed_s.append(end_s - fault.struck_s)
    return fault


async def _wait_flowing(load: Load, since_s: float, limit_s: float) -> None:
    try:
        await load.wait_flowing(since_s, limit_s)
    except NoTokens as error:
        raise NotRecovered(str(error)) from error


def _pids(status: Reply) -> dict[str, int]:
    return {process["name"]: process["pid"] for process in status["processes"]}


def _is_struck(status: Reply, before: Reply) -> bool:
    return bool(status["state"] != "ready" or status["epoch"] > before["epoch"])


def _is_recovered(status: Reply, before: Reply, name: str) -> bool:
    is_new = _pids(status).get(name) != _pids(before)[name]
    return bool(status["state"] == "ready" and status["epoch"] > before["epoch"] and is_new)


def _is_restarted(status: Reply, number: int) -> bool:
    last = status["last_planned"]
    return bool(status["state"] == "ready" and last is not None and last["number"] >= number)


def _changed(before: Reply, after: Reply, victim: str) -> list[str]:
    """Processes other than the victim and spares that are not those of before."""
    found = _pids(after)
    return [
        name
        for name, pid in _pids(before).items()
        if name not in ("spare", victim) and found.get(name) != pid
    ]
