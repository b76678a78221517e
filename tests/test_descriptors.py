"""The limit of open files: raised, or told before anything has begun."""

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from process.server import PATIENT, Server, environment, served

from nvserve.protocol.config import Config, ModelFacts
from nvserve.protocol.descriptors import RESERVED, limit, most_clients, raise_limit
from nvserve.scripts.descriptors import num_needed
from nvserve.scripts.exit_codes import ExitCode

NVSERVE = [sys.executable, "-m", "nvserve"]
FACTS = ModelFacts("LlamaForCausalLM", 1024, 6, 4, 4096, 0, [1])


def config(tp_size: int = 1, device: Literal["cpu", "cuda"] = "cpu") -> Config:
    return Config(model="x", facts=FACTS, served_model_names=["x"], tp_size=tp_size, device=device)


def limited(num_files: int, *command: str, soft: int | None = None) -> list[str]:
    """The command in a shell with these limits."""
    lower = "" if soft is None else f"ulimit -S -n {soft}; "
    return ["sh", "-c", f'ulimit -n {num_files}; {lower}exec "$@"', "sh", *command]


@pytest.mark.parametrize(
    ("num_files", "command"),
    [
        (16, ["launch", *PATIENT]),
        (24, ["launch", *PATIENT]),
        (num_needed(config()) - 1, ["launch", *PATIENT]),
        (24, ["generate", "x"]),
    ],
)
def test_a_limit_that_is_too_low_is_one_clear_line(
    num_files: int, command: list[str], tmp_path: Path
) -> None:
    done = subprocess.run(
        limited(num_files, *NVSERVE, *command),
        env=environment(TMPDIR=str(tmp_path)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    told = f"{num_files} files open (hard limit {num_files}), --tp 1 needs {num_needed(config())}"
    assert re.fullmatch(
        rf"Error: a process may have {re.escape(told)}: raise the limit with `ulimit -n .*\n",
        done.stderr,
    ), done.stderr
    assert done.returncode == ExitCode.ERROR
    assert not list(tmp_path.iterdir())


def test_what_is_said_to_be_enough_is_enough() -> None:
    """The soft limit is far below: it is raised. Recoveries need more than the start."""
    needed = num_needed(config(tp_size=2))
    launch = [*NVSERVE, "launch", *PATIENT, "--tp", "2", "--zmq-port", "0"]
    run = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
    with served(Server(["-c", run, *limited(needed, *launch, soft=20)])) as server:
        server.wait_ready()
        for pid in (server.pid, *server.pids().values()):
            assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] == needed
        for epoch, name in enumerate(("core", "worker 1"), 1):
            os.kill(server.pids()[name], signal.SIGKILL)
            server.wait_epoch(epoch)
        assert "Too many open files" not in server.text


def test_more_ranks_and_gpus_need_more() -> None:
    assert num_needed(config(8)) > num_needed(config(1))
    assert num_needed(config(1)) < num_needed(config(1, "cuda")) < num_needed(config(8, "cuda"))
    assert num_needed(config(8, "cuda")) < 1024, "a usual hard limit, in old systems"


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1024, 4096, 4096),
        (1024, 1 << 20, 65536),
        (1024, resource.RLIM_INFINITY, 65536),
        (1 << 19, 1 << 20, 1 << 19),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 65536),
        (24, 24, 24),
    ],
)
def test_the_soft_limit_is_raised_and_never_lowered(
    soft: int, hard: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert raise_limit() == limit() == expected
    assert limits[-1][1] == hard
    assert soft == resource.RLIM_INFINITY or limits[-1][0] >= soft
    assert most_clients(0.5) == max(1, (expected - RESERVED) // 2)
