"""Messages that a client sends back as they came: what is null, or read twice, asks for nothing."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from api.bad_bodies import CHAT, HI, TOOL, assert_400
from api.frontend_process import DEMO_MODEL, MODEL_NAME, FrontendProcess
from tokenizers import Tokenizer

TOKENIZER = Tokenizer.from_file(f"{DEMO_MODEL}/tokenizer.json")
NULLS = {"annotations": None, "audio": None, "function_call": None, "of_tomorrow": None}


@pytest.fixture
def client(shared: FrontendProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{shared.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def ask(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL_NAME, messages=messages, max_tokens=20, temperature=0, **more
    )


def test_a_reply_is_taken_as_openais_client_dumps_it(client: openai.OpenAI) -> None:
    messages: list[Any] = list(HI)
    for turn in range(3):
        reply = ask(client, messages).choices[0].message
        dumped = reply.model_dump()
        assert None in dumped.values(), "what this is about"
        messages += [dumped, {"role": "user", "content": f"and {turn}?"}]
    plain = [{"role": turn["role"], "content": turn["content"]} for turn in messages]
    said = [ask(client, turns).choices[0].message.content for turns in (messages, plain)]
    assert said[0] == said[1]


def test_a_call_and_a_stream_are_taken_too(shared: FrontendProcess, client: openai.OpenAI) -> None:
    assert shared.core is not None
    shared.core.script = TOKENIZER.encode('{"a":1}', add_special_tokens=False).ids
    try:
        choice: Any = {"type": "function", "function": {"name": "add"}}
        reply = ask(client, HI, tools=[TOOL], tool_choice=choice).choices[0].message
        called = reply.model_dump()
        answer = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "5"}
        assert ask(client, [*HI, called, answer]).choices[0].message.content == '{"a":1}'
        deltas = [chunk.choices[0].delta for chunk in ask(client, HI, stream=True)]
        text = "".join(delta.content or "" for delta in deltas)
        whole = deltas[0].model_dump() | {"content": text}
        assert whole["function_call"] is None
        assert ask(client, [*HI, whole, *HI]).choices[0].message.content == '{"a":1}'
    finally:
        shared.core.script = None


class Sum(pydantic.BaseModel):
    """What the core is made to answer."""

    a: int


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of that client's own types
def test_a_reply_is_taken_as_openais_client_has_parsed_it(
    shared: FrontendProcess, client: openai.OpenAI
) -> None:
    assert shared.core is not None
    shared.core.script = TOKENIZER.encode('{"a":1}', add_special_tokens=False).ids
    settings: Any = {"model": MODEL_NAME, "messages": HI, "max_tokens": 20}
    tool = openai.pydantic_function_tool(Sum)
    choice: Any = {"type": "function", "function": {"name": "Sum"}}
    try:
        reply: Any = client.chat.completions.parse(**settings, response_format=Sum)
        assert reply.choices[0].message.parsed == Sum(a=1)
        ask(client, [*HI, reply.choices[0].message, *HI])
        with client.chat.completions.stream(**settings, tools=[tool], tool_choice=choice) as stream:
            called: Any = stream.get_final_completion().choices[0].message
        assert called.tool_calls[0].function.parsed_arguments == Sum(a=1)
        answer = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "5"}
        ask(client, [*HI, called, answer])
    finally:
        shared.core.script = None


def test_nulls_are_left_out_wherever_a_message_may_have_fields(shared: FrontendProcess) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"} | NULLS}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"} | NULLS]} | NULLS,
        {"role": "assistant", "content": None, "tool_calls": [call | NULLS]} | NULLS,
        {"role": "tool", "tool_call_id": "1", "content": 'null, "x": null'} | NULLS,
    ]
    status, with_nulls = shared.post("/tokenize", {"messages": turns})
    assert status == 200, with_nulls
    plain = json.loads(json.dumps(turns), object_pairs_hook=_without_nulls)
    assert with_nulls == shared.post("/tokenize", {"messages": plain})[1]


def _without_nulls(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in pairs if value is not None or name == "content"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": [HI[0] | {"annotations": []}]}, "messages[0].annotations"),
        ({"messages": [HI[0] | NULLS, HI[0] | {"audio": {"id": None}}]}, "messages[1].audio"),
        ({"messages": [HI[0] | NULLS | {"role": None}]}, "messages[0].role"),
        ({"messages": [HI[0] | NULLS, None]}, "messages[1]"),
        ({"messages": [HI[0] | {"parsed": 1, "x": 1}]}, "messages[0].x"),
        ({"messages": HI, "parsed": 1}, "parsed"),
        ({"messages": HI, "of_tomorrow": None}, "of_tomorrow"),
        ({"messages": HI, "stream_options": {"of_tomorrow": None}}, "stream_options.of_tomorrow"),
    ],
    ids=str,
)
def test_other_fields_are_refused_as_ever(
    shared: FrontendProcess, change: dict[str, Any], param: str
) -> None:
    assert_400(shared, CHAT, change, param)


def test_a_name_like_the_path_of_a_message_is_only_a_name(shared: FrontendProcess) -> None:
    for body in ({"x ` - at `$.messages[0]": 1}, {"messages": 5, "x ` - at `$.messages[0]": 1}):
        status, answer = shared.post(CHAT, body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


def test_a_long_chat_with_nulls_is_taken(shared: FrontendProcess) -> None:
    text = "many words, " * 200_000
    status, answer = shared.post(CHAT, {"messages": [{"role": "user", "content": text} | NULLS]})
    assert status == 400
    assert "cannot fit" in answer["error"]["message"], "the text is at fault and no field"
