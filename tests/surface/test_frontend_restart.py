"""A frontend that dies under ZMQ streams: its successor opens the same port, and they go on."""

import os
import signal
from typing import Any

from process.server import Server, is_running, served

from nvserve.frontend.client import Client

PROMPT, NUM_TOKENS = "To be, or", 200


def test_zmq_streams_outlive_their_frontend_on_a_port_that_was_drawn() -> None:
    with served(Server.launch("--spares", "0", "--zmq-port", "0")) as server:
        server.wait_ready()
        endpoint = server.wait_text(r"ZMQ clients: (\S+)").group(1)
        params: dict[str, Any] = {
            "max_tokens": NUM_TOKENS,
            "seed": 3,
            "temperature": 0.9,
            "ignore_eos": True,
        }
        with Client(endpoint) as client:
            expected = client.generate(PROMPT, **params)
            request = client.submit(PROMPT, **params)
            pieces = client.pieces(request)
            text = next(pieces).text
            frontend = server.pids()["frontend"]
            os.kill(frontend, signal.SIGKILL)
            text += "".join(piece.text for piece in pieces)
            result = request.result()
        assert not is_running(frontend)
        assert text == result.text == expected.text
        assert result.token_ids == expected.token_ids
