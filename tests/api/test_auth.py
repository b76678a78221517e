"""The API key guards every route but health, at both doors."""

import json
from collections.abc import Iterator

import pytest
from api.frontend_process import FrontendProcess

from nvserve.frontend.client import Client
from nvserve.frontend.client_session import RequestError

KEY = "s3cret-ключ"


@pytest.fixture(scope="module")
def guarded() -> Iterator[FrontendProcess]:
    process = FrontendProcess(api_key=KEY)
    try:
        process.endpoint = process.ready().zmq_endpoint
        process.new_core()
        yield process
    finally:
        process.close()


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer wrong", "Basic s3cret", KEY])
def test_a_wrong_key_is_a_401(guarded: FrontendProcess, given: str) -> None:
    headers = {"authorization": given.encode().decode("latin-1")} if given else {}
    for path in ("/v1/models", "/metrics", "/version"):
        status, body = guarded.request("GET", path, headers=headers)
        assert status == 401
        assert json.loads(body)["error"]["code"] == "invalid_api_key"
    assert guarded.request("POST", "/v1/completions", b"{}", headers)[0] == 401


def test_the_right_key_opens_and_health_needs_none(guarded: FrontendProcess) -> None:
    headers = {"authorization": f"Bearer {KEY}".encode().decode("latin-1")}
    assert guarded.request("GET", "/v1/models", headers=headers)[0] == 200
    assert guarded.get("/health")[0] == 200


def test_the_zmq_door_asks_for_the_key_too(guarded: FrontendProcess) -> None:
    with Client(guarded.endpoint, api_key=KEY) as client:
        assert client.generate("x", max_tokens=2).num_output_tokens == 2
    with (
        Client(guarded.endpoint, api_key="wrong") as stranger,
        pytest.raises(RequestError, match="401"),
    ):
        stranger.generate("x")
