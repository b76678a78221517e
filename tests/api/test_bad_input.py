"""Bodies that must be a 400 naming the field, over HTTP and ZMQ alike, and hurt nobody else."""

import json
import socket
from typing import Any

import msgspec
import pytest
from api.fake_core import FakeCore, tokens_of
from api.frontend_process import FrontendProcess

from nvserve.frontend.client import Client
from nvserve.frontend.client_session import RequestError
from nvserve.protocol.messages import Submit

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CLASS_NAMES = ("Body", "Error:", "Traceback", "Struct", "Params", "msgspec", "`", "dict", "<class")


def assert_400(
    shared: FrontendProcess, path: str, body: Any, param: str | None, status: int = 400
) -> None:
    got, answer = shared.post(path, body)
    error = answer["error"]
    assert (got, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert not any(name in error["message"] for name in CLASS_NAMES), error
    alive, answer = shared.post(
        COMPLETIONS, {"prompt": [5], "max_tokens": 2, "temperature": 0, "return_token_ids": True}
    )
    assert alive == 200
    assert answer["choices"][0]["token_ids"] == tokens_of([5], 2)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([-1], "prompt"),
        ([[-1]], "prompt"),
        ([1024], "prompt"),
        ([2**31], "prompt"),
        ([2**63], "prompt"),
        ([10**400], "prompt"),
        ([1.5], "prompt[0]"),
        ([1.0], "prompt[0]"),
        ([True], "prompt[0]"),
        ([[1], [-1]], "prompt"),
        ([[]], "prompt"),
        ([], "prompt"),
        ("", "prompt"),
        ([""], "prompt"),
        (["ok", ""], "prompt[1]"),
        (["ok", 1], "prompt"),
        (["ok", [1]], "prompt"),
        (None, "prompt"),
        (5, "prompt"),
        ({"a": 1}, "prompt"),
        ([5] * 512, "prompt"),
        (["x"] * 1025, "prompt"),
        ([[[1]]], "prompt[0][0]"),
    ],
)
def test_bad_prompts(shared: FrontendProcess, prompt: Any, param: str) -> None:
    assert_400(shared, COMPLETIONS, {"prompt": prompt}, param)


BAD_FIELDS: list[tuple[str, Any]] = [
    ("logit_bias", {"99999999": 5}),
    ("logit_bias", {"-1": 5}),
    ("logit_bias", {"abc": 5}),
    ("logit_bias", {"1_0": 5}),
    ("logit_bias", {"05": 5}),
    ("logit_bias", {"5": 1, " 5": 2}),
    ("logit_bias", {"5": 1e30}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {str(i): 1 for i in range(2000)}),
    ("max_tokens", -1),
    ("max_tokens", 10**9),
    ("max_tokens", 10**400),
    ("min_tokens", 9),
    ("min_tokens", -1),
    ("temperature", -3),
    ("temperature", 1e308),
    ("top_p", 0),
    ("top_p", -1),
    ("top_p", 1.0001),
    ("top_k", 0),
    ("top_k", -2),
    ("top_k", 2**40),
    ("min_p", 2),
    ("presence_penalty", 1e308),
    ("frequency_penalty", -1e308),
    ("repetition_penalty", 0),
    ("seed", 2**63),
    ("seed", -(10**400)),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["x"] * 17),
    ("stop", ["x"] * 100_000),
    ("stop", "x" * 1_000_000),
    ("stop_token_ids", [1024]),
    ("stop_token_ids", [-1]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [2**40]),
    ("bad_words", [""]),
    ("bad_words", ["x"] * 1000),
    ("priority", 2**31),
    ("cache_salt", "x" * 1000),
]
HTTP_ONLY: list[tuple[str, Any, str]] = [
    ("n", 0, "n"),
    ("n", -1, "n"),
    ("n", 129, "n"),
    ("n", 10**6, "n"),
    ("n", 10**18, "n"),
    ("n", 10**400, "n"),
    ("n", 1.0, "n"),
    ("n", True, "n"),
    ("n", "2", "n"),
    ("best_of", 2, "best_of"),
    ("max_tokens", 2.5, "max_tokens"),
    ("max_tokens", True, "max_tokens"),
    ("logit_bias", {"5": "x"}, "logit_bias[...]"),
    ("logprobs", -1, "logprobs"),
    ("logprobs", 21, "logprobs"),
    ("logprobs", 2_000_000_000, "logprobs"),
    ("stop", 5, "stop"),
    ("stop", [5], "stop[0]"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("stream_options", {"other": True}, "stream_options.other"),
    ("suffix", "x", "suffix"),
    ("response_format", {"type": "xml"}, "response_format.type"),
    ("guided_regex", 5, "guided_regex"),
    ("guided_choice", [5], "guided_choice[0]"),
    ("structured_outputs", {"yaml": "a"}, "structured_outputs.yaml"),
    ("chat_template", "{{ 1 }}", "chat_template"),
    ("tokenize", True, "tokenize"),
    ("temperature", "hot", "temperature"),
    ("user", 5, "user"),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=lambda v: str(v)[:24])
def test_bad_values_name_their_field(shared: FrontendProcess, field: str, value: Any) -> None:
    assert_400(shared, COMPLETIONS, {"prompt": "x", "max_tokens": 8, field: value}, field)


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=lambda v: str(v)[:24])
def test_bad_values_are_refused_over_zmq_too(
    shared: FrontendProcess, field: str, value: Any
) -> None:
    if isinstance(value, int) and abs(value) >= 2**63:
        pytest.skip("msgpack has no such integer")
    with Client(shared.endpoint) as client:
        with pytest.raises(RequestError) as caught:
            client.generate("x", **({"max_tokens": 8} | {field: value}))
        assert (caught.value.status, caught.value.param) == (400, field)
        for number in (float("nan"), float("inf")):
            with pytest.raises(RequestError, match="temperature: must be"):
                client.generate("x", temperature=number)
        assert client.generate([5], max_tokens=2, temperature=0.0).token_ids == tokens_of([5], 2)


