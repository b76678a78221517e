"""The real launcher loop over fake children: real processes, sockets, signals; no engine."""

import json
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from process.server import (
    EVENT_LIMIT_S,
    GONE_LIMIT_S,
    Server,
    is_running,
    served,
    title,
    wait_for,
)

from nvserve.scripts.exit_codes import ExitCode

PATIENT_S = 60.0  # a loaded machine is no hang, unless a test is about hangs
HANG_S = 3.0
SHORT_OF_A_DRAIN_S = 20.0  # which may take 30
FAKE_LAUNCH = str(Path(__file__).parent / "fake_launch.py")
IGNORE_CHILDREN = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Launches:
    """Starts fake launches; the fixture below closes them all."""

    def __init__(self) -> None:
        self.servers: list[Server] = []

    def __call__(
        self,
        behaviour: dict[str, str] | None = None,
        *,
        parent: str = "",
        **config: Any,
    ) -> Server:
        """`parent`: code that starts the launch, with its arguments, in the end."""
        settings = {"tp_size": 2, "num_spares": 0, "hang_timeout_s": PATIENT_S} | config
        command = [FAKE_LAUNCH, json.dumps(settings)]
        if parent:
            command = ["-c", parent, *command]
        server = Server(command, **(behaviour or {}))
        self.servers.append(server)
        return server


@pytest.fixture
def launch() -> Iterator[Launches]:
    launches = Launches()
    yield launches
    for server in launches.servers:
        with served(server):
            pass


