"""What the server offers around its endpoints: other origins, deadlines, its own description."""

import json
from collections.abc import Iterator

import pytest
from api.fake_core import FakeCore
from api.frontend_process import FrontendProcess

from nvserve.frontend.client import Client
from nvserve.frontend.client_session import RequestError
from nvserve.protocol.messages import FinishReason, Submit

ORIGIN = "https://chat.example"
ASK = {"prompt": [5], "max_tokens": 2}
PREFLIGHT = {"Access-Control-Request-Method": "POST"}


@pytest.fixture(scope="module")
def guarded() -> Iterator[FrontendProcess]:
    process = FrontendProcess(api_key="sesame-open", cors_origins=[ORIGIN])
    try:
        process.ready()
        process.new_core()
        yield process
    finally:
        process.close()


def test_a_preflight_needs_no_key(guarded: FrontendProcess) -> None:
    headers = PREFLIGHT | {"Origin": ORIGIN, "Access-Control-Request-Headers": "x-a, x-b"}
    assert guarded.request("OPTIONS", "/v1/completions", b"", headers)[0] == 204
    assert guarded.last_headers["access-control-allow-origin"] == ORIGIN
    assert guarded.last_headers["access-control-allow-headers"] == "x-a, x-b"
    assert "POST" in guarded.last_headers["access-control-allow-methods"]
    assert "content-length" not in guarded.last_headers


def test_a_preflight_of_another_origin_is_refused(guarded: FrontendProcess) -> None:
    headers = PREFLIGHT | {"Origin": "https://evil.example"}
    assert guarded.request("OPTIONS", "/v1/completions", b"", headers)[0] == 403
    assert "access-control-allow-origin" not in guarded.last_headers


def test_answers_and_errors_and_streams_name_the_origin(guarded: FrontendProcess) -> None:
    for key, body, status in (
        ("Bearer sesame-open", ASK, 200),
        ("Bearer sesame-open", ASK | {"stream": True}, 200),
        ("Bearer sesame-open", {"prompt": ""}, 400),
        ("Bearer wrong", ASK, 401),
    ):
        headers = {"origin": ORIGIN, "authorization": key, "content-type": "application/json"}
        raw = json.dumps(body).encode()
        assert guarded.request("POST", "/v1/completions", raw, headers)[0] == status
        assert guarded.last_headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in guarded.last_headers["access-control-expose-headers"]


def test_without_the_flag_no_origin_is_named(shared: FrontendProcess) -> None:
    shared.post("/v1/completions", ASK, origin=ORIGIN)
    assert "access-control-allow-origin" not in shared.last_headers
    assert shared.request("OPTIONS", "/health", b"", PREFLIGHT | {"Origin": ORIGIN})[0] == 405


def test_a_request_names_its_own_deadline(frontend: FrontendProcess, core: FakeCore) -> None:
    status, _ = frontend.post("/v1/completions", ASK, **{"X-Request-Timeout": "62.5"})
    assert status == 200
    with Client(frontend.endpoint) as client:
        client.generate([5], max_tokens=2, timeout_s=67.0)
    by_http, by_zmq = core.of_type(Submit)
    assert by_http.deadline - by_http.arrival == pytest.approx(62.5)
    assert by_zmq.deadline - by_zmq.arrival == pytest.approx(67.0)


def test_a_deadline_that_passed_is_a_504(frontend: FrontendProcess, core: FakeCore) -> None:
    core.finish_with = FinishReason.DEADLINE
    status, answer = frontend.post("/v1/completions", ASK, **{"X-Request-Timeout": "1"})
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf", "1e9", "1_0", "9" * 5000])
def test_a_deadline_that_is_none_is_refused(shared: FrontendProcess, value: str) -> None:
    status, answer = shared.post("/v1/completions", ASK, **{"X-Request-Timeout": value})
    assert (status, answer["error"]["param"]) == (400, "X-Request-Timeout")


def test_a_deadline_that_is_none_is_refused_over_zmq(shared: FrontendProcess) -> None:
    with Client(shared.endpoint) as client:
        for seconds in (0.0, -1.0, float("nan"), 1e9):
            with pytest.raises(RequestError) as caught:
                client.generate([5], timeout_s=seconds)
            assert caught.value.param == "timeout_s"


def test_embeddings_are_refused_in_words(shared: FrontendProcess) -> None:
    status, answer = shared.post("/v1/embeddings", {"input": "x", "model": "demo"})
    assert status == 400
    assert "embeddings are not supported" in answer["error"]["message"]


def test_every_route_but_health_needs_the_key(guarded: FrontendProcess) -> None:
    key = {"authorization": "Bearer sesame-open"}
    _, raw = guarded.request("GET", "/openapi.json", b"", key)
    for path, operations in json.loads(raw)["paths"].items():
        for method in operations:
            status, _ = guarded.request(method.upper(), path.replace("{name}", "demo"))
            assert (status == 401) == (path not in ("/health", "/ready")), path


def test_the_document_knows_every_route_and_field(shared: FrontendProcess) -> None:
    status, raw = shared.get("/openapi.json")
    assert status == 200
    document = json.loads(raw)
    for path, operations in document["paths"].items():
        for method in operations:
            if "{" not in path:
                wrong = "GET" if method == "post" else "POST"
                assert shared.request(wrong, path)[0] == 405, path
    fields = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "temperature", "stream", "response_format"} <= fields.keys()
    assert not document["components"]["schemas"]["ChatBody"]["additionalProperties"]
    status, answer = shared.post("/v1/completions", ASK | {"no_such_field": 1})
    assert (status, answer["error"]["param"]) == (400, "no_such_field")
