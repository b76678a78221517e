"""Prefix hits, blocking, 16-bit numbers and seeds of the reports (A24, A27, A29, A30), both doors.

`test_preemption.py` has what a pool that is too small does.
"""

import concurrent.futures
import contextlib
import zlib
from typing import Any

import pytest
from process.server import Server, served, wait_for
from surface.asking import Asker
from surface.test_reports import ids_of, post_raw

from nvserve.frontend.client import Client
from nvserve.frontend.client_session import RequestError, Result

BLOCK = 16


# -- A24 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 32, 47, 48, 49])
def test_a24_copies_of_one_prompt_at_once_and_over_zmq(asker: Asker, num_tokens: int) -> None:
    prompt = [90 + (num_tokens * 31 + index * 17) % 900 for index in range(num_tokens)]
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True}
    with concurrent.futures.ThreadPoolExecutor(32) as pool:  # nothing is cached at first
        answers = list(pool.map(lambda _: asker.complete(**body), range(32)))
    first = ids_of(answers[0])
    assert all(ids_of(answer) == first for answer in answers)
    most = (num_tokens - 1) // BLOCK * BLOCK
    for answer in answers:
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] in range(
            0, most + 1, BLOCK
        )
    with Client(asker.zmq_endpoint) as client:
        result = client.generate(prompt, max_tokens=4, temperature=0, ignore_eos=True)
    assert result.token_ids == first
    assert result.num_cached_tokens == most
    asker.check_alive()


# -- A27 -------------------------------------------------------------------------------------------


def test_a27_small_requests_pass_a_big_one_that_has_no_room() -> None:
    """A long decode holds 60 of 300 blocks, so one that needs 242 waits; 20 need two each."""
    server = Server.launch(
        *("--device", "sim", "--sim-step-ms", "5", "--spares", "0", "--zmq-port", "0"),
        *("--num-kv-blocks", "301", "--block-size", str(BLOCK), "--max-model-len", "4096"),
    )
    with served(server):
        asker = Asker(server, server.wait_ready())

        def ask(name: str, num_prompt: int, max_tokens: int) -> None:
            prompt = [3 + zlib.crc32(name.encode()) % 900] * num_prompt  # no prefix in common
            if name.endswith("zmq"):
                with Client(asker.zmq_endpoint) as client:
                    result = client.generate(prompt, max_tokens=max_tokens, ignore_eos=True)
                assert result.num_output_tokens == max_tokens
            else:
                answer = asker.complete(prompt=prompt, max_tokens=max_tokens, ignore_eos=True)
                assert answer["usage"]["completion_tokens"] == max_tokens

        with (
            concurrent.futures.ThreadPoolExecutor(21) as pool,
            Client(asker.zmq_endpoint) as client,
        ):
            long = client.submit([2] * 950, max_tokens=3100, ignore_eos=True)  # 15 s at least
            _wait_running(asker, 1)
            big = pool.submit(ask, "big", 3860, 4)
            _wait_waiting(asker, 1)
            small = [
                pool.submit(ask, f"small {number} {door}", 20, 8)
                for number in range(10)
                for door in ("http", "zmq")
            ]
            for one in small:
                one.result(120)
            assert not big.done()
            client.abort(long)
            big.result(120)
        asker.check_alive()


def _wait_running(asker: Asker, count: int) -> None:
    _wait_metric(asker, "nvserve:num_requests_running", count)


def _wait_waiting(asker: Asker, count: int) -> None:
    _wait_metric(asker, "nvserve:num_requests_waiting", count)


def _statuses_at_once(asker: Asker, body: dict[str, Any], count: int) -> list[int]:
    """The statuses of so many streams, each of which is left as soon as it has one."""
    statuses = []
    with contextlib.ExitStack() as stack:
        asking = [
            stack.enter_context(post_raw(asker, body | {"stream": True})) for _ in range(count)
        ]
        for connection in asking:
            statuses.append(int(connection.recv(4096).split(maxsplit=2)[1]))
    return statuses


def _wait_metric(asker: Asker, name: str, value: float) -> None:
    wait_for(f"{name} of {value}", lambda: asker.metrics()[name] == value)


# -- a full queue ----------------------------------------------------------------------------------


def test_who_finds_the_queue_full_is_told_when_it_will_be_served() -> None:
    """Two slots, a quarter of a second each: the twenty who wait are served in 2.5 seconds."""
    server = Server.launch(
        *("--device", "sim", "--sim-step-ms", "5", "--spares", "0", "--zmq-port", "0"),
        *("--max-num-seqs", "2", "--max-queued-requests", "20"),
    )
    with served(server):
        asker = Asker(server, server.wait_ready())
        body: dict[str, Any] = {"prompt": "a", "max_tokens": 50, "ignore_eos": True}
        with (
            concurrent.futures.ThreadPoolExecutor(22) as pool,
            Client(asker.zmq_endpoint) as client,
        ):
            asked = [pool.submit(asker.complete, **body) for _ in range(22)]
            while sum(one.done() for one in asked) < 8:  # by now the pace is known
                waiting = [one for one in asked if not one.done()]
                concurrent.futures.wait(waiting, 30, concurrent.futures.FIRST_COMPLETED)
            last = [client.submit(**body) for _ in range(60)][-1]  # more than are served meanwhile
            with pytest.raises(RequestError) as caught:
                client.result(last, limit_s=60)
            assert 429 in _statuses_at_once(asker, body, 45)
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        assert caught.value.retry_after_s is not None
        assert 1 < caught.value.retry_after_s < 20
        asker.check_alive()


# -- A29 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a29_tiny_temperatures_in_16_bits(dtype: str) -> None:
    server = Server.launch("--dtype", dtype, "--spares", "0", "--zmq-port", "0")
    with served(server):
        asker = Asker(server, server.wait_ready())
        body: dict[str, Any] = {"prompt": "To be, or", "max_tokens": 12, "ignore_eos": True}
        body |= {"return_token_ids": True}
        greedy = ids_of(asker.complete(**body, temperature=0))
        for temperature in (1e-2, 1e-4, 1e-6, 1e-10, 1e-38):
            cold = {"temperature": temperature, "top_p": 0.0001, "seed": 3}
            assert ids_of(asker.complete(**body, **cold)) == greedy  # alone, as the greedy one was
            with Client(asker.zmq_endpoint) as client:
                result = client.generate("To be, or", max_tokens=12, ignore_eos=True, **cold)
            assert result.token_ids == greedy
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            mixed = [pool.submit(asker.complete, **body, **cold) for _ in range(2)]
            mixed += [pool.submit(asker.complete, **body, temperature=0) for _ in range(2)]
            assert all(len(ids_of(one.result(60))) == 12 for one in mixed)
        asker.check_alive()


# -- A30 -------------------------------------------------------------------------------------------


def test_a30_a_seed_gives_the_same_at_both_doors_and_in_any_company(asker: Asker) -> None:
    body: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "temperature": 0.8}
    alone = ids_of(asker.complete(prompt="To be, or", return_token_ids=True, seed=42, **body))
    for seeds in ([None] * 7, list(range(7))):
        with Client(asker.zmq_endpoint) as client:
            company = [client.submit("To be, or", seed=seed, **body) for seed in seeds[:3]]
            seeded = client.submit("To be, or", seed=42, **body)
            company += [client.submit("To be, or", seed=seed, **body) for seed in seeds[3:]]
            assert client.result(seeded).token_ids == alone
            results: list[Result] = [client.result(one) for one in company]
        assert len({tuple(result.token_ids) for result in results}) == 7
    asker.check_alive()
