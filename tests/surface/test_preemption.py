"""Pools too small for everybody: what clients get is what a roomy server gives, field by field."""

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import pytest
from process.server import Server
from surface.asking import Asker
from surface.test_reports import ids_of

from nvserve.frontend.client import Client
from nvserve.frontend.client_session import RequestError

SHARED = "KING RICHARD III:\nMy lords, before I speak of war and of the crown,\n"
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.1, "seed": 2, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"temperature": 0.7, "seed": 3, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"temperature": 0.7, "seed": 4, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 0.9, "seed": 5, "stop": ["the", "\n\n"], "include_stop_str_in_output": True},
    {"temperature": 0, "logit_bias": {"300": -5, "12": 1}, "min_tokens": 20, "ignore_eos": False},
    {"temperature": 0.9, "seed": 6, "bad_words": ["my lord", "I"], "n": 2},
    {"temperature": 0.9, "seed": 7, "allowed_token_ids": list(range(280, 400))},
    {"temperature": 0, "echo": True, "logprobs": 1},
    {"temperature": 0.8, "seed": 9, "guided_regex": "([a-z]{2,6} ){30}", "ignore_eos": False},
    {"temperature": 0, "stop_token_ids": [300, 301, 302, 303]},
    {"temperature": 0.6, "seed": 8, "stream": True, "logprobs": 0},
]
FLAGS = ["--spares", "0", "--block-size", "8", "--max-model-len", "136"]


@pytest.fixture(scope="module")
def roomy() -> Iterator[Asker]:
    server = Server.launch(*FLAGS, "--max-num-seqs", "1")
    try:
        yield Asker(server, server.wait_ready())
    finally:
        server.close()


@pytest.fixture(scope="module")
def cramped() -> Iterator[Asker]:
    server = Server.launch(
        *FLAGS, "--num-kv-blocks", "19", "--max-num-batched-tokens", "32", "--zmq-port", "0"
    )
    try:
        yield Asker(server, server.wait_ready())
    finally:
        server.close()


MAX_ROUNDS = 4


def ask(asker: Asker, params: dict[str, Any]) -> Any:
    body = {"prompt": SHARED, "max_tokens": 80, "ignore_eos": True, "return_token_ids": True}
    if not params.get("stream"):
        return asker.complete(**(body | params))["choices"]
    joined: dict[str, Any] = {"text": "", "token_ids": [], "logprobs": []}
    for event in asker.events("/v1/completions", body | params):
        for choice in event["choices"]:
            joined["text"] += choice["text"]
            joined["token_ids"] += choice["token_ids"]
            joined["logprobs"] += (choice["logprobs"] or {}).get("token_logprobs", [])
            joined["finish_reason"] = choice["finish_reason"]
    return joined


def test_a25_every_parameter_survives_preemptions(roomy: Asker, cramped: Asker) -> None:
    expected = [ask(roomy, params) for params in PARAMS]
    num_preemptions = 0.0
    for _ in range(MAX_ROUNDS):  # how often who is preempted hangs on the order of arrival
        with concurrent.futures.ThreadPoolExecutor(len(PARAMS)) as pool:
            answers = list(pool.map(lambda params: ask(cramped, params), PARAMS))
        for params, answer, right in zip(PARAMS, answers, expected, strict=True):
            assert close(answer, right), f"{params}:\n{answer}\n{right}"
        cramped.check_alive()
        num_preemptions = cramped.metrics()["nvserve:num_preemptions_total"]
        if num_preemptions >= 3 * len(PARAMS):
            break
    assert num_preemptions >= 3 * len(PARAMS)


ZMQ_PARAMS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.7, "seed": 3, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"temperature": 0.7, "seed": 4, "repetition_penalty": 1.3},
    {"temperature": 0.9, "seed": 5, "stop": ["zz", "qq"]},
    {"temperature": 0.9, "seed": 7, "allowed_token_ids": list(range(280, 400))},
]


