"""Streams that begin with a very long prompt: all of it comes, and nobody else waits for it."""

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from api.fake_core import EVENT_LIMIT_S, tokens_of
from api.frontend_process import FrontendProcess

from nvserve.frontend.exchange import MAX_UNSENT_BYTES
from nvserve.protocol.messages import Abort

PROMPT = [300 + number % 100 for number in range(30_000)]
NUM_TOKENS, NUM_TOPS = 5, 20
SIZES = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def roomy() -> Iterator[FrontendProcess]:
    """A frontend whose model takes such prompts."""
    frontend = FrontendProcess(max_model_len=40_000)
    try:
        frontend.ready()
        frontend.new_core()
        frontend.wait_connected()
        yield frontend
    finally:
        frontend.close()


def events_of(frontend: FrontendProcess, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All but the last one, for a reader who begins when the first output is complete."""
    assert frontend.core is not None
    num_aborts = len(frontend.core.of_type(Abort))
    num_finished = frontend.core.num_finished
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(EVENT_LIMIT_S)
        connection.connect(("127.0.0.1", frontend.port))
        raw = json.dumps(body | SIZES | {"stream": True}).encode()
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(raw), raw)
        )
        frontend.core.wait_until(lambda core: core.num_finished > num_finished)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        text = answer.read()
    assert len(frontend.core.of_type(Abort)) == num_aborts
    assert len(text) > 2 * MAX_UNSENT_BYTES
    *events, done, rest = text.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


@pytest.mark.parametrize(("num_ids", "num_choices"), [(30_000, 1), (10_000, 2)])
def test_an_echo_with_logprobs_comes_whole_and_before_its_output(
    num_ids: int, num_choices: int, roomy: FrontendProcess
) -> None:
    body = {"prompt": PROMPT[:num_ids], "echo": True, "logprobs": NUM_TOPS, "n": num_choices}
    status, whole = roomy.post("/v1/completions", body | SIZES)
    assert status == 200
    events = events_of(roomy, body)
    for expected in whole["choices"]:
        parts = [event["choices"][0] for event in events]
        parts = [part for part in parts if part["index"] == expected["index"]]
        assert len(parts) == 1 + NUM_TOKENS
        assert len(parts[0]["logprobs"]["tokens"]) == num_ids
        assert "".join(part["text"] for part in parts) == expected["text"]
        for name, column in expected["logprobs"].items():
            assert [one for part in parts for one in part["logprobs"][name]] == column
            assert len(column) == num_ids + NUM_TOKENS


def test_many_large_openings_of_one_stream_are_no_reason_to_cut_it(roomy: FrontendProcess) -> None:
    body = {"prompt": PROMPT, "return_token_ids": True, "n": 64}
    events = [event["choices"][0] for event in events_of(roomy, body)]
    openings = [event for event in events if "prompt_token_ids" in event]
    assert [event["prompt_token_ids"] for event in openings] == [PROMPT] * 64
    ids = [token for event in events if event["index"] == 7 for token in event["token_ids"]]
    assert ids == tokens_of(PROMPT, NUM_TOKENS)
