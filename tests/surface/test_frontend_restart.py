"""A frontend that dies or is replaced under open streams: what they get, and its successor."""

import json
import os
import signal
from typing import Any

import pytest
from process.server import Server, is_running, served, wait_for
from surface.asking import NUM_TRIES
from surface.test_shutdown import Streams, launched

from nvserve.frontend.client import Client
from nvserve.scripts.running import order

PROMPT, NUM_TOKENS = "To be, or", 500


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
            for _ in range(NUM_TRIES):
                request = client.submit(PROMPT, **params)
                pieces = client.pieces(request)
                text = next(pieces).text
                frontend = server.pids()["frontend"]
                os.kill(frontend, signal.SIGKILL)
                text += "".join(piece.text for piece in pieces)
                result = request.result()
                assert text == result.text == expected.text
                assert result.token_ids == expected.token_ids
                wait_for("its end", lambda pid=frontend: not is_running(pid))  # type: ignore[misc]
                if request.num_submits > 1:  # else it was over before, on a machine that stood
                    return
    pytest.fail("each was over before its frontend died")


def test_streams_that_outlast_a_planned_restart_go_on_over_zmq_and_are_told_over_http() -> None:
    with launched("--shutdown-timeout", "1") as asker, Streams(asker, max_tokens=4000) as streams:
        [directory] = asker.server.tmpdir.glob("nvserve-*")
        before = asker.server.pids()["frontend"]
        with Client(asker.zmq_endpoint) as client:
            request = client.submit(PROMPT, max_tokens=4000, ignore_eos=True)
            pieces = client.pieces(request)
            next(pieces)
            number = order(directory, {"command": "restart", "name": "frontend"})["number"]
            for events in streams.read_http():
                error = json.loads(events[-3].partition("data: ")[2])["error"]
                assert error["message"] == "the frontend is being restarted"
            while request.num_submits == 1:
                next(pieces)
            held = len(request.output)
            while len(request.output) < held + 5:
                next(pieces)
        asker.server.wait_status(
            "the restart", lambda status: (status["last_planned"] or {}).get("number") == number
        )
        assert asker.server.pids()["frontend"] != before
        status, _ = asker.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert status == 200
