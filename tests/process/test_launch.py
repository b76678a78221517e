"""`nvserve launch` with the demo model: start, serve, stop, and every way of failing to start."""

import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process.server import GONE_LIMIT_S, Server, is_running, served, title, wait_for
from process.sockets import listeners, listeners_of

from nvserve.scripts.model_facts import DEMO_MODEL

LIGHT = ("--device", "sim", "--spares", "0")  # where the model is of no account
LOOPBACK = "0100007F"  # 127.0.0.1 as /proc/net/tcp writes it
PROMPT = {"model": "demo", "prompt": "To be, or", "max_tokens": 16, "temperature": 0}


def post(url: str, body: dict[str, Any], timeout_s: float = 60.0) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=60.0) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["text"]
    return text


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Server]:
    """A tp 2 server that tests of this module share and leave as they found it."""
    with served(Server.launch("--tp", "2", "--dtype", "float32")) as server:
        server.wait_ready()
        yield server


def test_no_garbage_collection_looks_at_what_a_process_starts_with() -> None:
    with served(Server.launch(*LIGHT, "--log-level", "debug")) as server:
        server.wait_ready()
        for name in ("core", "frontend", "worker 0"):
            server.wait_text(rf"{name} \| DEBUG the [1-9]\d* objects of the start are in no coll")


def test_a_launched_server_answers_and_says_how_to_ask(two_ranks: Server) -> None:
    url = two_ranks.wait_ready()
    assert text_of(post(url, PROMPT)) == text_of(post(url, PROMPT)) != ""
    two_ranks.wait_text(re.escape(f"curl {url}/v1/completions"))
    two_ranks.wait_text(r"ready after \d+\.\d s; each process started after: ")
    assert status_of(f"{url}/health") == status_of(f"{url}/ready") == 200


def test_processes_carry_titles_and_the_spare_comes_after(two_ranks: Server) -> None:
    status = two_ranks.wait_status(
        "the spare", lambda s: any(p["name"] == "spare" and p["is_ready"] for p in s["processes"])
    )
    expected = {"frontend", "core", "worker 0", "worker 1", "spare"}
    assert {process["name"] for process in status["processes"]} == expected
    for process in status["processes"]:
        assert title(process["pid"]) == f"nvserve: {process['name']}"
    assert title(two_ranks.pid) == "nvserve: launcher"


def test_launcher_frontend_and_core_map_no_torch(two_ranks: Server) -> None:
    pids = two_ranks.pids()
    for pid in (two_ranks.pid, pids["frontend"], pids["core"]):
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{pids['worker 0']}/maps").read_text()


def test_a_second_launch_on_the_same_port_fails_fast_and_harms_nobody(two_ranks: Server) -> None:
    url = two_ranks.wait_ready()
    port = url.rpartition(":")[2]
    with served(Server.launch("--port", port)) as second:
        assert second.wait_exit() == 1
        assert f"port {port} on 127.0.0.1 is already in use" in second.text
        assert not list(second.tmpdir.iterdir())
    assert text_of(post(url, PROMPT))


@pytest.fixture
def broken(tmp_path: Path, request: pytest.FixtureRequest) -> list[str]:
    """Launch flags that cannot work."""
    for path in DEMO_MODEL.iterdir():
        os.symlink(path, tmp_path / path.name)
    match request.param:
        case "path":
            return ["--model", str(tmp_path / "nowhere")]
        case "split":
            return ["--tp", "3"]
        case "address":
            return ["--host", "192.0.2.1"]
        case "tokenizer":
            (tmp_path / "tokenizer.json").unlink()
        case "bad tokenizer":
            (tmp_path / "tokenizer.json").unlink()
            (tmp_path / "tokenizer.json").write_text("{}")
        case "bad weights":
            (tmp_path / "model.safetensors").unlink()
            (tmp_path / "model.safetensors").write_bytes(b"\0" * 64)
    return ["--model", str(tmp_path)]


@pytest.mark.parametrize(
    ("broken", "code", "words"),
    [
        ("path", 2, "no such folder"),
        ("split", 2, "--tp 3 cannot split 4 KV heads / 8 query heads"),
        ("address", 1, "cannot listen on 192.0.2.1"),
        ("tokenizer", 2, "no tokenizer.json"),
        ("bad tokenizer", 3, "tokenizer"),
        ("bad weights", 3, "model.safetensors"),
    ],
    indirect=["broken"],
)
def test_a_launch_that_cannot_start_says_why_and_leaves_nothing(
    broken: list[str], code: int, words: str
) -> None:
    with served(Server.launch(*broken, "--no-auth")) as server:
        assert server.wait_exit() == code
        assert words in server.text
        assert "Traceback" not in server.text
        assert server.out == []
        assert not list(server.tmpdir.iterdir())


