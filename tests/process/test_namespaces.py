"""A launcher that leads a session, or is the first process of a container: it ends as elsewhere."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

import pytest
from process.server import (
    EVENT_LIMIT_S,
    GONE_LIMIT_S,
    START_LIMIT_S,
    environment,
    is_running,
    title,
    wait_for,
)

CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc"]
SESSION = ["setsid", "--wait"]


def is_possible(wrapper: list[str]) -> bool:
    if not shutil.which(wrapper[0]):
        return False
    return subprocess.run([*wrapper, "true"], capture_output=True, timeout=30).returncode == 0


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # gone meanwhile
        return []
    return [found for child in map(int, children) for found in (child, *descendants(child))]


@pytest.mark.parametrize(
    ("wrapper", "number"),
    [(CONTAINER, signal.SIGTERM), (SESSION, signal.SIGKILL)],
    ids=["container", "session"],
)
def test_a31_a_launcher_in_a_place_of_its_own_leaves_nothing(
    wrapper: list[str], number: signal.Signals
) -> None:
    if not is_possible(wrapper):
        pytest.skip(f"{wrapper[0]} is not allowed here")
    tmpdir = Path(tempfile.mkdtemp(prefix="nt"))
    command = [*wrapper, sys.executable, "-m", "nvserve", "launch", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--device", "sim", "--spares", "1", "--hang-timeout", "60"],
        env=environment(TMPDIR=str(tmpdir)),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    watchdog = threading.Timer(START_LIMIT_S, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        with process.stdout:
            found = re.search(r"ready: (\S+)", process.stdout.readline())
            assert found, "not ready in time"
            ask(found.group(1))
            started = [process.pid, *descendants(process.pid)]  # setsid becomes the launcher
            [launcher] = [pid for pid in started if title(pid) == "nvserve: launcher"]
            assert len(started) >= 4  # and frontend, core, worker
            os.kill(launcher, number)
            code = process.wait(EVENT_LIMIT_S)
        assert (code == 0) == (number == signal.SIGTERM)
        wait_for("nothing left", lambda: not any(map(is_running, started)), GONE_LIMIT_S)
        if number == signal.SIGTERM:
            assert not list(tmpdir.iterdir())
    finally:
        watchdog.cancel()
        for pid in descendants(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait(10)
        shutil.rmtree(tmpdir, ignore_errors=True)


def ask(url: str) -> None:
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps({"prompt": "a", "max_tokens": 3, "ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.loads(response.read())["usage"]["completion_tokens"] == 3
