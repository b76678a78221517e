"""What public bug reports of such systems describe, tried on a whole server (A.. of their list)."""

import concurrent.futures
import json
import random
import socket
import struct
import time
from typing import Any

import pytest
import zmq
from process.server import wait_for
from surface.asking import Asker, in_time
from tokenizers import Tokenizer

from nvserve.protocol.client_messages import Hello, Submit, encode_client
from nvserve.scripts.model_facts import DEMO_MODEL

GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


def ids_of(answer: Any) -> list[int]:
    token_ids: list[int] = answer["choices"][0]["token_ids"]
    return token_ids


def post_raw(asker: Asker, body: dict[str, Any]) -> socket.socket:
    """Send a completion request and return its connection without reading."""
    connection = socket.create_connection(("127.0.0.1", asker.port), timeout=60)
    raw = json.dumps(body).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(raw), raw)
    )
    return connection


def reset(connection: socket.socket) -> None:
    """Close with an RST, as a client does that was killed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def assert_sums(metrics: dict[str, float]) -> None:
    finished = sum(
        value for name, value in metrics.items() if name.startswith("nvserve:request_success_total")
    )
    live = metrics["nvserve:num_requests_running"] + metrics["nvserve:num_requests_waiting"]
    assert metrics["nvserve:requests_accepted_total"] == finished + live


# -- A12 -------------------------------------------------------------------------------------------


HUGE_TEXT = "the king and " * 400_000  # 5.2 MB
NUM_ROUNDS = 5
# Made beforehand: what a test does in its own threads would be measured with the server.
HUGE = {
    "completion": (b"/v1/completions", json.dumps({"prompt": HUGE_TEXT}).encode()),
    "chat": (
        b"/v1/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": HUGE_TEXT}]}).encode(),
    ),
    "ids": (b"/v1/completions", b'{"prompt":[5' + b",5" * 2_600_000 + b"]}"),
    "frame": (b"", encode_client(Submit(id=1, prompt=HUGE_TEXT))),
}


def refused_huge_body(asker: Asker, path: bytes, body: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", asker.port), timeout=60) as connection:
        connection.sendall(
            b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n" % (path, len(body))
        )
        connection.sendall(body)
        answer = b""
        while data := connection.recv(65536):
            answer += data
        return answer


def refused_huge_frame(asker: Asker, frame: bytes) -> bytes:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(asker.zmq_endpoint)
        dealer.send(encode_client(Hello(version=1)))
        dealer.send(frame)
        answer = b""
        while b"Error" not in answer:
            assert dealer.poll(30_000)
            answer = dealer.recv()
        return answer
    finally:
        context.destroy(linger=0)


def worst_waits(asker: Asker, path: bytes, huge: bytes) -> tuple[float, float]:
    """Of one round: the longest gap in four streams, and the longest wait for /health."""
    gaps: list[float] = []
    health: list[float] = []
    body = {"prompt": "To be", "max_tokens": 200, "stream": True, "ignore_eos": True}

    def read_stream() -> None:
        with post_raw(asker, body) as connection:
            last, tail = 0.0, b""
            while data := connection.recv(65536):
                now = time.monotonic()
                if last:
                    gaps.append(now - last)
                last, tail = now, (tail + data)[-32:]
                if tail.endswith(b"0\r\n\r\n"):
                    return

    def refused() -> bytes:
        return refused_huge_body(asker, path, huge) if path else refused_huge_frame(asker, huge)

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        streams = [pool.submit(read_stream) for _ in range(4)]
        wait_for("the streams run", lambda: len(gaps) > 20)
        refusals = [pool.submit(refused) for _ in range(8)]
        while len(health) < 5 or not all(one.done() for one in refusals):
            begun = time.monotonic()
            assert asker.request("GET", "/health")[0] == 200
            health.append(time.monotonic() - begun)
        answers = [one.result() for one in refusals]
        for stream in streams:
            stream.result(60)
    assert all(b"context_length_exceeded" in answer for answer in answers), answers[0][:500]
    return max(gaps), max(health)


@pytest.mark.parametrize("door", HUGE)
def test_a12_prompts_of_five_megabytes_stall_nobody(asker: Asker, door: str) -> None:
    """In one round of a few: what the server does is done in each, what else runs here is not."""
    waits: list[tuple[float, float]] = []
    while len(waits) < NUM_ROUNDS:
        waits.append(worst_waits(asker, *HUGE[door]))
        gap_s, health_s = waits[-1]
        if gap_s < 0.5 and health_s < 0.2:
            break
    else:
        pytest.fail(f"longest token gap and wait for /health, by round: {waits}")
    asker.check_alive()


def test_a12_many_prompts_are_encoded_up_to_the_first_that_is_too_long(asker: Asker) -> None:
    """Each of these could fit; to encode all would take a core ten seconds."""
    prompts = ["a " * 14_000] * 1_024
    error = in_time(3.0, lambda: asker.refusal("/v1/completions", {"prompt": prompts}))
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


def test_a12_nobody_waits_until_all_of_anothers_prompts_are_encoded(asker: Asker) -> None:
    """The longest wait for one prompt, as a share of the time that three bodies of many take."""
    many = {"prompt": ["a " * 2_000] * 1_023 + ["a " * 14_000]}
    shares: list[float] = []
    while not shares or shares[-1] > 0.25:
        assert len(shares) < NUM_ROUNDS, shares
        waits: list[float] = []
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            begun = time.monotonic()
            crowd = [pool.submit(asker.refusal, "/v1/completions", many) for _ in range(3)]
            while not all(one.done() for one in crowd):
                asked = time.monotonic()
                asker.complete(prompt="a " * 1_500, max_tokens=1)
                waits.append(time.monotonic() - asked)
            shares.append(max(waits) / (time.monotonic() - begun))
            assert {one.result()["code"] for one in crowd} == {"context_length_exceeded"}


# -- A14 -------------------------------------------------------------------------------------------


def test_a14_a_prompt_that_ends_inside_a_character(asker: Asker) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    ids = tokenizer.encode("Hello world 한").ids  # no merges for it: three byte tokens
    prompt, last = ids[:-1], ids[-1]
    body = {"prompt": prompt, "max_tokens": 1, "allowed_token_ids": [last]}
    assert tokenizer.decode(prompt).endswith("\ufffd")
    assert asker.complete(**body)["choices"][0]["text"] == "한"
    events = asker.events("/v1/completions", body)
    assert "".join(event["choices"][0]["text"] for event in events) == "한"


# -- A19, A20 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.3])
def test_a19_clients_that_are_gone_free_everything(asker: Asker, delay_s: float) -> None:
    long_prompt = "the king and the queen of " * 12
    bodies = [
        {"prompt": long_prompt if index % 3 else "a", "max_tokens": 400, "ignore_eos": True}
        | {"stream": index % 2 == 0}
        for index in range(32)
    ]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        kept = pool.submit(asker.complete, prompt="To be, or", max_tokens=30, **GREEDY)
        connections = [post_raw(asker, body) for body in bodies]
        time.sleep(delay_s)  # not for an event: queued, prefilling and decoding are all wanted
        for connection in connections:
            reset(connection)
        expected = asker.complete(prompt="To be, or", max_tokens=30, **GREEDY)
        assert ids_of(kept.result(60)) == ids_of(expected)
    wait_for("nothing runs", lambda: _is_idle(asker))
    metrics = asker.metrics()
    assert_sums(metrics)
    asker.check_alive()


def _is_idle(asker: Asker) -> bool:
    metrics = asker.metrics()
    assert_sums(metrics)
    names = ("num_requests_running", "num_requests_waiting", "frontend_open_requests")
    return all(metrics[f"nvserve:{name}"] == 0 for name in names)


def test_a20_disconnects_around_the_end_of_short_requests(asker: Asker) -> None:
    draw = random.Random(20)

    def come_and_go(delay_s: float) -> None:
        connection = post_raw(asker, {"prompt": "a", "max_tokens": 3, "ignore_eos": True})
        time.sleep(delay_s)
        reset(connection)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        coming = [pool.submit(come_and_go, draw.random() * 0.05) for _ in range(300)]
        while not all(one.done() for one in coming):
            assert_sums(asker.metrics())
        for one in coming:
            one.result()
    wait_for("nothing runs", lambda: _is_idle(asker))
    asker.check_alive()


# -- A21 -------------------------------------------------------------------------------------------


def test_a21_one_request_id_for_many(asker: Asker) -> None:
    prompts = ["To be", "The king", "My lord", "What"]
    alone = [ids_of(asker.complete(prompt=prompt, max_tokens=8, **GREEDY)) for prompt in prompts]

    def ask(prompt: str) -> list[int]:
        body = {"prompt": prompt, "max_tokens": 8, **GREEDY}
        status, answer = asker.post("/v1/completions", body, **{"X-Request-Id": "the-same"})
        assert status == 200
        return ids_of(json.loads(answer))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, prompts)) == alone


# -- A24 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 31, 32, 33, 48])
def test_a24_prompts_that_are_cached_whole(asker: Asker, num_tokens: int) -> None:
    prompt = [100 + (num_tokens * 37 + index * 13) % 800 for index in range(num_tokens)]
    body = {"prompt": prompt, "max_tokens": 5, "logprobs": 1, **GREEDY}
    first = asker.complete(**body)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: asker.complete(**body), range(12)))
    for answer in answers:
        assert ids_of(answer) == ids_of(first)
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(
            first["choices"][0]["logprobs"]["token_logprobs"], abs=1e-4
        )
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (num_tokens - 1) // 16 * 16
    asker.check_alive()


# -- A29, A30 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-10, 1e-38, 1e-45])
def test_a29_tiny_temperatures_are_greedy_and_hurt_nobody(asker: Asker, temperature: float) -> None:
    body = {"prompt": "To be, or", "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    greedy = ids_of(asker.complete(**body, temperature=0))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        good = pool.submit(asker.complete, **body, temperature=0)
        cold = pool.submit(asker.complete, **body, temperature=temperature, top_p=0.0001, seed=3)
        assert ids_of(good.result(60)) == greedy
        assert ids_of(cold.result(60)) == greedy


def test_a30_a_seed_gives_the_same_in_any_company(asker: Asker) -> None:
    body = {"prompt": "To be, or", "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
    seeded = body | {"seed": 42, "temperature": 0.8}
    alone = ids_of(asker.complete(**seeded))
    others: list[dict[str, Any]] = [{"temperature": 1.2}] * 7
    for company in (others, [one | {"seed": 7 + i} for i, one in enumerate(others)]):
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            running = [pool.submit(asker.complete, **(body | one)) for one in company]
            assert ids_of(pool.submit(asker.complete, **seeded).result(60)) == alone
            texts = {tuple(ids_of(one.result(60))) for one in running}
        assert len(texts) == len(company), "different seeds gave the same text"
    choices = asker.complete(**seeded, n=4)["choices"]
    assert choices[0]["token_ids"] == alone
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 4


# -- deadlines -------------------------------------------------------------------------------------


def test_a_deadline_ends_a_request_in_both_forms(asker: Asker) -> None:
    body = {"prompt": "To be, or", "max_tokens": 3000, "ignore_eos": True}
    short = {"X-Request-Timeout": "0.2"}
    status, answer = asker.post("/v1/completions", body, **short)
    assert (status, json.loads(answer)["error"]["code"]) == (504, "deadline_exceeded")
    for _ in range(NUM_ROUNDS):  # this machine may stand still until it is over
        status, answer = asker.post("/v1/completions", body | {"stream": True}, **short)
        if status == 200:
            break
    assert status == 200
    events = [line for line in answer.decode().split("\n\n") if line]
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert events[-1] == "data: [DONE]"
    asker.check_alive()


# -- bad words -------------------------------------------------------------------------------------


def test_words_of_several_tokens_are_never_said(asker: Asker) -> None:
    body = {"prompt": "To be, or", "max_tokens": 24, **GREEDY}
    plain = asker.complete(**body)["choices"][0]
    word = " ".join(plain["text"].split()[1:3])
    banned = asker.complete(**body, bad_words=[word])["choices"][0]
    assert word in plain["text"]
    assert len(banned["token_ids"]) == 24
    assert word not in banned["text"]


# -- A33 -------------------------------------------------------------------------------------------


def test_a33_probes_beside_a_long_prefill_are_answered_and_leave_nothing(asker: Asker) -> None:
    """Some wait for their answer, some hang up before it, as impatient probers do."""
    asker.settle()
    accepted = asker.metrics()["nvserve:requests_accepted_total"]
    prompt = [5 + i % 900 for i in range(3_000)]  # some sixty steps
    waits: list[float] = []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(asker.complete, prompt=prompt, max_tokens=1)
        while not running.done():
            for path in ("/health", "/ready"):
                begun = time.monotonic()
                status, answer = asker.request("GET", path)
                waits.append(time.monotonic() - begun)
                assert status == 200, answer
            with socket.create_connection(("127.0.0.1", asker.port), timeout=60) as impatient:
                impatient.sendall(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
                reset(impatient)
        assert running.result()["usage"]["prompt_tokens"] == len(prompt)
    assert len(waits) > 20
    assert sorted(waits)[len(waits) // 2] < 0.1
    asker.settle()
    # The prompt, and what settling asks itself, of which not all was counted above.
    assert asker.metrics()["nvserve:requests_accepted_total"] - accepted <= 1 + 4
    asker.check_alive()