@pytest.mark.parametrize(("field", "value", "param"), HTTP_ONLY, ids=lambda v: str(v)[:24])
def test_bad_shapes_name_their_field(
    shared: FrontendProcess, field: str, value: Any, param: str
) -> None:
    assert_400(shared, COMPLETIONS, {"prompt": "x", field: value}, param)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "x", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [*HI, {"role": "tool", "content": "5"}]}, "messages[1].tool_call_id"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 10**400}, "max_completion_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 2_000_000_000}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOL | {"type": "x"}], "tool_choice": "required"}, "tools[0].type"),
        ({"tools": [TOOL, TOOL], "tool_choice": "required"}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [TOOL]}, "tool_choice"),  # auto, without a parser
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice.function.name",
        ),
        (
            {"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"},
            "guided_regex",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
        ),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
    ids=str,
)
def test_bad_chats(shared: FrontendProcess, change: dict[str, Any], param: str) -> None:
    assert_400(shared, CHAT, {"messages": HI} | change, param)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b"\xff\xfe",
        b'{"prompt":"\xff\xfe"}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"\\ud800 and more text behind it"}',
        b'{"prompt":"\\udc00"}',
        b'{"prompt":"x","stop":"\\ud800"}',
        b'{"prompt":"x","model":"\\ud800"}',
        b'{"prompt":"x","temperature":NaN}',
        b'{"prompt":"x","temperature":1e999}',
        b'{"prompt":"x","temperature":Infinity}',
        b"[" * 100_000,
        b'{"prompt":' + b"[" * 100_000,
        b'{"prompt":"x","metadata":' + b'{"a":' * 100_000,
    ],
    ids=lambda raw: repr(raw[:30]),
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_json_object(shared: FrontendProcess, raw: bytes, path: str) -> None:
    status, answer = shared.post(path, raw)
    assert status == 400
    assert not any(name in answer["error"]["message"] for name in CLASS_NAMES), answer


def test_deep_nesting_inside_a_free_field_is_refused(shared: FrontendProcess) -> None:
    raw = b'{"tools":[{"type":"function","function":{"name":"a","parameters":{"a":' + b"[" * 100_000
    status, answer = shared.post(CHAT, raw)
    assert (status, answer["error"]["message"]) == (400, "the body is nested too deeply")


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0},
        {"temperature": -0.0},
        {"temperature": 1e-45},
        {"top_p": 1},
        {"top_k": -1},
        {"logprobs": 0},
        {"stop": None},
        {"stop": []},
        {"n": 1},
        {"user": "u", "metadata": {"a": "b"}, "store": False},
        {"response_format": {"type": "text"}},
        {"temperature": None, "max_tokens": None, "logit_bias": None, "seed": None},
        {"prompt": "\u0000"},
        {"prompt": "\U0001f600"},
        {"logit_bias": {"5": -100}},
    ],
    ids=str,
)
def test_legal_edges_pass(shared: FrontendProcess, change: dict[str, Any]) -> None:
    status, answer = shared.post(COMPLETIONS, {"prompt": "x"} | change)
    assert status == 200, answer


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "status"),
    [(511, 1, 200), (511, 2, 400), (512, 1, 400), (513, 1, 400), (510, 2, 200), (5, 507, 200)],
)
def test_the_context_length_is_exact(
    shared: FrontendProcess, num_prompt: int, max_tokens: int, status: int
) -> None:
    body = {"prompt": [5] * num_prompt, "max_tokens": max_tokens}
    got, answer = shared.post(COMPLETIONS, body)
    assert got == status
    if status == 200:
        assert answer["usage"]["completion_tokens"] == max_tokens
    else:
        assert answer["error"]["code"] == "context_length_exceeded"


def test_the_default_of_max_tokens_is_cut_to_the_room_left(shared: FrontendProcess) -> None:
    _, answer = shared.post(COMPLETIONS, {"prompt": [5] * 505})
    assert answer["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": HI}, "prompt"),
        ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "x", "other": 1}, "other"),
    ],
    ids=str,
)
def test_bad_bodies_to_tokenize(shared: FrontendProcess, body: Any, param: str) -> None:
    assert_400(shared, "/tokenize", body, param)


