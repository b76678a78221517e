"""`nvserve generate` and `nvserve chat`: text on the terminal, and nothing left running."""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from process.server import (
    EVENT_LIMIT_S,
    GONE_LIMIT_S,
    PATIENT,
    Server,
    environment,
    is_running,
    served,
    wait_for,
)

from nvserve.scripts.exit_codes import ExitCode
from nvserve.scripts.model_facts import DEMO_MODEL

NVSERVE = [sys.executable, "-m", "nvserve"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A model that knows no end: its replies are as long as they may be."""
    model = tmp_path_factory.mktemp("endless") / "demo"
    shutil.copytree(DEMO_MODEL, model)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((model / name).read_text())
        settings.pop("eos_token_id")
        (model / name).write_text(json.dumps(settings))
    with served(Server.launch("--spares", "0", "--model", str(model))) as server:
        yield server.wait_ready()


@pytest.fixture
def tmpdir() -> Iterator[Path]:
    """A short TMPDIR, which must be empty in the end."""
    path = Path(tempfile.mkdtemp(prefix="nt"))
    yield path
    left = list(path.iterdir())
    shutil.rmtree(path)
    assert not left


def generate(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*NVSERVE, "generate", *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_generate_with_a_server_of_its_own_prints_text_and_leaves_nothing(tmpdir: Path) -> None:
    done = generate("To be, or", "--max-tokens", "20", TMPDIR=str(tmpdir))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("To be, or")
    assert len(done.stdout) > 30
    assert done.stderr == ""


def test_the_same_seed_gives_the_same_text(url: str) -> None:
    flags = ["--endpoint", url, "--max-tokens", "30", "--seed", "5"]
    first, second = generate("To be", *flags), generate("To be", *flags)
    assert first.stdout == second.stdout != "To be"


def test_a_refused_request_is_one_clear_line(url: str) -> None:
    done = generate("x", "--endpoint", url, "--temperature", "-3")
    assert done.returncode == 1
    assert re.fullmatch(r"Error: status 400: .*temperature.*\n", done.stderr)
    assert done.stdout == ""


def test_generate_says_why_its_server_cannot_start(tmpdir: Path) -> None:
    done = generate("x", "--tp", "3", TMPDIR=str(tmpdir))
    assert done.returncode == 2
    assert done.stderr == "Error: --tp 3 cannot split 4 KV heads / 8 query heads\n"


def test_an_interrupted_generate_takes_its_server_along(tmpdir: Path) -> None:
    process = subprocess.Popen(
        [*NVSERVE, "generate", "x", "--max-tokens", "3000"],
        env=environment(TMPDIR=str(tmpdir)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        assert process.stdout.read(10)  # the prompt and the first text
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b"\nnvserve: interrupted\n"
        assert process.wait(EVENT_LIMIT_S) == ExitCode.INTERRUPTED
    wait_for("an empty TMPDIR", lambda: not list(tmpdir.iterdir()))


@pytest.mark.parametrize(
    ("command", "module"),
    [
        (["launch", "--device", "sim", "--port", "0"], "click"),
        (["launch", "--device", "sim", "--port", "0"], "nvserve.protocol.messages"),
        (["generate", "x", "--max-tokens", "3000"], "click"),
        (["generate", "x", "--max-tokens", "3000"], "http.client"),
    ],
)
def test_an_interrupt_while_modules_load_is_one_line(
    command: list[str], module: str, tmpdir: Path
) -> None:
    """Commands that do not end by themselves soon, so that it cannot come too late."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "nvserve", *command],
        env=environment(TMPDIR=str(tmpdir)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process.stderr as stderr:
        while (line := stderr.readline().rstrip()).partition("|")[2].split()[-1:] != [module]:
            assert line, "it ended before"
        process.send_signal(signal.SIGINT)
        told = [line for line in stderr if not line.startswith("import time:")]
    code = process.wait(EVENT_LIMIT_S)
    assert "Traceback" not in "".join(told)
    if code == ExitCode.OK:  # it was late: the launcher had taken over, and drained
        assert command[0] == "launch"
        assert told[-1].endswith("stopped\n")
    else:
        assert code == ExitCode.INTERRUPTED
        assert told == ["\n", "nvserve: interrupted\n"]
    wait_for("an empty TMPDIR", lambda: not list(tmpdir.iterdir()))


def test_a_killed_generate_takes_its_server_along(tmpdir: Path) -> None:
    process = subprocess.Popen(
        [*NVSERVE, "generate", "x"], env=environment(TMPDIR=str(tmpdir)), stdout=subprocess.DEVNULL
    )
    wait_for("a launch", lambda: list(tmpdir.glob("nvserve-*/launcher.sock")))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait(GONE_LIMIT_S)
    wait_for("no launcher", lambda: not any(map(is_running, map(int, children))), GONE_LIMIT_S)
    wait_for("an empty TMPDIR", lambda: not list(tmpdir.iterdir()))


@pytest.mark.parametrize("closed", ["", "<&-", "2>&-", "<&- 2>&-"])
def test_a_launch_drains_when_streams_were_closed_or_their_reader_has_left(
    closed: str, tmpdir: Path
) -> None:
    process = subprocess.Popen(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *NVSERVE, "launch", *PATIENT, "--device", "sim"],
        env=environment(TMPDIR=str(tmpdir)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stderr, process.stdout:
        assert process.stdout.readline().startswith(b"nvserve is ready: ")
    process.send_signal(signal.SIGTERM)
    assert process.wait(EVENT_LIMIT_S) == ExitCode.OK


class Chat:
    """A chat with pipes for a terminal; `read_until` waits for what it writes."""

    def __init__(self, url: str, max_tokens: int = 40) -> None:
        flags = ["--endpoint", url, "--temperature", "0", "--max-tokens", str(max_tokens)]
        self.process = subprocess.Popen(
            [*NVSERVE, "chat", *flags],
            env=environment(PYTHONUNBUFFERED="1"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.text = ""

    def say(self, line: str) -> None:
        self.stdin.write(line.encode() + b"\n")
        self.stdin.flush()

    def read_until(self, pattern: str) -> str:
        """The text up to the first match, which is taken away."""
        while (found := re.search(pattern, self.text)) is None:
            assert select.select([self.stdout], [], [], EVENT_LIMIT_S)[0], f"never {pattern!r}"
            piece = os.read(self.stdout.fileno(), 4096)
            assert piece, f"ended before {pattern!r}: {self.text!r}"
            self.text += piece.decode()
        before, self.text = self.text[: found.end()], self.text[found.end() :]
        return before

    def leave(self) -> int:
        """Ctrl-D, which closes a terminal's input."""
        self.stdin.close()
        self.read_until(r"\n")
        self.stdout.close()
        return self.process.wait(EVENT_LIMIT_S)

    def close(self) -> None:
        """Whatever the test did: nothing stays behind."""
        self.process.kill()
        self.process.wait(GONE_LIMIT_S)
        self.stdin.close()
        self.stdout.close()


def test_a_chat_remembers_goes_on_and_leaves_at_the_end_of_input(url: str) -> None:
    with closing(Chat(url)) as chat:
        chat.read_until("> ")
        chat.say("Who are you?")
        first = chat.read_until(r"\n> ")
        assert len(first) > 10
        chat.say("Who are you?")
        assert chat.read_until(r"\n> ") != first, "the second turn did not see the first one"
        assert chat.leave() == 0


def test_an_interrupt_stops_the_reply_and_not_the_chat(url: str) -> None:
    with closing(Chat(url, max_tokens=1500)) as chat:
        chat.read_until("> ")
        for _ in range(2):
            chat.say("Tell me all about the wars of York and Lancaster.")
            chat.read_until(r"\w")
            chat.process.send_signal(signal.SIGINT)
            assert chat.read_until(r"\n> ").endswith("[stopped]\n> ")
        assert chat.leave() == 0


def test_an_interrupt_at_the_prompt_begins_a_new_line(url: str) -> None:
    """Sent when the prompt is seen, which may be before the chat waits for input."""
    with closing(Chat(url)) as chat:
        chat.read_until("> ")
        for _ in range(20):
            chat.process.send_signal(signal.SIGINT)
            assert chat.read_until(r"> ") == "\n> "
        chat.say("Who are you?")
        assert len(chat.read_until(r"\n> ")) > 10
        assert chat.leave() == 0
