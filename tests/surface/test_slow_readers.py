"""Many clients that wait or never read: memory stays bounded, and the good ones notice little."""

import concurrent.futures
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from process.server import Server, wait_for
from surface.asking import Asker
from surface.test_reports import assert_sums
from surface.zmq_peer import Peer

from nvserve.protocol.client_messages import (
    CLIENT_PROTOCOL,
    Accepted,
    ClientParams,
    Emit,
    Finished,
    Hello,
    Submit,
    encode_client,
)

SCALE = float(os.environ.get("NVSERVE_TEST_SCALE", "0.1"))
NUM_SLOTS = max(16, round(64 * SCALE))
NUM_QUEUED, NUM_SILENT = round(2000 * SCALE), max(NUM_SLOTS + 4, round(200 * SCALE))
SILENT_TOKENS = max(600, round(3500 * SCALE))
NUM_DOORS = 2  # half of everybody comes over ZMQ
REQUESTS_PER_PEER = 100  # of those who wait over ZMQ
MAX_GROWTH_MB = 150.0
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target() -> Iterator[Asker]:
    """The simulated device at 5 ms a step: a gap between tokens is the frontend's and core's."""
    server = Server.launch(
        *("--device", "sim", "--sim-step-ms", "5", "--spares", "0", "--zmq-port", "0"),
        *("--max-num-seqs", str(NUM_SLOTS), "--max-queued-requests", "4000"),
        *("--num-kv-blocks", "4000", "--log-level", "error"),
    )
    try:
        yield Asker(server, server.wait_ready())
    finally:
        server.close()


def connect(asker: Asker, prompt: str, max_tokens: int, priority: int) -> socket.socket:
    """Send a streaming request and read nothing."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "priority": priority}
    raw = json.dumps(body | {"ignore_eos": True}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", asker.port))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(raw), raw)
    )
    return connection


class Crowd:
    """Clients that submit and read nothing, over HTTP and ZMQ in turn."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker
        self._connections: list[socket.socket] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers: list[zmq.Socket[bytes]] = []  # one that nobody holds is closed

    def add(self, count: int, prompt: str, max_tokens: int, priority: int, per_peer: int) -> None:
        peer: zmq.Socket[bytes] | None = None
        for number in range(count):
            text = f"{prompt} {number}"
            if number % NUM_DOORS:
                connection = connect(self._asker, text, max_tokens, priority)
                self._connections.append(connection)
                continue
            if peer is None or number // NUM_DOORS % per_peer == 0:
                peer = self._new_peer()
            params = ClientParams(max_tokens=max_tokens, priority=priority, ignore_eos=True)
            peer.send(encode_client(Submit(id=number, prompt=text, params=params)))

    def _new_peer(self) -> "zmq.Socket[bytes]":
        peer = self._context.socket(zmq.DEALER)
        peer.setsockopt(zmq.RCVHWM, 1)
        peer.setsockopt(zmq.RCVBUF, 4096)
        peer.connect(self._asker.zmq_endpoint)
        peer.send(encode_client(Hello(version=CLIENT_PROTOCOL)))
        self._peers.append(peer)
        return peer

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._context.destroy(linger=0)


def read_over_http(asker: Asker, gaps: list[float]) -> None:
    """Seconds between the pieces that a client receives."""
    with connect(asker, "To be, or", 300, priority=-1) as connection:
        last, tail = 0.0, b""
        while not tail.endswith(b"0\r\n\r\n"):
            data = connection.recv(65536)
            assert data, "the stream broke"
            now = time.monotonic()
            if last:
                gaps.append(now - last)
            last, tail = now, (tail + data)[-16:]


def read_over_zmq(asker: Asker, gaps: list[float]) -> None:
    with Peer(asker.zmq_endpoint) as peer:
        params = ClientParams(max_tokens=300, priority=-1, ignore_eos=True)
        peer.send(Submit(id=1, prompt="To be, or", params=params))
        peer.expect(Accepted)
        last = 0.0
        while isinstance(message := peer.receive(), Emit):
            now = time.monotonic()
            if last:
                gaps.append(now - last)
            last = now
        assert isinstance(message, Finished), message


def gaps_of_good_clients(asker: Asker, num_clients: int = 8) -> list[float]:
    """The gaps of some clients, half of them at each door, in order."""
    gaps: list[float] = []
    with concurrent.futures.ThreadPoolExecutor(num_clients) as pool:
        readers = (read_over_http, read_over_zmq)
        reading = [
            pool.submit(readers[number % NUM_DOORS], asker, gaps) for number in range(num_clients)
        ]
        for one in reading:
            one.result(120)
    assert len(gaps) > 100 * num_clients
    return sorted(gaps)


def percentile_99(values: list[float]) -> float:
    return values[len(values) * 99 // 100]


def memory_mb(asker: Asker) -> float:
    """Resident memory of frontend and core."""
    total = 0
    for name in ("frontend", "core"):
        text = Path(f"/proc/{asker.pids[name]}/status").read_text()
        [line] = [line for line in text.splitlines() if line.startswith("VmRSS")]
        total += int(line.split()[1])
    return total / 1024


def num_live(asker: Asker) -> float:
    metrics = asker.metrics()
    assert_sums(metrics)
    return metrics["nvserve:num_requests_running"] + metrics["nvserve:num_requests_waiting"]


def num_accepted(asker: Asker) -> float:
    return asker.metrics()["nvserve:requests_accepted_total"]


def test_waiting_and_silent_clients_cost_bounded_memory_and_little_time(target: Asker) -> None:
    normal = gaps_of_good_clients(target, NUM_SLOTS)  # as many as run later
    before = memory_mb(target)
    crowd = Crowd(target)
    try:
        accepted = num_accepted(target)
        crowd.add(NUM_SILENT, "The king", SILENT_TOKENS, priority=0, per_peer=1)
        wait_for("silent ones", lambda: num_accepted(target) >= accepted + NUM_SILENT)
        crowd.add(NUM_QUEUED, "My lord", 600, priority=1, per_peer=REQUESTS_PER_PEER)
        total = accepted + NUM_SILENT + NUM_QUEUED
        wait_for("a queue", lambda: num_accepted(target) >= total)
        limit_s = 3 * percentile_99(normal)
        loaded, memory = [], []
        for _ in range(3):  # other work on this machine may hit one measurement, but not three
            loaded.append(percentile_99(gaps_of_good_clients(target)))
            memory.append(memory_mb(target) - before)
        num_left = num_live(target)
    finally:
        crowd.close()
    print(
        f"{NUM_SILENT} silent and {NUM_QUEUED} queued clients, {num_left:.0f} left:"
        f" p99 gap {limit_s / 3 * 1e3:.1f} ms alone, {[round(p * 1e3, 1) for p in loaded]} beside"
        f" them; memory {before:.0f} MB and {max(memory):.0f} more"
    )
    assert num_left > NUM_SLOTS, "the load was over before the end"
    assert min(loaded) < limit_s, f"p99 {loaded} s, limit {limit_s:.3f} s"
    assert max(memory) < MAX_GROWTH_MB
    wait_for("nothing runs", lambda: not num_live(target))  # mass aborts
    target.check_alive()