def test_ids_to_detokenize_are_bounded(shared: FrontendProcess) -> None:
    for tokens in ([-1], [1024], [2**70], [5] * 513):
        assert_400(shared, "/detokenize", {"tokens": tokens}, "tokens")
    assert shared.post("/detokenize", {"tokens": [5] * 512})[0] == 200


def test_a_wrong_model_is_a_404(shared: FrontendProcess) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HI})):
        status, answer = shared.post(path, body | {"model": "gpt-x"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_an_absurd_text_is_refused_before_it_is_tokenized(shared: FrontendProcess) -> None:
    status, answer = shared.post(COMPLETIONS, {"prompt": "a " * 2_500_000})
    assert status == 400
    assert "cannot fit in 512 tokens" in answer["error"]["message"]


def test_content_types(shared: FrontendProcess) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    for kind, status in (
        ("", 415),
        ("text/plain", 415),
        ("application/json; charset=utf-16", 415),
        ("application/json; charset=UTF-8", 200),
        ("application/json", 200),
    ):
        headers = {"content-type": kind} if kind else {}
        assert shared.request("POST", COMPLETIONS, body, headers)[0] == status


# -- raw bytes -------------------------------------------------------------------------------------


def exchange(shared: FrontendProcess, *parts: bytes, limit_s: float = 10.0) -> bytes:
    """Send raw bytes, and read until the server closes."""
    with socket.create_connection(("127.0.0.1", shared.port), timeout=limit_s) as connection:
        try:
            for part in parts:
                connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused while we were still sending
        answer = b""
        while chunk := _received(connection):
            answer += chunk
        return answer


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except ConnectionResetError:
        return b""


POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def test_a_body_announced_too_large_is_a_413_before_it_is_sent(shared: FrontendProcess) -> None:
    assert exchange(shared, POST + b"content-length: 3000000000\r\n\r\n").startswith(
        b"HTTP/1.1 413 "
    )


def test_a_chunked_body_without_end_is_a_413(shared: FrontendProcess) -> None:
    chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
    answer = exchange(shared, POST + b"transfer-encoding: chunked\r\n\r\n", *[chunk] * 40)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "headers",
    [b"a: " + b"x" * 70_000, b"a: b\r\n" * 30_000, b"a" * 70_000],
    ids=["one", "many", "endless"],
)
def test_huge_headers_are_a_431(shared: FrontendProcess, headers: bytes) -> None:
    answer = exchange(shared, b"GET /health HTTP/1.1\r\nhost: x\r\n" + headers, b"\r\n\r\n")
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")


def test_a_huge_path_is_a_431(shared: FrontendProcess) -> None:
    answer = exchange(shared, b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ")


def test_garbage_is_a_400_in_openais_form(shared: FrontendProcess) -> None:
    answer = exchange(shared, b"\x00\x01\x02 not http\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"error"' in answer


def test_pipelined_requests_are_answered_in_order(shared: FrontendProcess) -> None:
    body = b'{"prompt":[9],"max_tokens":3,"temperature":0}'
    one = POST + b"content-length: %d\r\n\r\n" % len(body) + body
    last = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    answer = exchange(shared, one + one + last)
    assert answer.count(b"HTTP/1.1 200 ") == 3
    assert answer.rfind(b'"text_completion"') < answer.find(b'"version"')


def test_expect_continue_and_http_1_0(shared: FrontendProcess) -> None:
    body = b'{"prompt":[9],"max_tokens":1}'
    head = POST + b"connection: close\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
    answer = exchange(shared, head % len(body) + body)
    assert answer.startswith(b"HTTP/1.1 100 ")
    assert b"HTTP/1.1 200 " in answer
    assert b" 200 " in exchange(shared, b"GET /health HTTP/1.0\r\n\r\n")
    streaming = b'{"prompt":[9],"stream":true}'
    old = POST.replace(b"HTTP/1.1", b"HTTP/1.0")
    answer = exchange(shared, old + b"content-length: %d\r\n\r\n" % len(streaming) + streaming)
    assert b" 400 " in answer.splitlines()[0]


def test_zmq_garbage_is_dropped_or_answered_and_hurts_nobody(shared: FrontendProcess) -> None:
    frames = [b"", b"\xc1", b"x" * 1000, msgspec.msgpack.encode({"type": "Submit", "id": "x"})]
    with Client(shared.endpoint) as client:
        client.generate([5], max_tokens=1)
        assert client._link is not None
        for frame in frames:
            client._link.socket.send(frame)
            with pytest.raises(RequestError, match="400"):
                client.generate([5], max_tokens=1)
        assert client.generate([5], max_tokens=2, temperature=0.0).token_ids == tokens_of([5], 2)


def test_nothing_bad_ever_reached_core(frontend: FrontendProcess, core: FakeCore) -> None:
    for field, value in BAD_FIELDS:
        frontend.post(COMPLETIONS, {"prompt": "x", "max_tokens": 8, field: value})
    assert not core.of_type(Submit)
