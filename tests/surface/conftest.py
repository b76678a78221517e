"""A real server on the demo model for the tests of a run that only ask it things."""

from collections.abc import Iterator

import pytest
from process.server import Server
from surface.asking import Asker


@pytest.fixture(scope="session")
def asker() -> Iterator[Asker]:
    """Small steps, so that prompts take several; no test may leave a trace in it."""
    server = Server.launch(
        *("--spares", "0", "--zmq-port", "0", "--max-num-batched-tokens", "48"),
        *("--max-num-seqs", "8", "--num-kv-blocks", "200"),
    )
    try:
        yield Asker(server, server.wait_ready())
    finally:
        server.close()
