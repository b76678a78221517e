"""Values and shapes that must be a 400 naming the field, over HTTP and ZMQ alike."""

from typing import Any

import msgspec
import pytest
from api.bad_bodies import BAD_FIELDS, CHAT, COMPLETIONS, HI, TOOL, assert_400
from api.fake_core import FakeCore, tokens_of
from api.frontend_process import FrontendProcess

from nvserve.frontend.client import Client
from nvserve.frontend.client_session import RequestError
from nvserve.protocol.messages import Submit


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


def test_an_echos_scores_hide_no_bad_number_of_others(shared: FrontendProcess) -> None:
    for asked in (-1, 21):
        body = {"prompt": "a", "echo": True, "logprobs": 0, "prompt_logprobs": asked}
        assert_400(shared, COMPLETIONS, body, "prompt_logprobs")


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
ADD = {"type": "function", "function": {"name": "add"}}


def _called(*calls: Any) -> dict[str, Any]:
    return {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": list(calls)}]}


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
    ("guided_json", "", "guided_json"),
    ("structured_outputs", {"json": ""}, "structured_outputs.json"),
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


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"logit_bias": {5.5: 1.0}}, "params.logit_bias"),
        ({"logit_bias": {-5: 1.0}}, "logit_bias"),
        ({"logit_bias": {5: 1.0, "5": 2.0}}, "logit_bias"),
        ({"logit_bias": {"5": "x"}}, "params.logit_bias[...]"),
        ({"structured_outputs": {5: 1}}, "params.structured_outputs"),
        ({"structured_outputs": {"json": {(1, 2): 3}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": msgspec.msgpack.Ext(5, b"")}}, "structured_outputs.json"),
    ],
    ids=["key", "negative", "twice", "value", "name", "tuple", "extension"],
)
def test_what_only_msgpack_can_say_names_its_field(
    shared: FrontendProcess, change: dict[str, Any], param: str
) -> None:
    with Client(shared.endpoint) as client:
        with pytest.raises(RequestError) as caught:
            client.generate("x", **change)
        assert (caught.value.status, caught.value.param) == (400, param)
        assert client.generate([5], max_tokens=2, temperature=0.0).token_ids == tokens_of([5], 2)


@pytest.mark.parametrize("bias", [{5: -100.0, 77: 3}, {"5": -100.0, "77": 3}])
def test_token_ids_of_a_bias_are_numbers_or_their_text(
    frontend: FrontendProcess, core: FakeCore, bias: dict[str | int, float]
) -> None:
    with Client(frontend.endpoint) as client:
        client.generate([5], max_tokens=2, logit_bias=bias)
    [submit] = core.of_type(Submit)
    assert submit.sampling.logit_bias == {5: -100.0, 77: 3.0}


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
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": ""}}},
            "response_format.json_schema.schema",
        ),
        *(
            (
                {"response_format": {"type": kind, "json_schema": {"name": "a", "schema": {}}}},
                "response_format.json_schema",
            )
            for kind in ("json_object", "text")
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tools": [TOOL], "tool_choice": ADD | {"type": "banana"}}, "tool_choice.type"),
        (_called(CALL | {"type": "banana"}), "messages[1].tool_calls[0].type"),
        (_called(CALL | {"id": ""}), "messages[1].tool_calls[0].id"),
        (
            _called(CALL, CALL | {"function": {"name": "", "arguments": "{}"}}),
            "messages[1].tool_calls[1].function.name",
        ),
        ({"messages": [HI[0] | {"tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        ({"messages": [HI[0] | {"refusal": "no"}]}, "messages[0].refusal"),
        ({"messages": [HI[0] | {"reasoning_content": "hm"}]}, "messages[0].reasoning_content"),
        ({"messages": [HI[0] | {"tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
    ids=str,
)
def test_bad_chats(shared: FrontendProcess, change: dict[str, Any], param: str) -> None:
    assert_400(shared, CHAT, {"messages": HI} | change, param)


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


def test_nothing_bad_ever_reached_core(frontend: FrontendProcess, core: FakeCore) -> None:
    for field, value in BAD_FIELDS:
        frontend.post(COMPLETIONS, {"prompt": "x", "max_tokens": 8, field: value})
    assert not core.of_type(Submit)
