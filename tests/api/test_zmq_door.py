"""The ZMQ door with our clients: text, ids, many at once, and resuming after a server's death."""

import asyncio
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import msgspec
import pytest
import zmq
from api.fake_core import EVENT_LIMIT_S, FakeCore, tokens_of
from api.frontend_process import DEMO_MODEL, FrontendProcess
from tokenizers import Tokenizer

from nvserve.frontend.client import CONNECT_LIMIT_S, AsyncClient, Client, ServerGone
from nvserve.frontend.client_session import RequestError
from nvserve.protocol.client_messages import (
    CLIENT_PROTOCOL,
    Beat,
    ClientParams,
    Error,
    Hello,
    Submit,
    ToClient,
    ToServer,
    Welcome,
    decode_to_client,
    encode_client,
)
from nvserve.protocol.control import Drained, State
from nvserve.protocol.messages import Finish
from nvserve.protocol.messages import Submit as CoreSubmit

LIMIT_S = 60.0
TOKENIZER = Tokenizer.from_file(f"{DEMO_MODEL}/tokenizer.json")


class Raw:
    """A client without a library: one frame in, one frame out."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    def send(self, message: ToServer) -> None:
        self._socket.send(encode_client(message))

    def receive(self) -> ToClient:
        assert self._socket.poll(int(EVENT_LIMIT_S * 1000)), f"nothing within {EVENT_LIMIT_S} s"
        return decode_to_client(self._socket.recv())

    def receive_word(self) -> ToClient:
        """The next message that is no beat: those come whenever half a second is over."""
        while isinstance(message := self.receive(), Beat):
            pass
        return message

    def close(self) -> None:
        self._context.destroy(linger=0)


def test_text_and_ids_give_the_reference(frontend: FrontendProcess) -> None:
    ids = TOKENIZER.encode("To be").ids
    expected = tokens_of(ids, 12)
    with Client(frontend.endpoint) as client:
        for prompt in ("To be", ids):
            result = client.generate(prompt, max_tokens=12, temperature=0.0)
            assert result.token_ids == expected
            assert result.text == TOKENIZER.decode(expected)
            assert (result.finish_reason, result.num_prompt_tokens) == ("length", len(ids))


def test_streams_of_one_client_run_side_by_side(frontend: FrontendProcess) -> None:
    async def run() -> list[list[int]]:
        async with AsyncClient(frontend.endpoint) as client:
            results = await asyncio.gather(
                *(
                    client.generate([number + 1], max_tokens=30, temperature=0.0)
                    for number in range(50)
                )
            )
            return [result.token_ids for result in results]

    assert asyncio.run(run()) == [tokens_of([number + 1], 30) for number in range(50)]


def test_a_stop_string_ends_a_stream_and_tells_core(
    frontend: FrontendProcess, core: FakeCore
) -> None:
    core.script = TOKENIZER.encode("ABCDEFG", add_special_tokens=False).ids
    with Client(frontend.endpoint) as client:
        result = client.generate("x", max_tokens=50, stop="DEF")
    assert (result.text, result.finish_reason) == ("ABC", "stop")
    core.wait_until(lambda core: bool(core.of_type(Finish)) or not core.running)


def test_the_seed_drawn_is_told_and_gives_the_same_again(frontend: FrontendProcess) -> None:
    with Client(frontend.endpoint) as client:
        first = client.generate([3], max_tokens=5)
        other = client.generate([3], max_tokens=5)
        again = client.generate([3], max_tokens=5, seed=first.seed)
    assert first.seed != other.seed
    assert again.token_ids == first.token_ids == tokens_of([3], 5, first.seed)


@pytest.mark.parametrize("held", [0, 1, 5, 11])
def test_a_client_that_left_goes_on_with_the_ids_it_holds(
    frontend: FrontendProcess, core: FakeCore, held: int
) -> None:
    core.script = TOKENIZER.encode("héllo 한국어 text", add_special_tokens=False).ids
    with Client(frontend.endpoint) as client:
        whole = client.generate([3], max_tokens=30, seed=7)
    texts: list[str] = []
    ids: list[int] = []  # of the pieces taken: the client may have received more
    with Client(frontend.endpoint) as first:
        for piece in first.stream([3], max_tokens=30, seed=7):
            texts.append(piece.text)
            ids += piece.token_ids
            if len(ids) >= held:
                break
    with Client(frontend.endpoint) as second:
        resumed = second.submit([3], max_tokens=30, seed=7, emitted=ids)
        texts += [piece.text for piece in second.pieces(resumed)]
        assert resumed.result().token_ids == whole.token_ids
    assert "".join(texts) == whole.text


@pytest.mark.parametrize("end", ["length", "eos", "stop"])
def test_resuming_with_everything_held_finishes_at_once(
    frontend: FrontendProcess, core: FakeCore, end: str
) -> None:
    core.is_held.set()  # core has no part in this
    ids = TOKENIZER.encode("ABC", add_special_tokens=False).ids
    with Client(frontend.endpoint) as client:
        request = client.submit(
            [3],
            max_tokens=len(ids) if end == "length" else 50,
            stop="BC" if end == "stop" else None,
            emitted=[*ids, 1] if end == "eos" else ids,
        )
        result = client.result(request, limit_s=EVENT_LIMIT_S)
    assert result.finish_reason == ("length" if end == "length" else "stop")
    assert not core.of_type(CoreSubmit)


def restart(frontend: FrontendProcess, core: FakeCore) -> None:
    """From the main thread: a child of a thread dies with that thread."""
    core.wait_until(lambda core: [len(r.output) for r in core.running.values()] == [6] * 4)
    frontend.restart(zmq_endpoint=frontend.endpoint)
    frontend.ready()
    frontend.new_core()


def test_streams_survive_a_new_frontend(frontend: FrontendProcess, core: FakeCore) -> None:
    core.most_tokens = 6

    def run() -> list[tuple[list[int], int]]:
        with Client(frontend.endpoint) as client:
            requests = [client.submit([n + 1], max_tokens=40, temperature=0.0) for n in range(4)]
            return [(client.result(r).token_ids, r.num_submits) for r in requests]

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run)
        restart(frontend, core)
        answers = future.result(EVENT_LIMIT_S)
    assert [token_ids for token_ids, _ in answers] == [tokens_of([n + 1], 40) for n in range(4)]
    assert all(num_submits >= 2 for _, num_submits in answers)


def test_async_streams_survive_a_new_frontend(frontend: FrontendProcess, core: FakeCore) -> None:
    core.most_tokens = 6

    async def run() -> list[list[int]]:
        async with AsyncClient(frontend.endpoint) as client:
            results = await asyncio.gather(
                *(client.generate([n + 1], max_tokens=40, temperature=0.0) for n in range(4)),
            )
            return [result.token_ids for result in results]

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(asyncio.run, run())
        restart(frontend, core)
        assert future.result(EVENT_LIMIT_S) == [tokens_of([n + 1], 40) for n in range(4)]


def test_streams_go_on_when_the_frontend_is_restarted_as_planned(
    frontend: FrontendProcess, core: FakeCore
) -> None:
    """One that runs when the drain begins, and one that comes during it."""
    core.most_tokens = 10

    def run(started: Event) -> list[tuple[list[int], int]]:
        with Client(frontend.endpoint) as client:
            requests = [client.submit([1], max_tokens=40, temperature=0.0)]
            pieces = client.pieces(requests[0])
            next(pieces)
            started.set()
            assert draining.wait(LIMIT_S)
            requests.append(client.submit([2], max_tokens=40, temperature=0.0))
            return [(client.result(r).token_ids, r.num_submits) for r in requests]

    started, draining = Event(), Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run, started)
        assert started.wait(LIMIT_S)
        frontend.drain(1.0, is_restart=True)
        frontend.wait_health("draining")
        draining.set()
        core.wait_until(lambda core: sum(len(r.output) == 10 for r in core.running.values()) == 2)
        frontend.expect(Drained)
        frontend.restart(zmq_endpoint=frontend.endpoint)
        frontend.ready()
        frontend.new_core()
        assert future.result(LIMIT_S) == [(tokens_of([n], 40), 2) for n in (1, 2)]


def test_a_drain_for_a_restart_does_not_wait_for_what_comes_during_it(
    frontend: FrontendProcess, core: FakeCore
) -> None:
    core.is_held.set()
    with Client(frontend.endpoint) as client:
        first = client.submit([1], max_tokens=3)
        core.wait_until(lambda core: len(core.of_type(CoreSubmit)) == 1)
        frontend.drain(60.0, is_restart=True)
        frontend.wait_health("draining")
        client.submit([2], max_tokens=3)
        core.wait_until(lambda core: len(core.of_type(CoreSubmit)) == 2)
        client.abort(first)
        frontend.expect(Drained)  # the second stands still


def test_a_server_that_ends_during_a_restart_ends_streams_over_zmq(
    frontend: FrontendProcess, core: FakeCore
) -> None:
    core.is_held.set()
    with Client(frontend.endpoint) as client:
        requests = [client.submit([1], max_tokens=3)]
        core.wait_until(lambda core: len(core.of_type(CoreSubmit)) == 1)
        frontend.drain(60.0, is_restart=True)
        frontend.wait_health("draining")
        requests.append(client.submit([2], max_tokens=3))
        core.wait_until(lambda core: len(core.of_type(CoreSubmit)) == 2)
        frontend.tell(State.DRAINING)
        frontend.drain(0.1)
        for request in requests:
            with pytest.raises(RequestError, match="503: the server is shutting down"):
                client.result(request, LIMIT_S)
        frontend.expect(Drained)


def test_no_server_is_an_error_within_the_limit() -> None:
    started = time.monotonic()
    with (
        Client("tcp://127.0.0.1:9", connect_limit_s=0.5) as client,
        pytest.raises((ServerGone, TimeoutError)),
    ):
        client.generate("x")

    async def run() -> None:
        async with AsyncClient("tcp://127.0.0.1:9", connect_limit_s=0.5) as client:
            await client.generate("x")

    with pytest.raises((ServerGone, TimeoutError)):
        asyncio.run(run())
    assert time.monotonic() - started < CONNECT_LIMIT_S  # which is that of who names none


def test_errors_name_the_request_and_the_field(frontend: FrontendProcess) -> None:
    with Client(frontend.endpoint) as client:
        running = client.submit([1], max_tokens=30, temperature=0.0)
        for params, param in (({"top_p": 7.0}, "top_p"), ({"max_tokens": 10**6}, "max_tokens")):
            with pytest.raises(RequestError) as caught:
                client.generate("x", **params)
            assert (caught.value.status, caught.value.param) == (400, param)
        with pytest.raises(RequestError, match="emitted: is longer"):
            client.result(client.submit([1], max_tokens=2, emitted=[1, 2, 3]))
        with pytest.raises(RequestError, match="emitted: holds a token id outside"):
            client.result(client.submit([1], max_tokens=9, emitted=[5000]))
        with pytest.raises(TypeError):
            client.submit("x", temprature=1.0)
        assert client.result(running).token_ids == tokens_of([1], 30)


def test_the_protocol_as_documented(frontend: FrontendProcess, core: FakeCore) -> None:
    core.is_held.set()
    raw = Raw(frontend.endpoint)
    try:
        raw.send(Submit(id=1, prompt="before hello"))
        raw.send(Hello(version=99))
        answer = raw.receive()
        assert isinstance(answer, Error)
        assert (answer.id, answer.param) == (None, "version")
        raw.send(Hello(version=CLIENT_PROTOCOL))
        assert isinstance(raw.receive(), Welcome)
        raw.send(Submit(id=4, prompt_ids=b"\x01\0\0"))
        answer = raw.receive()
        assert isinstance(answer, Error)
        assert (answer.id, answer.status) == (4, 400)
        ids = array("i", [1, 2]).tobytes()
        raw.send(Submit(id=5, prompt_ids=ids, params=ClientParams(max_tokens=2, temperature=0.0)))
        assert type(raw.receive_word()).__name__ == "Accepted"
        assert isinstance(raw.receive(), Beat)
        raw.send(Submit(id=5, prompt_ids=ids))
        answer = raw.receive_word()
        assert isinstance(answer, Error)
        assert answer.status == 409
        core.is_held.clear()
        kinds = [type(raw.receive_word()).__name__ for _ in range(3)]
        assert kinds == ["Emit", "Emit", "Finished"]
        assert len(core.of_type(CoreSubmit)) == 1
    finally:
        raw.close()


def test_clients_do_not_see_each_others_requests(frontend: FrontendProcess) -> None:
    with Client(frontend.endpoint) as one, Client(frontend.endpoint) as two:
        first = one.submit([1], max_tokens=20, temperature=0.0)
        second = two.submit([2], max_tokens=20, temperature=0.0)
        assert first.submit.id == second.submit.id
        assert two.result(second).token_ids == tokens_of([2], 20)
        assert one.result(first).token_ids == tokens_of([1], 20)


def test_many_fields_travel_as_maps() -> None:
    frame = encode_client(Submit(id=1, prompt="x", params=ClientParams(seed=3)))
    assert msgspec.msgpack.decode(frame) == {
        "type": "Submit",
        "id": 1,
        "prompt": "x",
        "params": {"seed": 3},
    }
