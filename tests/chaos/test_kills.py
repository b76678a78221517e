"""Processes killed and stopped under load: every text stays as it would have been."""

import http.client
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chaos.cases import Case, Texts
from chaos.client import BadAnswer, Client
from chaos.conftest import Row, share
from chaos.health import HealthWatch, assert_explained
from chaos.load import Load, Ride, complaints
from chaos.rig import RESIDENTS, Rig, kill, rig, wait_dead
from process.server import GONE_LIMIT_S, Server, is_running, served, wait_for
from process.sockets import listeners

from nvserve.protocol.progress import Phase

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

# A shared machine is slower than the two cores of the table; the measured pauses are printed.
PATIENCE = float(os.environ.get("NVSERVE_TEST_PATIENCE", "2.0"))
HANG_S = 5.0  # --hang-timeout of the rig
NO_HANGS = ("--hang-timeout", "20")
PHASES = [None, Phase.PREPARING, Phase.FORWARD, Phase.SAMPLING, Phase.SENDING, Phase.WAITING]


@pytest.fixture(scope="module")
def chaos(texts: Texts, cases: list[Case]) -> Iterator[Rig]:
    """For rows whose processes hang; each leaves it as good as new."""
    with rig(texts, cases) as chaos:
        yield chaos


@pytest.fixture(scope="module")
def patient(texts: Texts, cases: list[Case]) -> Iterator[Rig]:
    """For rows whose processes die: nobody shall be taken for hung, however slow the machine."""
    with rig(texts, cases, *NO_HANGS) as patient:
        yield patient


def strike_idle(rig: Rig, chance: random.Random) -> None:
    """A kill while nothing runs."""
    before = rig.settled()
    rig.kill(f"worker {chance.randrange(2)}")
    rig.wait_recovered(before)


def assert_kept(before: dict[str, Any], after: dict[str, Any], gone: set[str]) -> None:
    """All but the struck ones are the same processes as before."""
    pids = [{p["name"]: p["pid"] for p in status["processes"]} for status in (before, after)]
    kept = RESIDENTS - gone
    assert {name: pids[0][name] for name in kept} == {name: pids[1][name] for name in kept}
    assert all(pids[0][name] != pids[1][name] for name in gone)


def test_killed_workers(row: Row, patient: Rig) -> None:
    not_ready = []
    for number in row.rounds(50):
        chance = random.Random(row.seed + number)
        if number % 10 == 9:
            strike_idle(patient, chance)
            patient.check()
            continue
        before = patient.settled()
        victim = f"worker {chance.randrange(2)}"
        with patient.load(chance) as load:
            with HealthWatch(patient.url) as watch:
                at = patient.kill(victim, chance.choice(PHASES))
                after = patient.wait_recovered(before)
            row.add(patient.judge(load, at))
        not_ready += watch.judge()
        assert_kept(before, after, {victim})
        patient.check()
    assert_explained(not_ready)
    assert share(row.judged(), 0.95) <= 1.5 * PATIENCE
    assert max(row.judged()) <= 4.0 * PATIENCE


def test_killed_workers_without_a_spare(row: Row, texts: Texts, cases: list[Case]) -> None:
    with rig(texts, cases, "--spares", "0", *NO_HANGS) as chaos:
        for number in row.rounds(10):
            chance = random.Random(row.seed + number)
            before = chaos.server.wait_status("ready", lambda s: s["state"] == "ready")
            with chaos.load(chance) as load:
                at = chaos.kill(f"worker {chance.randrange(2)}", chance.choice(PHASES))
                chaos.wait_recovered(before)
                row.add(chaos.judge(load, at))
        assert max(row.judged()) <= 6.0 * PATIENCE


def test_killed_core(row: Row, patient: Rig) -> None:
    not_ready = []
    for number in row.rounds(30):
        chance = random.Random(row.seed + number)
        before = patient.settled()
        with patient.load(chance) as load:
            with HealthWatch(patient.url) as watch:
                at = patient.kill("core", chance.choice([None, Phase.SERVING]))
                after = patient.wait_recovered(before)
            row.add(patient.judge(load, at))
        not_ready += watch.judge()
        assert_kept(before, after, {"core"})
        patient.check()
    assert_explained(not_ready)
    assert share(row.judged(), 0.95) <= 2.0 * PATIENCE


