"""A frontend that dies or is replaced under open streams: what they get, and its successor."""

import json
import os
import signal
from typing import Any

from process.server import Server, is_running, served
from surface.test_shutdown import Streams, launched

from nvserve.frontend.client import Client
from nvserve.protocol.client_messages import Error
from nvserve.scripts.running import order

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


def test_streams_that_outlast_a_planned_restart_are_told_of_it() -> None:
    with launched("--shutdown-timeout", "1") as asker, Streams(asker, max_tokens=4000) as streams:
        [directory] = asker.server.tmpdir.glob("nvserve-*")
        before = asker.server.pids()["frontend"]
        number = order(directory, {"command": "restart", "name": "frontend"})["number"]
        for peer in streams.zmq:
            _, error = peer.output(1, Error)
            assert (error.status, error.message) == (503, "the frontend is being restarted")
        for events in streams.read_http():
            error = json.loads(events[-3].partition("data: ")[2])["error"]
            assert error["message"] == "the frontend is being restarted"
        asker.server.wait_status(
            "the restart", lambda status: (status["last_planned"] or {}).get("number") == number
        )
        assert asker.server.pids()["frontend"] != before
        status, _ = asker.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert status == 200
