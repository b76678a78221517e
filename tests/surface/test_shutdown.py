"""SIGTERM and Ctrl-C with streams at both doors (A36 of the reports): finished, cut, or at once."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from process.server import Server, served, wait_for
from surface.asking import Asker
from surface.test_reports import post_raw
from surface.zmq_peer import Peer

from nvserve.protocol.client_messages import Accepted, ClientParams, Error, Finished, Submit

NUM_STREAMS = 4  # at each door
FAST_EXIT_S = 20.0  # interpreters end slowly on a full machine; draining would take half a minute


@contextmanager
def launched(*flags: str) -> Iterator[Asker]:
    """The simulated device at 5 ms a step, in which a stream takes as long as it has tokens."""
    server = Server.launch(
        *("--device", "sim", "--sim-step-ms", "5", "--spares", "0", "--zmq-port", "0", *flags)
    )
    with served(server):
        yield Asker(server, server.wait_ready())


class Streams:
    """Clients of both doors, each in the middle of its output."""

    def __init__(self, asker: Asker, max_tokens: int) -> None:
        body = {"prompt": "To be", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        body |= {"stream_options": {"include_usage": True}}
        self.http = [post_raw(asker, body) for _ in range(NUM_STREAMS)]
        self.heads = [connection.recv(65536) for connection in self.http]
        self.zmq = [Peer(asker.zmq_endpoint) for _ in range(NUM_STREAMS)]
        for peer in self.zmq:
            params = ClientParams(max_tokens=max_tokens, ignore_eos=True)
            peer.send(Submit(id=1, prompt="To be", params=params))
            peer.expect(Accepted)

    def read_http(self) -> list[list[str]]:
        """The events of each to its end."""
        return [
            [part[6:] for part in (head + read_to_end(connection)).decode().split("\n\n")]
            for head, connection in zip(self.heads, self.http, strict=True)
        ]

    def assert_told(self) -> None:
        """Each stream over HTTP ends with an error event."""
        for events in self.read_http():
            error = json.loads(events[-3].partition("data: ")[2])["error"]
            assert "shutting down" in error["message"]
            assert "[DONE]" in events[-2]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self.http:
            connection.close()
        for peer in self.zmq:
            peer.close()


def read_to_end(connection: socket.socket) -> bytes:
    """Up to the last chunk, or the end of the connection."""
    answer = b""
    try:
        while not answer.endswith(b"0\r\n\r\n") and (data := connection.recv(65536)):
            answer += data
    except ConnectionResetError:
        pass
    return answer


def assert_refused(asker: Asker, peer: Peer) -> None:
    status, answer = asker.post("/v1/completions", {"prompt": "x"})
    assert status == 503
    assert "shutting down" in json.loads(answer)["error"]["message"]
    peer.send(Submit(id=2, prompt="x"))
    error = peer.expect(Error)
    assert (error.id, error.status) == (2, 503)


def is_draining(asker: Asker) -> bool:
    return asker.request("GET", "/ready")[0] == 503


def test_a36_an_interrupt_of_the_whole_group_lets_streams_finish() -> None:
    with (
        launched() as asker,
        Peer(asker.zmq_endpoint) as late,
        Streams(asker, max_tokens=400) as streams,
    ):
        last = post_raw(asker, {"prompt": "a", "max_tokens": 4000, "ignore_eos": True})
        for pid in (asker.server.pid, *asker.pids.values()):  # as a terminal's Ctrl-C does
            os.kill(pid, signal.SIGINT)
        wait_for("draining", lambda: is_draining(asker))
        assert_refused(asker, late)
        last.close()  # until now there was surely something to drain
        for peer in streams.zmq:
            ids, finished = peer.output(1, Finished)
            assert (len(ids), finished.finish_reason) == (400, "length")
        for events in streams.read_http():
            assert "[DONE]" in events[-2]
            assert '"completion_tokens":400' in events[-3].replace(" ", "")
        assert asker.server.wait_exit() == 0
        assert not list(asker.server.tmpdir.iterdir())


def test_a36_streams_beyond_the_limit_end_with_an_error() -> None:
    with launched("--shutdown-timeout", "1") as asker, Streams(asker, max_tokens=4000) as streams:
        begun = time.monotonic()
        asker.server.signal(signal.SIGTERM)
        for peer in streams.zmq:
            _, error = peer.output(1, Error)
            assert error.status == 503
            assert "shutting down" in error.message
        assert time.monotonic() - begun >= 0.9
        streams.assert_told()
        assert asker.server.wait_exit() == 0


def test_a36_a_second_signal_ends_at_once_and_everybody_is_told() -> None:
    with launched() as asker, Streams(asker, max_tokens=4000) as streams:
        plain = post_raw(asker, {"prompt": "a", "max_tokens": 4000, "ignore_eos": True})
        asker.wait_more("nvserve:frontend_open_requests", 2 * NUM_STREAMS)
        asker.server.signal(signal.SIGTERM)
        wait_for("draining", lambda: is_draining(asker))
        asker.server.signal(signal.SIGTERM)
        streams.assert_told()
        with plain:
            answer = read_to_end(plain)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "aborted"
        for peer in streams.zmq:
            assert peer.output(1, Error)[1].status == 503
        assert asker.server.wait_exit(FAST_EXIT_S) == 130
        assert not list(asker.server.tmpdir.iterdir())


def test_a36_a_signal_while_loading_ends_cleanly() -> None:
    with served(Server.launch("--tp", "2")) as server:
        wait_for("a launch", lambda: list(server.tmpdir.glob("nvserve-*/launcher.sock")))
        wait_for("four children", lambda: len(server.pids()) >= 4)
        server.signal(signal.SIGTERM)
        assert server.wait_exit(FAST_EXIT_S) == 0
        assert "Traceback" not in server.text
        assert not list(server.tmpdir.iterdir())
