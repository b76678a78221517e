"""Answers that take long to write: what else is asked meanwhile does not wait for them."""

import concurrent.futures
import json
import time
from typing import Any

import pytest
from api.bad_bodies import CHAT, COMPLETIONS, HI
from api.fake_core import tokens_of
from api.frontend_process import FrontendProcess

NUM_CHOICES, NUM_TOKENS, NUM_TOPS = 32, 400, 20
NUM_ROUNDS = 5  # this machine may stand still in one of them, but not in all
LIMIT_S = 0.3  # the whole document takes a second and more
SIZES: dict[str, Any] = {"max_tokens": NUM_TOKENS, "n": NUM_CHOICES, "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "logprobs": True, "top_logprobs": NUM_TOPS},
    COMPLETIONS: {"prompt": [5], "logprobs": NUM_TOPS, "return_token_ids": True},
}


def asked_beside_probes(frontend: FrontendProcess, path: str) -> tuple[bytes, float]:
    """The answer, and the longest wait for /health until it was there."""
    raw = json.dumps(BODIES[path] | SIZES).encode()
    headers = {"content-type": "application/json"}
    waits: list[float] = []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(frontend.request, "POST", path, raw, headers)
        while not asked.done():
            begun = time.monotonic()
            assert frontend.get("/health")[0] == 200
            waits.append(time.monotonic() - begun)
    status, answer = asked.result()
    assert status == 200
    return answer, max(waits)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_logprobs_of_many_tokens_stall_nobody(shared: FrontendProcess, path: str) -> None:
    waits: list[float] = []
    answer = b""
    while not waits or waits[-1] > LIMIT_S:
        assert len(waits) < NUM_ROUNDS, waits
        answer, longest = asked_beside_probes(shared, path)
        waits.append(longest)
    choices = json.loads(answer)["choices"]
    assert [choice["index"] for choice in choices] == list(range(NUM_CHOICES))
    for choice in choices:
        if path == CHAT:
            entries = choice["logprobs"]["content"]
            assert [len(entry["top_logprobs"]) for entry in entries] == [NUM_TOPS] * NUM_TOKENS
        else:
            assert choice["token_ids"] == tokens_of([5], NUM_TOKENS)
            assert choice["logprobs"]["token_logprobs"] == [-0.5] * NUM_TOKENS
