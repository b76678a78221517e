"""One server under chaos: strikes its processes, and proves after each round that all is well."""

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chaos.cases import Case, Texts
from chaos.client import Client
from chaos.load import Load, Ride, complaints
from chaos.shared_memory import SharedMemory
from process.server import Server, is_running, served, wait_for
from process.sockets import listeners_of

from nvserve.protocol.progress import Phase, page_path, read_page

FLAGS = ("--tp", "2", "--dtype", "float32", "--max-restarts", "1000", "--hang-timeout", "5")
PHASE_LIMIT_S = 1.0  # to find a process in the phase wanted; then it is struck in any
RESIDENTS = {"worker 0", "worker 1", "core", "frontend"}
LOOPBACK = "0100007F"


class Rig:
    """A launched server and what its rounds need."""

    def __init__(self, server: Server, texts: Texts, cases: list[Case]) -> None:
        self.server = server
        self.texts = texts
        self.cases = cases
        self.url = server.wait_ready()
        self.client = Client(self.url)
        self.shared_memory = SharedMemory()
        self.shared_memory.note(server.pids().values())

    # -- what is there

    def settled(self) -> dict[str, Any]:
        """Ready, with a warm spare; the status."""

        def probe(status: dict[str, Any]) -> bool:
            spares = [p for p in status["processes"] if p["name"] == "spare"]
            return status["state"] == "ready" and any(spare["is_ready"] for spare in spares)

        return self.server.wait_status("ready with a spare", probe)

    def pid(self, name: str) -> int:
        return self.server.pids()[name]

    def wait_recovered(self, before: dict[str, Any]) -> dict[str, Any]:
        """Ready in a later epoch than before."""
        return self.server.wait_status(
            "recovered", lambda s: s["state"] == "ready" and s["epoch"] > before["epoch"]
        )

    # -- strikes

    def find_phase(self, name: str, phase: Phase) -> int:
        """The pid of a process, caught in this phase when that comes soon."""
        [directory] = self.server.tmpdir.glob("nvserve-*")
        [process] = [p for p in self.server.status()["processes"] if p["name"] == name]
        path = page_path(str(directory), process["role"], process["life"])
        deadline = time.monotonic() + PHASE_LIMIT_S
        while time.monotonic() < deadline:
            page = read_page(path)
            if page is not None and page.phase is phase:
                break
        return int(process["pid"])

    def kill(self, name: str, phase: Phase | None = None) -> float:
        """SIGKILL, if possible in a phase; when it was."""
        return kill(self.pid(name) if phase is None else self.find_phase(name, phase))

    # -- rounds

    @contextmanager
    def load(self, chance: random.Random, **changes: Any) -> Iterator[Load]:
        """The load of a round, flowing."""
        with Load(self.url, self.cases, seed=chance.getrandbits(30), **changes) as load:
            load.wait_flowing(chance.randrange(2, 12))
            yield load

    def judge(self, load: Load, since: float) -> list[float]:
        """Every text right; the pauses of the streams around a fault at `since`."""
        rides = load.finish()
        wrong = complaints(rides, self.texts)
        assert not wrong, f"{len(wrong)} of {len(rides)} requests: {wrong[:5]}"
        found = [ride.pause_s(since, since + 30.0) for ride in rides if ride.kind == "stream"]
        return [pause for pause in found if pause is not None]

    def check(self) -> None:
        """Nothing is left of a round but a server as good as new."""
        case = self.cases[0]
        ride = Ride("fresh", case, 12, time.monotonic())
        ride.answer = self.client.complete(case.body(12))
        assert ride.complaint(self.texts) is None, ride.complaint(self.texts)
        status = self.settled()
        self._check_metrics()
        self._check_processes(status)
        self._check_leftovers(status)

    def metrics(self) -> dict[str, float]:
        """Sums over labels, by name."""
        code, text = self.client.fetch("/metrics")
        assert code == 200
        sums: dict[str, float] = {}
        for line in text.splitlines():
            if line.startswith("nvserve:"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0].removeprefix("nvserve:")
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def _check_metrics(self) -> None:
        def is_quiet() -> dict[str, float] | None:
            now = self.metrics()
            if "num_requests_running" not in now:  # core has told this frontend nothing yet
                return None
            is_empty = now["num_requests_running"] == now["num_requests_waiting"] == 0
            return now if is_empty and now["num_free_kv_blocks"] == now["num_kv_blocks"] else None

        now = wait_for("all blocks free, nobody waiting", is_quiet)
        assert now["requests_accepted_total"] == now["request_success_total"]
        assert now["frontend_open_requests"] == 0

    def _check_processes(self, status: dict[str, Any]) -> None:
        pids = {p["name"]: p["pid"] for p in status["processes"]}
        assert set(pids) == RESIDENTS | {"spare"}
        children = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children").read_text()
        alive = {int(pid) for pid in children.split() if is_running(int(pid))}
        assert len(alive - set(pids.values())) <= 1, "more than the sweeper beside the processes"
        assert set(pids.values()) <= alive
        port = int(self.url.rpartition(":")[2])
        doors = listeners_of({self.server.pid, pids["frontend"], pids["core"]})
        assert doors == {(LOOPBACK, port)}
        ranks = {pids["worker 0"], pids["worker 1"], pids["spare"]}
        assert {address for address, _ in listeners_of(ranks)} <= {LOOPBACK}

    def _check_leftovers(self, status: dict[str, Any]) -> None:
        [directory] = self.server.tmpdir.glob("nvserve-*")
        lives = {p["role"]: p["life"] for p in status["processes"] if p["role"] != "worker"}
        wanted = [
            rf"e{status['epoch']}(w\d+\.steps|\.outputs|\.group\S*)",
            rf"f{lives['frontend']}c{lives['core']}\.(up|down)",
            r"(frontend|core|worker)\d+\.page|launcher\.sock|lock|zmq\S*",
        ]
        strange = [
            p.name for p in directory.iterdir() if not re.fullmatch("|".join(wanted), p.name)
        ]
        assert not strange, f"left in the launch directory: {strange}"
        pages = list(directory.glob("*.page"))
        assert len(pages) <= len(status["processes"]), f"pages of the dead: {pages}"
        alive = [process["pid"] for process in status["processes"]]
        self.shared_memory.note(alive)
        leftovers = self.shared_memory.leftovers(alive)
        assert not leftovers, f"left in /dev/shm: {leftovers}"


def kill(pid: int) -> float:
    """SIGKILL; a time before it."""
    at = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return at


def wait_dead(pid: int) -> float:
    """A time at which a process that was killed took nothing any more."""
    wait_for(f"the end of {pid}", lambda: not is_running(pid))
    return time.monotonic()


@contextmanager
def rig(texts: Texts, cases: list[Case], *flags: str) -> Iterator[Rig]:
    """A fresh server for one row."""
    with served(Server.launch(*FLAGS, *flags)) as server:
        try:
            yield Rig(server, texts, cases)
        finally:
            log = os.environ.get("NVSERVE_CHAOS_LOG")  # where the launcher's lines shall go
            if log is not None:
                Path(log).write_text(server.text)
