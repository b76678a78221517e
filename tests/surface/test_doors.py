"""Who can reach the server, and what a thousand strangers at its ZMQ door cost."""

import os
from pathlib import Path

import zmq
from surface.asking import Asker

from nvserve.frontend.client import Client
from nvserve.protocol.client_messages import Hello, encode_client

LISTENING = "0A"


def listening_addresses(pids: list[int]) -> set[str]:
    """Hexadecimal local addresses of the TCP sockets on which these processes listen."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(entry)
            except OSError:  # closed meanwhile
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                found.add(fields[1].split(":")[0])
    return found


def test_a37_only_loopback_is_listened_on(asker: Asker) -> None:
    addresses = listening_addresses([asker.server.pid, *asker.pids.values()])
    assert addresses == {"0100007F"}


def test_a37_a_thousand_connections(asker: Asker) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.setsockopt(zmq.MAX_SOCKETS, 3000)
    sockets = []
    try:
        for number in range(1000):
            socket = context.socket(zmq.DEALER)
            socket.connect(asker.zmq_endpoint)
            socket.send(encode_client(Hello(version=1)) if number % 2 else b"\xc1")
            sockets.append(socket)
        with Client(asker.zmq_endpoint) as client:
            assert client.generate([5, 6], max_tokens=2, ignore_eos=True).num_output_tokens == 2
    finally:
        context.destroy(linger=0)
    asker.check_alive()