def test_killed_frontend(row: Row, patient: Rig) -> None:
    """HTTP streams break; new requests are refused by nobody and answered by the next life."""
    for number in row.rounds(20):
        chance = random.Random(row.seed + number)
        before = patient.settled()
        with patient.load(chance, arrivals_per_s=10.0) as load:
            pid = patient.pid("frontend")
            at = kill(pid)
            dead = wait_dead(pid)
            answer = patient.client.complete(patient.cases[0].body(4))
            row.add([time.monotonic() - at])
            assert answer.ids == patient.cases[0].ids[:4]
            rides = load.finish()
        broken = [ride for ride in rides if ride.complaint(patient.texts) is not None]
        assert not [ride for ride in broken if ride.begun > dead + 0.1], "a later one failed"
        assert not [r for r in rides if isinstance(r.error, ConnectionRefusedError)]
        assert all(ride.answer.ids == ride.case.ids[: len(ride.answer.ids)] for ride in broken)
        wait_for("orphans gone", partial(has_no_request, patient))
        after = patient.settled()
        assert after["epoch"] == before["epoch"]
        assert_kept(before, after, {"frontend"})
        patient.check()
    assert max(row.judged()) <= 3.0 * PATIENCE


@pytest.mark.parametrize(("victim", "in_table"), [("worker", 20), ("core", 5), ("frontend", 5)])
def test_stopped(victim: str, in_table: int, row: Row, chaos: Rig) -> None:
    not_ready = []
    for number in row.rounds(in_table):
        chance = random.Random(row.seed + number)
        before = chaos.settled()
        name = f"worker {chance.randrange(2)}" if victim == "worker" else victim
        with chaos.load(chance) as load, HealthWatch(chaos.url) as watch:
            pid = chaos.find_phase(name, chance.choice([Phase.FORWARD, Phase.SERVING]))
            at = time.monotonic()
            os.kill(pid, signal.SIGSTOP)
            wait_for("fenced", partial(is_gone, pid))
            row.add([time.monotonic() - at])
            if victim == "frontend":
                load.finish()
            else:
                chaos.wait_recovered(before)
                chaos.judge(load, at)
        if victim != "frontend":  # who is stopped answers nobody
            not_ready += watch.judge()
        assert_kept(before, chaos.settled(), {name})
        chaos.check()
    if victim != "frontend":
        assert_explained(not_ready)
    assert max(row.judged()) <= (HANG_S + 1.0) * PATIENCE


def test_stopped_for_a_moment(row: Row, chaos: Rig) -> None:
    """2 s are no hang: nobody is restarted."""
    for number in row.rounds(6):
        chance = random.Random(row.seed + number)
        before = chaos.settled()
        name = chance.choice(sorted(RESIDENTS))
        with chaos.load(chance) as load:
            at = time.monotonic()
            os.kill(chaos.pid(name), signal.SIGSTOP)
            time.sleep(2.0)  # the length of the stop is what is tested
            os.kill(chaos.pid(name), signal.SIGCONT)
            row.add(chaos.judge(load, at))
        assert_kept(before, chaos.settled(), set())
        chaos.check()


def test_killed_launcher(row: Row, texts: Texts, cases: list[Case]) -> None:
    """Everything goes with it, whatever it is doing, and the next launch works at once."""
    for number in row.rounds(30):
        chance = random.Random(row.seed + number)
        with served(Server.launch("--tp", "2", "--dtype", "float32")) as server:
            is_early = number % 3 == 2
            if is_early:  # while everything loads
                wait_for("children", partial(find, server, "*.page"))
                time.sleep(chance.random() * 2.0)
                server.pids()
                strike(server)
                continue
            url = server.wait_ready()
            server.pids()
            with (
                Load(url, cases, seed=chance.getrandbits(30), num_streams=4) as load,
                endless_stream(url) as stream,
            ):
                load.wait_flowing()
                row.add([strike(server)])
                with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                    stream.read()
                load.finish()
            port = int(url.rpartition(":")[2])
            wait_for("a free port", partial(is_free, port))
    assert max(row.judged()) <= 3.0 * PATIENCE


