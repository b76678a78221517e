"""A client's connection to a server that takes no notice, and a client closed within its own call.

The server is a socket that welcomes whoever greets it and does nothing else.
"""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from nvserve.frontend import client_link
from nvserve.frontend.client import AsyncClient, Client
from nvserve.frontend.client_link import Silence
from nvserve.frontend.one_thread import OneThread
from nvserve.protocol.client_messages import (
    CLIENT_PROTOCOL,
    Hello,
    Welcome,
    decode_to_server,
    encode_client,
)

WAIT_S = 30.0
SHORT_S = 0.02  # of a call that gives up
SILENCE_S = 0.3
WELCOME = Welcome(version=CLIENT_PROTOCOL, model="mute", max_model_len=64)


class MuteServer:
    """Counts the connections that greeted it, in a thread of its own."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.num_links = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_over.is_set():
            if not self._socket.poll(20):
                continue
            identity, frame = self._socket.recv_multipart()
            if isinstance(decode_to_server(frame), Hello):
                self.num_links += 1
                self._socket.send_multipart([identity, encode_client(WELCOME)])

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(WAIT_S)
        self._context.destroy(linger=0)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MuteServer]:
    monkeypatch.setattr(client_link, "SILENCE_S", SILENCE_S)
    mute = MuteServer()
    yield mute
    mute.close()


@pytest.fixture
def alarm() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Sets what a signal handler does in a moment."""
    actions: list[Callable[[], None]] = []
    before = signal.signal(signal.SIGALRM, lambda *_: actions[-1]())

    def arm(action: Callable[[], None]) -> None:
        actions.append(action)
        signal.setitimer(signal.ITIMER_REAL, 0.05)

    yield arm
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


def test_silence_counts_while_something_is_owed_and_is_kept_in_between() -> None:
    silence = Silence(100.0)
    silence.note(True, 103.0)  # nothing was owed before
    assert silence.seconds == 0
    silence.note(False, 104.5)
    silence.note(True, 200.0)
    assert silence.seconds == 1.5
    silence.note(True, 202.0)
    silence.note(False, 203.0)
    assert silence.seconds == 4.5


def test_a_message_ends_a_silence_and_only_what_follows_counts() -> None:
    silence = Silence(0.0)
    silence.note(True, 0.0)
    silence.note(True, 3.0)
    silence.hear(4.0)
    assert silence.seconds == 0
    silence.note(False, 4.25)
    silence.hear(9.0)  # a beat of an idle server
    silence.note(True, 15.0)
    assert silence.seconds == 0


def test_a_silent_server_is_left_also_by_calls_that_give_up_early(server: MuteServer) -> None:
    deadline_s = time.monotonic() + WAIT_S
    with Client(server.endpoint) as client:
        while server.num_links < 3:
            assert time.monotonic() < deadline_s, f"{server.num_links} links"
            with pytest.raises(TimeoutError):
                client.generate([5], limit_s=SHORT_S)


def test_the_async_client_leaves_it_too(server: MuteServer) -> None:
    async def run() -> None:
        deadline_s = time.monotonic() + WAIT_S
        async with AsyncClient(server.endpoint) as client:
            while server.num_links < 3:
                assert time.monotonic() < deadline_s, f"{server.num_links} links"
                with pytest.raises(TimeoutError):
                    await client.generate([5], limit_s=SHORT_S)

    asyncio.run(run())


def test_requests_that_nobody_waits_for_do_not_pile_up(server: MuteServer) -> None:
    deadline_s = time.monotonic() + WAIT_S
    with Client(server.endpoint) as client:
        while server.num_links < 2:
            assert time.monotonic() < deadline_s, f"{server.num_links} links"
            request = client.submit([5])
            time.sleep(SHORT_S)
            client.abort(request)


def test_a_signal_handler_may_close_the_client_that_it_interrupts(
    server: MuteServer, alarm: Callable[[Callable[[], None]], None]
) -> None:
    client = Client(server.endpoint)
    request = client.submit([5])
    alarm(client.close)
    with pytest.raises(RuntimeError, match="this client is closed"):
        client.result(request, limit_s=WAIT_S)
    assert client._context.closed


def test_closing_waits_for_another_threads_use_as_long_as_told(server: MuteServer) -> None:
    client = Client(server.endpoint)
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with client._thread:
            is_held.set()
            assert may_end.wait(WAIT_S)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(hold)
        assert is_held.wait(WAIT_S)
        try:
            with pytest.raises(RuntimeError, match="another thread is using this client"):
                client.close(limit_s=0.01)
        finally:
            may_end.set()
        client.close(limit_s=WAIT_S)
        other.result(WAIT_S)
    assert client._context.closed


def test_what_is_left_for_the_end_runs_once_as_the_outermost_use_ends() -> None:
    guard = OneThread("it")
    runs: list[str] = []
    with guard:
        with guard, guard.within(0.0):
            guard.at_end(lambda: runs.append("first"))
            guard.at_end(lambda: runs.append("second"))
        assert not runs
    assert runs == ["first", "second"]
    with guard:
        pass
    assert runs == ["first", "second"]
