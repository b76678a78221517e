"""How a frontend ends: drained, or at once, and who has a request in it is told in any case."""

import http.client
import json
from collections.abc import Iterator
from typing import Any, Self

import openai
import pytest
from api.fake_core import EVENT_LIMIT_S, FakeCore, tokens_of
from api.frontend_process import DEMO_MODEL, MODEL_NAME, FrontendProcess
from tokenizers import Tokenizer

from nvserve.frontend.client import Client
from nvserve.frontend.client_session import RequestError
from nvserve.protocol.codec import encode
from nvserve.protocol.control import Drained, Exit, State
from nvserve.protocol.messages import Submit

TOKENIZER = Tokenizer.from_file(f"{DEMO_MODEL}/tokenizer.json")
PROMPT = "To be, or not"


@pytest.fixture
def client(frontend: FrontendProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{frontend.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def test_a_drain_refuses_new_requests_and_waits_for_running_ones(
    frontend: FrontendProcess, core: FakeCore, client: openai.OpenAI
) -> None:
    core.is_held.set()
    stream = client.completions.create(
        model=MODEL_NAME, prompt=PROMPT, max_tokens=5, temperature=0, stream=True
    )
    frontend.drain(60.0)
    frontend.wait_health("draining")
    assert frontend.post("/v1/completions", {"prompt": "x"})[0] == 503
    core.is_held.clear()
    text = TOKENIZER.decode(tokens_of(TOKENIZER.encode(PROMPT).ids, 5))
    assert "".join(chunk.choices[0].text for chunk in stream) == text
    frontend.expect(Drained)


def test_a_drain_ends_what_outlasts_its_timeout_with_an_error(
    frontend: FrontendProcess, core: FakeCore, client: openai.OpenAI
) -> None:
    core.is_held.set()
    stream = client.completions.create(model=MODEL_NAME, prompt=PROMPT, stream=True)
    frontend.drain(0.2)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    frontend.expect(Drained)


@pytest.mark.parametrize(
    ("state", "words"),
    [(State.READY, "the frontend is being restarted"), (State.DRAINING, "shutting down")],
)
def test_a_drain_for_a_restart_says_so_unless_the_server_ends_meanwhile(
    state: State, words: str, frontend: FrontendProcess, core: FakeCore, client: openai.OpenAI
) -> None:
    core.is_held.set()
    stream = client.completions.create(model=MODEL_NAME, prompt=PROMPT, stream=True)
    frontend.tell(state)
    frontend.drain(1.0, is_restart=True)
    frontend.wait_health("draining")
    status, answer = frontend.post("/v1/completions", {"prompt": "x"})
    assert status == 503
    assert words in answer["error"]["message"]
    assert frontend.last_headers["retry-after"]
    with pytest.raises(openai.APIError, match=words):
        list(stream)
    frontend.expect(Drained)


# -- at once ---------------------------------------------------------------------------------------


def asked(frontend: FrontendProcess, **fields: Any) -> http.client.HTTPConnection:
    """A completion that nobody has read anything of."""
    connection = http.client.HTTPConnection("127.0.0.1", frontend.port, timeout=EVENT_LIMIT_S)
    body = json.dumps({"prompt": PROMPT, "max_tokens": 400} | fields)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    return connection


def assert_told(body: bytes) -> None:
    error = json.loads(body)["error"]
    assert error == {
        "message": "the server is shutting down",
        "type": "service_unavailable_error",
        "param": None,
        "code": "aborted",
    }


class Waiting:
    """A plain request and a stream over HTTP, and one over ZMQ."""

    def __init__(self, frontend: FrontendProcess) -> None:
        self.plain, self.stream = asked(frontend), asked(frontend, stream=True)
        self.zmq = Client(frontend.endpoint)
        self.request = self.zmq.submit(PROMPT)

    def assert_told(self) -> None:
        """All but the stream."""
        answer = self.plain.getresponse()
        assert answer.status == 503
        assert_told(answer.read())
        with pytest.raises(RequestError, match="shutting down"):
            list(self.zmq.pieces(self.request))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.plain.close()
        self.stream.close()
        self.zmq.close()


@pytest.mark.parametrize("is_draining", [False, True])
def test_an_exit_tells_everybody_who_waits_at_both_doors(
    is_draining: bool, frontend: FrontendProcess, core: FakeCore
) -> None:
    core.is_held.set()
    with Waiting(frontend) as waiting:
        core.wait_until(lambda core: len(core.running) == 3)
        events = waiting.stream.getresponse()
        assert events.status == 200
        if is_draining:
            frontend.drain(60.0)
            frontend.wait_health("draining")
        frontend.control.send(encode(Exit()))
        waiting.assert_told()
        *_, last, done, _ = events.read().decode().split("\n\n")
        assert_told(last.removeprefix("data: ").encode())
        assert done == "data: [DONE]"
    assert frontend.exit_code() == 0


def test_an_exit_tells_everybody_whom_core_has_not_answered(
    frontend: FrontendProcess, core: FakeCore
) -> None:
    core.is_silent = True
    with Waiting(frontend) as waiting:
        core.wait_until(lambda core: len(core.of_type(Submit)) == 3)
        frontend.control.send(encode(Exit()))
        waiting.assert_told()
        answer = waiting.stream.getresponse()
        assert answer.status == 503
        assert_told(answer.read())
    assert frontend.exit_code() == 0


def test_an_exit_tells_who_still_sends_a_body(frontend: FrontendProcess) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", frontend.port, timeout=EVENT_LIMIT_S)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", "100")
    connection.putheader("expect", "100-continue")  # its answer says that the body is being read
    connection.endheaders()
    assert connection.sock.recv(100).startswith(b"HTTP/1.1 100 ")
    connection.send(b'{"prompt": ')
    frontend.control.send(encode(Exit()))
    answer = connection.getresponse()
    assert answer.status == 503
    assert "shutting down" in json.loads(answer.read())["error"]["message"]
    connection.close()
    assert frontend.exit_code() == 0
