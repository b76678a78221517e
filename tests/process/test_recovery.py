"""Processes killed and stopped under running streams: every text stays as it would have been.

All streams are greedy in float32 on the demo model, so each has one right text.
"""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from process.server import Server, served, wait_for

from nvserve.scripts.client_http import RequestFailed, stream_completion

PROMPTS = (
    "To be, or",
    "KING RICHARD:\nMy lord,",
    "What is the matter",
    "Good morrow to you,",
)
NUM_TOKENS = 300
NUM_LONG = 3000  # of a stream that shall not end by itself before something happens to it
STREAM_LIMIT_S = 120.0


class Stream:
    """One greedy completion, read in a thread of its own."""

    def __init__(self, url: str, prompt: str, num_tokens: int = NUM_TOKENS) -> None:
        self.text = ""
        self.error: Exception | None = None
        self._body = {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        self._thread = threading.Thread(target=self._read, args=[url], daemon=True)
        self._thread.start()

    def _read(self, url: str) -> None:
        try:
            for piece in stream_completion(url, self._body):
                self.text += piece
        except RequestFailed as error:
            self.error = error

    def finish(self) -> str:
        self._thread.join(STREAM_LIMIT_S)
        assert not self._thread.is_alive(), f"a stream hangs after {len(self.text)} characters"
        assert self.error is None, self.error
        return self.text


def start_streams(url: str, num_tokens: int = NUM_TOKENS) -> list[Stream]:
    """Streams on all prompts, each under way."""
    streams = [Stream(url, prompt, num_tokens) for prompt in PROMPTS]
    for stream in streams:
        wait_for("first tokens", lambda s=stream: len(s.text) > 40)  # type: ignore[misc]
    return streams


def texts(streams: list[Stream]) -> list[str]:
    return [stream.finish() for stream in streams]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ["--tp", "2", "--dtype", "float32", "--max-restarts", "1000"]
    with served(Server.launch(*flags)) as launched:
        launched.wait_ready()
        yield launched


@pytest.fixture(scope="module")
def reference(server: Server) -> list[str]:
    """The texts without any fault."""
    return texts([Stream(server.wait_ready(), prompt) for prompt in PROMPTS])


@pytest.fixture
def settled(server: Server) -> dict[str, Any]:
    """Ready, with a warm spare; the status."""
    return server.wait_status(
        "ready with a spare",
        lambda s: (
            s["state"] == "ready"
            and any(p["name"] == "spare" and p["is_ready"] for p in s["processes"])
        ),
    )


def pid_of(status: dict[str, Any], name: str) -> int:
    pids: dict[str, int] = {p["name"]: p["pid"] for p in status["processes"]}
    return pids[name]


@pytest.mark.parametrize("victim", ["worker 0", "worker 1", "core"])
def test_streams_go_on_unchanged_when_a_process_is_killed(
    server: Server, reference: list[str], settled: dict[str, Any], victim: str
) -> None:
    streams = start_streams(server.wait_ready())
    os.kill(pid_of(settled, victim), signal.SIGKILL)
    assert texts(streams) == reference
    after = server.wait_status("recovered", lambda s: s["epoch"] > settled["epoch"])
    assert pid_of(after, victim) != pid_of(settled, victim)
    kept = {"worker 0", "worker 1", "core", "frontend"} - {victim}
    assert all(pid_of(after, name) == pid_of(settled, name) for name in kept)


def test_a_killed_frontend_is_back_on_its_port_and_core_forgets_its_streams(
    server: Server, reference: list[str], settled: dict[str, Any]
) -> None:
    url = server.wait_ready()
    streams = start_streams(url, NUM_LONG)
    os.kill(pid_of(settled, "frontend"), signal.SIGKILL)
    again = Stream(url, PROMPTS[0])  # the socket is open all the time: refused by nobody
    assert again.finish() == reference[0]
    for stream in streams:
        with pytest.raises(AssertionError, match=r"broke|early"):
            stream.finish()
    after = server.wait_status("ready", lambda s: s["state"] == "ready")
    assert after["epoch"] == settled["epoch"]


def test_a_worker_killed_while_idle_is_replaced_and_the_next_request_is_right(
    server: Server, reference: list[str], settled: dict[str, Any]
) -> None:
    os.kill(pid_of(settled, "worker 0"), signal.SIGKILL)
    assert Stream(server.wait_ready(), PROMPTS[1]).finish() == reference[1]