def test_a_terminals_interrupt_drains_and_ends_with_zero() -> None:
    with served(Server.launch()) as server:
        server.wait_ready()
        pids = server.pids()
        for pid in (server.pid, *pids.values()):  # a terminal sends it to the whole group
            os.kill(pid, signal.SIGINT)
        assert server.wait_exit() == 0
        assert not any(is_running(pid) for pid in pids.values())
        assert not list(server.tmpdir.iterdir())


def test_killing_the_launcher_leaves_no_process_and_no_port() -> None:
    with served(Server.launch("--tp", "2")) as server:
        port = int(server.wait_ready().rpartition(":")[2])
        server.pids()
        server.signal(signal.SIGKILL)
        server.process.wait(GONE_LIMIT_S)
        server.wait_gone()
        wait_for("a free port", lambda: port not in {p for _, p in listeners().values()})
        wait_for("nothing left", lambda: not list(server.tmpdir.iterdir()), GONE_LIMIT_S)


def test_killing_the_launcher_while_workers_load_leaves_no_process() -> None:
    with served(Server.launch("--tp", "2")) as server:
        wait_for("children", lambda: list(server.tmpdir.glob("nvserve-*/launcher.sock")))
        wait_for("four children", lambda: len(server.pids()) >= 4)
        server.signal(signal.SIGKILL)
        server.process.wait(GONE_LIMIT_S)
        server.wait_gone()


def test_a_launch_sweeps_what_others_left_and_spares_the_living() -> None:
    with served(Server.launch(*LIGHT)) as first:
        first.wait_ready()
        stale, young = (first.tmpdir / f"nvserve-{name}" for name in ("stale", "young"))
        stale.mkdir()
        young.mkdir()  # without a lock: perhaps in the making
        (stale / "lock").touch()
        (stale / "e0w0.steps").touch()
        with served(Server.launch(*LIGHT, TMPDIR=str(first.tmpdir))) as second:
            second.wait_ready()
            left = set(first.tmpdir.glob("nvserve-*"))
            assert stale not in left
            assert young in left
            assert len(left) == 3
            young.rmdir()
            second.signal(signal.SIGTERM)
            assert second.wait_exit() == 0
        assert first.status()["state"] == "ready"


def test_a_long_tmpdir_is_no_obstacle(tmp_path: Path) -> None:
    long = tmp_path / ("a" * 120)
    long.mkdir()
    with served(Server.launch(*LIGHT, TMPDIR=str(long))) as server:
        server.wait_ready()
        assert not list(long.iterdir())


@pytest.mark.parametrize("tp", [1, 2])
def test_only_the_doors_asked_for_are_open(tp: int) -> None:
    """gloo, which joins CPU ranks, keeps a listener of its own in each; on loopback only."""
    with served(Server.launch("--tp", str(tp), "--zmq-port", "0", "--spares", "0")) as server:
        http = int(server.wait_ready().rpartition(":")[2])
        door = int(server.wait_text(r"ZMQ clients: tcp://127\.0\.0\.1:(\d+)").group(1))
        pids = server.pids()
        workers = {pids.pop(f"worker {rank}") for rank in range(tp)}
        assert listeners_of({server.pid, *pids.values()}) == {
            (LOOPBACK, http),
            (LOOPBACK, door),
        }
        assert {address for address, _ in listeners_of(workers)} == (
            {LOOPBACK} if tp > 1 else set()
        )


def test_the_key_guards_the_server_and_shows_nowhere(tmp_path: Path) -> None:
    key = "sesame-open-yourself"
    with served(Server.launch(*LIGHT, NVSERVE_API_KEY=key)) as server:
        url = server.wait_ready()
        assert status_of(f"{url}/v1/models") == 401
        assert status_of(f"{url}/health") == 200
        for pid in server.pids().values():
            assert key not in title(pid)
            assert key.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        assert key not in json.dumps(server.status())
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert key not in server.text + "".join(server.out)


@pytest.mark.slow
def test_many_launches_at_once_all_start() -> None:
    scale = float(os.environ.get("NVSERVE_TEST_SCALE", "0.1"))
    count = max(3, round(8 * scale))
    begun = time.monotonic()
    servers = [Server.launch("--tp", "2", "--spares", "0") for _ in range(count)]
    try:
        urls = {server.wait_ready(limit_s=60.0 * count) for server in servers}
        assert len(urls) == count
        texts = {text_of(post(url, PROMPT)) for url in urls}
        assert len(texts) == 1
    finally:
        for server in servers:
            server.close()
    print(f"{count} launches at once were ready after {time.monotonic() - begun:.1f} s")