def test_a25_streams_over_zmq_survive_preemptions(roomy: Asker, cramped: Asker) -> None:
    body = {"prompt": SHARED, "max_tokens": 80, "ignore_eos": True, "return_token_ids": True}
    expected = [roomy.complete(**(body | params))["choices"][0] for params in ZMQ_PARAMS]
    before = cramped.metrics()["nvserve:num_preemptions_total"]
    with Client(cramped.zmq_endpoint) as client:
        requests = [
            client.submit(SHARED, max_tokens=80, ignore_eos=True, **params)
            for params in ZMQ_PARAMS * 2
        ]
        for request, right in zip(requests, expected * 2, strict=True):
            result = client.result(request, limit_s=120)
            assert result.token_ids == right["token_ids"]
            assert result.text == right["text"]
            assert result.num_output_tokens == len(right["token_ids"])
    cramped.wait_more("nvserve:num_preemptions_total", before)
    cramped.check_alive()


def test_a23_resumed_requests_hit_their_own_blocks(roomy: Asker, cramped: Asker) -> None:
    """Sixteen of 40 + 60 tokens that share 32, in a pool for one and a half; both doors."""
    prompts = [[300 + index for index in range(32)] + [500 + k] * 8 for k in range(16)]
    body: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    expected = [ids_of(roomy.complete(prompt=p, return_token_ids=True, **body)) for p in prompts]
    before = cramped.metrics()
    with (
        concurrent.futures.ThreadPoolExecutor(8) as pool,
        Client(cramped.zmq_endpoint) as client,
    ):
        over_zmq = [client.submit(prompt, **body) for prompt in prompts[8:]]
        over_http = pool.map(
            lambda prompt: ids_of(cramped.complete(prompt=prompt, return_token_ids=True, **body)),
            prompts[:8],
        )
        assert [client.result(one, limit_s=120).token_ids for one in over_zmq] == expected[8:]
        assert list(over_http) == expected[:8]
    for name in ("nvserve:num_preemptions_total", "nvserve:prefix_cache_hits_total"):
        cramped.wait_more(name, before[name])
    cramped.check_alive()


def close(left: Any, right: Any) -> bool:
    """Equal, but for logprobs that differ in their last digit."""
    if isinstance(left, float) and isinstance(right, float):
        return abs(left - right) < 2e-3
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(close(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and type(left) is type(right):
        return len(left) == len(right) and all(map(close, left, right))
    return bool(left == right)


def test_a22_what_can_never_fit_is_refused_and_blocks_nobody() -> None:
    server = Server.launch(
        *("--spares", "0", "--num-kv-blocks", "5", "--block-size", "16", "--max-model-len", "4096"),
        *("--zmq-port", "0"),
    )
    try:
        asker = Asker(server, server.wait_ready())
        big = {"prompt": [300] * 60, "max_tokens": 100, "ignore_eos": True}
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            refused = [
                pool.submit(asker.refusal, "/v1/completions", big),
                pool.submit(asker.refusal, "/v1/completions", big | {"prompt": [300] * 65}),
            ]
            small = [
                pool.submit(asker.complete, prompt=[300 + i] * 8, max_tokens=8) for i in range(10)
            ]
            errors = [one.result(60) for one in refused]
            assert all(one.result(60)["usage"]["prompt_tokens"] == 8 for one in small)
        assert [error["param"] for error in errors] == ["max_tokens", "prompt"]
        assert all("4" in error["message"] for error in errors), "the limit is named"
        with Client(asker.zmq_endpoint) as client:
            small_too = client.submit([310] * 8, max_tokens=8, ignore_eos=True)
            for length, param in ((60, "max_tokens"), (65, "prompt")):
                with pytest.raises(RequestError) as caught:
                    client.generate([300] * length, max_tokens=100)
                assert (caught.value.status, caught.value.param) == (400, param)
            assert client.result(small_too).num_output_tokens == 8
        exact = asker.complete(prompt=[300] * 64, max_tokens=1)
        assert exact["usage"]["completion_tokens"] == 1
        asker.check_alive()
    finally:
        server.close()
