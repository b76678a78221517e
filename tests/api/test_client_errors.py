"""A Python client after its caller's mistakes: it goes on, or says what is wrong."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from api.fake_core import EVENT_LIMIT_S, FakeCore, tokens_of
from api.frontend_process import FrontendProcess

from nvserve.frontend.client import AsyncClient, Client
from nvserve.frontend.client_session import RequestError

LONG_S = 4.0  # of what waits for nobody
TOO_LARGE = "a " * 9_000_000
GREEDY = {"max_tokens": 40, "temperature": 0.0}


def begin_again(frontend: FrontendProcess, core: FakeCore) -> None:
    """Another frontend, once the fake core is in the midst of the only request."""
    core.wait_until(lambda core: [len(r.output) for r in core.running.values()] == [6])
    frontend.restart(zmq_endpoint=frontend.endpoint)
    frontend.ready()
    frontend.new_core()


def test_what_could_not_be_sent_does_not_come_back_with_a_new_frontend(
    frontend: FrontendProcess, core: FakeCore
) -> None:
    core.most_tokens = 6

    def run() -> list[int]:
        with Client(frontend.endpoint) as client:
            with pytest.raises(ValueError, match="stop cannot be sent"):
                client.submit("To be", stop="\ud800")
            with pytest.raises(RequestError, match="prompt: the request has"):
                client.generate(TOO_LARGE, limit_s=EVENT_LIMIT_S)
            return client.generate([1], **GREEDY).token_ids

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run)
        begin_again(frontend, core)
        assert future.result(EVENT_LIMIT_S) == tokens_of([1], 40)


def test_nor_does_it_with_the_async_client(frontend: FrontendProcess, core: FakeCore) -> None:
    core.most_tokens = 6

    async def run() -> list[int]:
        async with AsyncClient(frontend.endpoint) as client:
            with pytest.raises(ValueError, match="stop cannot be sent"):
                await client.submit("To be", stop="\ud800")
            with pytest.raises(RequestError, match="prompt: the request has"):
                await client.generate(TOO_LARGE, limit_s=EVENT_LIMIT_S)
            assert not client._news
            return (await client.generate([1], **GREEDY)).token_ids

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(asyncio.run, run())
        begin_again(frontend, core)
        assert future.result(EVENT_LIMIT_S) == tokens_of([1], 40)


def test_a_closed_client_says_so(frontend: FrontendProcess, core: FakeCore) -> None:
    client = Client(frontend.endpoint)
    core.most_tokens = 3
    request = client.submit([1], max_tokens=40)
    client.close()
    client.close()
    for use in (lambda: client.submit([1]), lambda: client.result(request)):
        with pytest.raises(RuntimeError, match="this client is closed"):
            use()
    client.abort(request)
    with Client(frontend.endpoint) as unused:
        pass
    with pytest.raises(RuntimeError, match="this client is closed"):
        unused.generate("x")


def test_a_closed_async_client_says_so_also_to_who_waits(
    frontend: FrontendProcess, core: FakeCore
) -> None:
    core.most_tokens = 3

    async def run() -> None:
        client = AsyncClient(frontend.endpoint)
        request = await client.submit([1], max_tokens=40)
        waiting = asyncio.create_task(client.result(request, limit_s=EVENT_LIMIT_S))
        await asyncio.sleep(0)  # it has begun to wait
        await client.close()
        await client.close()
        with pytest.raises(RuntimeError, match="this client is closed"):
            await waiting
        with pytest.raises(RuntimeError, match="this client is closed"):
            await client.submit([1])

    asyncio.run(run())


def test_a_second_thread_gets_an_error_and_not_an_abort_of_the_process(
    frontend: FrontendProcess,
) -> None:
    with Client(frontend.endpoint) as client:
        is_held, may_end = threading.Event(), threading.Event()

        def hold() -> None:
            with client._thread:
                is_held.set()
                assert may_end.wait(EVENT_LIMIT_S)

        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(hold)
            assert is_held.wait(EVENT_LIMIT_S)
            try:
                for use in (lambda: client.submit([1]), client.close):
                    with pytest.raises(RuntimeError, match="another thread is using this client"):
                        use()
            finally:
                may_end.set()
            other.result(EVENT_LIMIT_S)
        assert client.generate([1], **GREEDY).token_ids == tokens_of([1], 40)


@pytest.mark.parametrize("ids", [b"abc", ["5"], [1.5], {1, 2}], ids=repr)
def test_what_is_no_list_of_ids_is_a_type_error(frontend: FrontendProcess, ids: object) -> None:
    with Client(frontend.endpoint) as client:
        with pytest.raises(TypeError, match="prompt is neither a string nor a list of token ids"):
            client.generate(ids)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="prompt holds a token id that does not fit"):
            client.generate([2**31])


def test_more_requests_than_a_queue_holds_wait_for_the_next_frontend(
    frontend: FrontendProcess, core: FakeCore
) -> None:
    with Client(frontend.endpoint) as client:
        assert client.generate([1], **GREEDY).token_ids == tokens_of([1], 40)
        frontend.process.kill()
        frontend.process.wait(EVENT_LIMIT_S)
        begun_s = time.monotonic()
        requests = [client.submit([2, n], max_tokens=2, temperature=0.0) for n in range(1020)]
        for request in requests[500:]:
            client.abort(request)
        assert time.monotonic() - begun_s < LONG_S, "no send waits for room"
        frontend.restart(zmq_endpoint=frontend.endpoint)
        frontend.ready()
        frontend.new_core()
        answers = [client.result(request).token_ids for request in requests[:500]]
    assert answers == [tokens_of([2, n], 2) for n in range(500)]