@contextmanager
def endless_stream(url: str) -> Iterator[http.client.HTTPResponse]:
    """One that does not end by itself while a test makes something happen to it."""
    body = {"prompt": "To be", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    with closing(connection):
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        with connection.getresponse() as answer:
            assert answer.status == 200
            yield answer


def is_gone(pid: int) -> bool:
    return not is_running(pid)


def is_free(port: int) -> bool:
    return port not in {other for _, other in listeners().values()}


def has_no_request(chaos: Rig) -> bool:
    """False also while core has told a new frontend nothing."""
    return chaos.metrics().get("num_requests_running") == 0


def find(server: Server, name: str) -> list[Path]:
    return list(server.tmpdir.glob(f"nvserve-*/{name}"))


def has_children(server: Server) -> bool:
    return len(server.pids()) >= 4


def strike(server: Server) -> float:
    """Kill the launcher; the seconds until nothing is left."""
    at = time.monotonic()
    server.signal(signal.SIGKILL)
    server.process.wait(GONE_LIMIT_S)
    server.wait_gone()
    wait_for("nothing left", lambda: not list(server.tmpdir.iterdir()), GONE_LIMIT_S)
    return time.monotonic() - at


def test_killed_while_starting(row: Row) -> None:
    """Ready, or a clean exit that names the victim."""
    for number in row.rounds(10):
        chance = random.Random(row.seed + number)
        with served(Server.launch("--tp", "2", "--dtype", "float32")) as server:
            wait_for("children", partial(find, server, "launcher.sock"))
            wait_for("four children", partial(has_children, server))
            victim = chance.choice(sorted(RESIDENTS))
            pid = server.pids()[victim]
            time.sleep(chance.random() * 2.0)
            os.kill(pid, signal.SIGKILL)
            wait_for("ready or ended", partial(is_ready_or_over, server))
            if server.process.poll() is not None:
                assert server.wait_exit() == 3
                assert victim in server.text
                assert not list(server.tmpdir.iterdir())


def is_ready_or_over(server: Server) -> bool:
    return server.process.poll() is not None or "nvserve is ready" in "".join(server.out)


def test_two_faults(row: Row, chaos: Rig) -> None:
    """At once, or the second during the recovery from the first: recovered, never a hang."""
    for number in row.rounds(20):
        chance = random.Random(row.seed + number)
        before = chaos.settled()
        names = chance.sample(["worker 0", "worker 1", "core"], 2)
        with chaos.load(chance) as load:
            at = chaos.kill(names[0])
            if chance.random() < 0.6:  # else at once
                time.sleep(chance.random() * 1.5)
            if chance.random() < 0.3:
                with suppress(ProcessLookupError):  # the first one took it along
                    os.kill(chaos.pid(names[1]), signal.SIGSTOP)
            else:
                chaos.kill(names[1], chance.choice([None, Phase.LOADING, Phase.REBUILDING]))
            chaos.wait_recovered(before)
            row.add(chaos.judge(load, at))
        chaos.check()


def test_drained_on_sigterm(row: Row, texts: Texts, cases: list[Case]) -> None:
    """New requests get a 503, running ones finish, exit 0."""
    for number in row.rounds(10):
        chance = random.Random(row.seed + number)
        with served(Server.launch("--tp", "2", "--dtype", "float32")) as server:
            url = server.wait_ready()
            server.pids()
            with Load(url, cases, seed=chance.getrandbits(30), arrivals_per_s=0.0) as load:
                load.wait_flowing()
                at = time.monotonic()
                with endless_stream(url):  # there is something to drain until the refusal is seen
                    server.signal(signal.SIGTERM)
                    wait_for("a refusal", partial(is_refused, Client(url), cases[0]))
                rides: list[Ride] = load.finish()
            assert complaints(rides, texts) == []
            assert server.wait_exit() == 0
            row.pauses.append(time.monotonic() - at)


def is_refused(client: Client, case: Case) -> bool:
    try:
        client.complete(case.body(1))
    except BadAnswer as error:
        return error.status == 503
    return False


def test_too_many_deaths_end_the_launch(texts: Texts, cases: list[Case]) -> None:
    """The default of --max-restarts, with everybody told and another exit status."""
    with served(Server.launch("--tp", "2", "--dtype", "float32")) as server:
        url = server.wait_ready()
        with (
            Load(url, cases, seed=1, num_streams=4, arrivals_per_s=0.0) as load,
            endless_stream(url) as stream,
        ):
            load.wait_flowing()
            for _ in range(6):
                status = server.status()
                os.kill(server.pids()["core"], signal.SIGKILL)
                if not wait_death(server, status["epoch"]):
                    break
            load.finish()
            assert b'"error"' in stream.read(), "it was told nothing"
        assert server.wait_exit() == 5
        assert "more than 5 unplanned deaths" in server.text


def wait_death(server: Server, epoch: int) -> bool:
    """False when the launch has ended instead of recovering."""

    def probe() -> str | None:
        if server.process.poll() is not None:
            return "ended"
        try:
            status = server.status()
        except (OSError, ValueError):
            return None
        if status["state"] == "failed":
            return "ended"
        return "ready" if (status["state"], status["epoch"] > epoch) == ("ready", True) else None

    return wait_for("ready or ended", probe) == "ready"