def kill(server: Server, name: str, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(server.pids()[name], number)


def has_title(pid: int, expected: str) -> bool:
    return title(pid) == expected


def restarts(server: Server) -> dict[str, int]:
    counts: dict[str, int] = server.status()["restarts"]
    return counts


def assert_no_restart(server: Server, seconds: float) -> None:
    """Look all the time, for so long at least."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        counts = restarts(server)
        assert not any(counts.values()), counts


def test_a_launch_becomes_ready_and_its_processes_carry_titles(launch: Launches) -> None:
    server = launch(num_spares=1)
    server.wait_ready()
    status = server.wait_status("a spare", lambda s: len(s["processes"]) == 5)
    names = {process["name"] for process in status["processes"]}
    assert names == {"worker 0", "worker 1", "core", "frontend", "spare"}
    assert status["num_kv_blocks"] == 100  # the minimum over ranks
    assert title(server.pid) == "nvserve: launcher"
    for name, pid in server.pids().items():
        wait_for(f"title of {name}", partial(has_title, pid, f"nvserve: {name}"))


def test_what_ended_a_child_is_known_also_where_the_parent_ignored_its_children(
    launch: Launches,
) -> None:
    server = launch(parent=IGNORE_CHILDREN)
    server.wait_ready()
    kill(server, "worker 1")
    server.wait_epoch(1)
    server.wait_text("worker 1 was killed by SIGKILL")
    server.signal(signal.SIGTERM)
    assert server.wait_exit() == ExitCode.OK


def test_frontend_and_core_are_introduced_to_each_other(launch: Launches) -> None:
    server = launch()
    server.wait_ready()
    for name in ("frontend", "core"):
        server.wait_text(rf"{name} \| .*Peers\(frontend_life=0, core_life=0, is_blamed=False\)")


def test_a_dead_worker_is_replaced_by_the_spare_in_a_new_epoch(launch: Launches) -> None:
    server = launch(num_spares=1)
    server.wait_ready()
    server.wait_status(
        "spare ready",
        lambda s: any(p["name"] == "spare" and p["is_ready"] for p in s["processes"]),
    )
    before = server.pids()
    kill(server, "worker 1")
    server.wait_epoch(1)
    after = server.pids()
    assert after["worker 1"] == before["spare"]
    assert after["worker 0"] == before["worker 0"]
    assert after["core"] == before["core"]
    assert restarts(server) == {"worker": 1, "core": 0, "frontend": 0}
    assert title(after["worker 1"]) == "nvserve: worker 1"
    server.wait_status("another spare", lambda s: len(s["processes"]) == 5)
    server.wait_text(r"frontend \| .*RECOVERING.*worker 1 was killed by SIGKILL")
    server.wait_text(r"frontend \| .*READY.*worker_restarts_total=1.*'total'")


def test_a_dead_worker_is_replaced_by_a_fresh_one_without_a_spare(launch: Launches) -> None:
    server = launch()
    server.wait_ready()
    before = server.pids()
    kill(server, "worker 0")
    server.wait_epoch(1)
    after = server.pids()
    assert after["worker 0"] != before["worker 0"]
    assert after["worker 1"] == before["worker 1"]


def test_two_workers_killed_at_once_are_both_replaced(launch: Launches) -> None:
    server = launch()
    server.wait_ready()
    before = server.pids()
    for rank in (0, 1):
        os.kill(before[f"worker {rank}"], signal.SIGKILL)
    server.wait_status("both new", lambda s: s["state"] == "ready" and s["restarts"]["worker"] >= 2)
    after = server.pids()
    assert {after[f"worker {r}"] for r in (0, 1)}.isdisjoint(before.values())


def test_a_dead_core_gets_a_new_life_and_a_new_epoch_and_workers_live_on(launch: Launches) -> None:
    server = launch()
    server.wait_ready()
    before = server.pids()
    kill(server, "core")
    server.wait_epoch(1)
    after = server.pids()
    assert after["core"] != before["core"]
    assert all(after[name] == before[name] for name in ("worker 0", "worker 1", "frontend"))
    for name in ("frontend", "core"):
        server.wait_text(rf"{name} \| .*Peers\(frontend_life=0, core_life=1, is_blamed=False\)")


def test_a_dead_frontend_is_replaced_on_the_same_port_without_a_new_epoch(launch: Launches) -> None:
    server = launch()
    url = server.wait_ready()
    before = server.pids()
    kill(server, "frontend")
    status = server.wait_status(
        "frontend back", lambda s: s["restarts"]["frontend"] == 1 and s["state"] == "ready"
    )
    assert status["epoch"] == 0
    assert status["url"] == url
    assert server.pids()["core"] == before["core"]
    server.wait_text(r"core \| .*Peers\(frontend_life=1, core_life=0, is_blamed=False\)")


@pytest.mark.parametrize("name", ["worker 1", "core"])
def test_a_stopped_process_is_found_fenced_and_replaced(launch: Launches, name: str) -> None:
    server = launch(hang_timeout_s=HANG_S)
    server.wait_ready()
    before = server.pids()
    kill(server, name, signal.SIGSTOP)
    status = server.wait_status(
        "another epoch", lambda s: s["state"] == "ready" and s["epoch"] >= 1
    )
    after = server.pids()
    replaced = {n for n in after if after[n] != before[n]}
    # Survivors have 2 s to answer: one that is late on a full machine costs another epoch.
    assert replaced == {name} or (name in replaced and status["epoch"] > 1)
    told = server.wait_text(rf"{name} has been silent for (\d+\.\d+) s.* stopped from outside")
    assert float(told[1]) >= HANG_S, "a hang was seen before --hang-timeout"


def test_a_stopped_frontend_is_replaced(launch: Launches) -> None:
    server = launch(hang_timeout_s=HANG_S)
    server.wait_ready()
    before = server.pids()
    kill(server, "frontend", signal.SIGSTOP)
    server.wait_status("replaced", lambda s: s["restarts"]["frontend"] == 1)
    assert not is_running(before["frontend"])


def test_a_short_stop_restarts_nobody(launch: Launches) -> None:
    server = launch(hang_timeout_s=5.0)
    server.wait_ready()
    before = server.pids()
    kill(server, "worker 0", signal.SIGSTOP)
    assert_no_restart(server, 1.0)
    kill(server, "worker 0", signal.SIGCONT)
    assert_no_restart(server, 1.0)
    assert server.pids() == before


def test_a_launcher_stopped_with_all_its_children_restarts_nobody(launch: Launches) -> None:
    server = launch(hang_timeout_s=HANG_S)
    server.wait_ready()
    before = server.pids()
    everybody = [server.pid, *before.values()]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(HANG_S + 1.0)  # longer than the limit: the silence itself is what is tested
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
    assert_no_restart(server, 1.0)
    assert server.pids() == before


def test_a_survivor_that_does_not_answer_the_new_epoch_is_fenced_too(launch: Launches) -> None:
    server = launch({"FAKE_WORKER": "mute"}, hang_timeout_s=5.0)
    server.wait_ready()
    before = server.pids()
    kill(server, "worker 0")
    server.wait_text(r"worker 1 did not answer epoch 1")
    server.wait_status("recovered", lambda s: s["state"] == "ready" and s["epoch"] >= 2)
    assert server.pids()["worker 1"] != before["worker 1"]


def test_a_broken_epoch_without_a_death_is_formed_anew_with_the_same_workers(
    launch: Launches, tmp_path: Path
) -> None:
    order = tmp_path / "break"
    server = launch({"FAKE_BREAK": str(order)})
    server.wait_ready()
    before = server.pids()
    order.touch()
    server.wait_epoch(1)
    server.wait_text(r"worker [01]: epoch 0, step 7: a gap")
    assert server.pids() == before
    assert restarts(server)["worker"] == 0


def test_too_many_deaths_end_the_launch_with_the_code_of_the_last_one(launch: Launches) -> None:
    server = launch(max_restarts=1)
    server.wait_ready()
    kill(server, "worker 0")
    server.wait_epoch(1)
    kill(server, "core")
    assert server.wait_exit() == ExitCode.CORE_LOST
    assert "more than 1 unplanned deaths within 60 s" in server.text
    assert "core was killed by SIGKILL" in server.text
    server.wait_text(r"frontend \| .*FAILED")


def test_a_spare_that_dies_is_no_restart_and_is_replaced_later(launch: Launches) -> None:
    server = launch(num_spares=1, max_restarts=0)
    server.wait_ready()
    server.wait_status("a spare", lambda s: len(s["processes"]) == 5)
    first = server.pids()["spare"]
    os.kill(first, signal.SIGKILL)
    server.wait_status(
        "another spare",
        lambda s: any(p["name"] == "spare" and p["pid"] != first for p in s["processes"]),
    )
    assert restarts(server) == {"worker": 0, "core": 0, "frontend": 0}


@pytest.mark.parametrize("role", ["WORKER", "CORE"])
def test_a_death_while_starting_ends_the_launch_with_its_last_words(
    launch: Launches, role: str
) -> None:
    server = launch({f"FAKE_{role}": "die"})
    assert server.wait_exit() == ExitCode.START_FAILED
    assert "exited with status 3" in server.text
    assert "  | ERROR these are my last words" in server.text
    assert server.out == []


def test_a_kill_while_starting_ends_the_launch(launch: Launches) -> None:
    server = launch({"FAKE_WORKER": "silent"})
    server.wait_text(r"worker 0 \| ")
    kill(server, "worker 0")
    assert server.wait_exit() == ExitCode.START_FAILED


def test_a_child_that_says_why_it_cannot_start_is_quoted_in_one_line(launch: Launches) -> None:
    server = launch({"FAKE_FRONTEND": "fail"})
    assert server.wait_exit() == ExitCode.START_FAILED
    [line] = [line for line in server.err if line.startswith("nvserve: ")]
    assert line == "nvserve: the model is upside down (exit status 3, START_FAILED)\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_drains_and_exits_with_zero(launch: Launches, number: signal.Signals) -> None:
    server = launch()
    server.wait_ready()
    server.status()
    server.signal(number)
    assert server.wait_exit() == 0
    server.wait_text(r"frontend \| .*DRAINING")
    assert not list(server.tmpdir.iterdir())


def test_a_drain_that_takes_too_long_is_cut_off(launch: Launches) -> None:
    server = launch({"FAKE_FRONTEND": "busy"}, shutdown_timeout_s=0.5)
    server.wait_ready()
    server.status()
    server.signal(signal.SIGTERM)
    assert server.wait_exit(SHORT_OF_A_DRAIN_S) == 0


def test_a_second_signal_stops_at_once(launch: Launches) -> None:
    server = launch({"FAKE_FRONTEND": "busy"})
    server.wait_ready()
    server.status()
    server.signal(signal.SIGINT)
    server.wait_text("draining")
    server.signal(signal.SIGINT)
    assert server.wait_exit(SHORT_OF_A_DRAIN_S) == ExitCode.INTERRUPTED


def test_a_signal_while_starting_ends_the_launch_cleanly(launch: Launches) -> None:
    server = launch({"FAKE_WORKER": "silent"})
    server.wait_text(r"worker 1 \| ")
    server.status()
    server.signal(signal.SIGTERM)
    assert server.wait_exit(SHORT_OF_A_DRAIN_S) == 0


def test_a_stopped_child_does_not_outlive_a_drain(launch: Launches) -> None:
    server = launch()
    server.wait_ready()
    kill(server, "worker 0", signal.SIGSTOP)
    server.signal(signal.SIGTERM)
    assert server.wait_exit(SHORT_OF_A_DRAIN_S) == 0


def test_killing_the_launcher_takes_every_child_along_even_a_stopped_one(launch: Launches) -> None:
    server = launch(num_spares=1)
    server.wait_ready()
    server.wait_status("a spare", lambda s: len(s["processes"]) == 5)
    kill(server, "worker 0", signal.SIGSTOP)
    server.signal(signal.SIGKILL)
    server.process.wait(GONE_LIMIT_S)
    server.wait_gone()
    wait_for("nothing left", lambda: not list(server.tmpdir.iterdir()), GONE_LIMIT_S)


def test_children_ignore_a_terminals_interrupt(launch: Launches) -> None:
    server = launch()
    server.wait_ready()
    before = server.pids()
    for pid in before.values():
        os.kill(pid, signal.SIGINT)
    assert_no_restart(server, 0.5)
    assert server.pids() == before


def test_the_control_socket_refuses_what_it_does_not_know(launch: Launches) -> None:
    import socket

    server = launch()
    server.wait_ready()
    [directory] = server.tmpdir.glob("nvserve-*")
    assert directory.stat().st_mode & 0o777 == 0o700
    for line, answer in ((b"[]\n", b"not a JSON"), (b'{"command": "x"}\n', b"unknown command")):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(EVENT_LIMIT_S)
            connection.connect(str(directory / "launcher.sock"))
            connection.sendall(line)
            assert answer in connection.recv(4096)
    assert server.status()["state"] == "ready"


def test_lines_of_every_process_carry_time_and_name(launch: Launches) -> None:
    server = launch()
    server.wait_ready()
    for name in ("worker 0", "worker 1", "core", "frontend"):
        server.wait_text(rf"(?m)^\d\d:\d\d:\d\d {name} \| INFO role")
