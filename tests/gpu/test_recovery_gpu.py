"""Workers on a GPU killed and stopped under load: ids stay the reference's, and no memory is lost.

Twice: one rank with its graphs, and two ranks that share the GPU, joined by gloo.
"""

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from chaos.cases import Case, Texts, greedy_cases
from chaos.client import Client
from chaos.load import Load, complaints
from process.server import Server, is_running, served, wait_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(900),
]

NUM_BLOCKS = 2000
NUM_STREAMS = 16
HANG_S = 10.0  # of --hang-timeout: the graphs of a bucket are captured within a step
FLAGS = (
    *("--device", "cuda", "--dtype", "float32", "--num-kv-blocks", str(NUM_BLOCKS)),
    *("--hang-timeout", str(HANG_S), "--max-restarts", "1000"),
)
SHAPES = {"alone": ("--tp", "1"), "shared": ("--tp", "2", "--share-gpu")}
SLACK_BYTES = 128 << 20  # what the driver keeps for processes that come and go
STEADY_S = 3.0  # a worker with graphs to capture needs less for the next one
GRAPHS = re.compile(r"epoch (\d+) has (\d+) CUDA graphs")
RECOVERY = re.compile(r'^nvserve:recovery_seconds\{.*phase="(\w+)".*\} (\S+)$', re.MULTILINE)


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts()


@pytest.fixture(scope="module")
def cases(texts: Texts) -> list[Case]:
    return greedy_cases(texts)


@pytest.fixture(scope="module", params=sorted(SHAPES))
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    before = used_bytes()
    with served(Server.launch(*FLAGS, *SHAPES[request.param])) as server:
        server.wait_ready(300.0)
        yield server
    wait_memory(before, "the memory of before the launch")


def used_bytes() -> int:
    """Of the whole card, by whichever process."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def steady_bytes() -> int:
    """The same once it stays as it is: an idle worker goes on capturing graphs for a while."""
    used, since = used_bytes(), time.monotonic()

    def is_steady() -> bool:
        nonlocal used, since
        seen = used_bytes()
        if seen != used:
            used, since = seen, time.monotonic()
        return time.monotonic() - since >= STEADY_S

    wait_for("steady memory", is_steady, 60.0)
    return used


def wait_memory(limit: int, what: str) -> None:
    wait_for(what, lambda: used_bytes() <= limit + SLACK_BYTES, 30.0)


def num_ranks(server: Server) -> int:
    return sum(name.startswith("worker") for name in server.pids())


def settle(server: Server) -> int:
    """The epoch, once the server is ready with a warm spare."""

    def probe() -> dict[str, int] | None:
        status = server.status()
        spares = [p for p in status["processes"] if p["name"] == "spare" and p["is_ready"]]
        return status if status["state"] == "ready" and spares else None

    return int(wait_for("ready with a spare", probe, 120.0)["epoch"])


def recovery_phases(client: Client) -> dict[str, float]:
    """Seconds of the last recovery by phase, as /metrics tells them."""
    code, text = client.fetch("/metrics")
    assert code == 200
    return {phase: float(seconds) for phase, seconds in RECOVERY.findall(text)}


def strike(server: Server, number: signal.Signals, chance: random.Random) -> None:
    """One worker dies or hangs; returns when it is gone."""
    pid = server.pids()[f"worker {chance.randrange(num_ranks(server))}"]
    os.kill(pid, number)
    wait_for("fenced", lambda: not is_running(pid), 2 * HANG_S + 10.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_ids_and_memory_are_what_they_were(
    server: Server, number: signal.Signals, texts: Texts, cases: list[Case]
) -> None:
    epoch = settle(server)
    held = steady_bytes()
    url = server.wait_ready()
    client, chance = Client(url), random.Random(epoch)
    with Load(url, cases, seed=epoch, num_streams=NUM_STREAMS) as load:
        load.wait_flowing()
        held = max(held, used_bytes())
        strike(server, number, chance)
        server.wait_status(
            "recovered", lambda s: (s["state"], s["epoch"] > epoch) == ("ready", True)
        )
        rides = load.finish()
    assert complaints(rides, texts) == []
    settle(server)
    wait_memory(held, "the memory of the dead")
    phases = recovery_phases(client)
    assert {"fence", "rebuild", "resume", "total"} <= phases.keys()
    assert phases["total"] == pytest.approx(sum(phases.values()) - phases["total"], abs=0.05)
    print(f"{number.name} with {num_ranks(server)} ranks: {phases}")


def test_a_new_worker_captures_graphs_anew(server: Server, texts: Texts, cases: list[Case]) -> None:
    """Its log says how many it begins with; who shares a GPU has none in any epoch."""
    epoch = settle(server)
    os.kill(server.pids()["worker 0"], signal.SIGKILL)
    after = server.wait_status(
        "recovered", lambda s: (s["state"], s["epoch"] > epoch) == ("ready", True)
    )
    with Load(server.wait_ready(), cases, seed=epoch, num_streams=NUM_STREAMS) as load:
        load.wait_flowing()
        rides = load.finish()
    assert complaints(rides, texts) == []
    found = dict(GRAPHS.findall(server.text))
    if num_ranks(server) > 1:
        assert found == {}
    else:
        assert int(found["0"]) >= 1
        assert int(found[str(after["epoch"])]) >= 1


def test_two_ranks_on_one_gpu_need_the_flag() -> None:
    if torch.cuda.device_count() > 1:
        pytest.skip("there is a GPU for each of two ranks")
    with served(Server.launch(*FLAGS, "--tp", "2")) as server:
        assert server.wait_exit(120.0) == 3
        assert "--tp 2 needs 2 GPUs, this machine has 1" in server.text
        assert not list(Path(server.tmpdir).iterdir())
