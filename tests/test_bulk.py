"""The dearest bodies and frames of the largest size are refused, and never decoded."""

import functools
import gc
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pytest

from nvserve.frontend.bulk import FREE_BYTES
from nvserve.frontend.errors import ApiError
from nvserve.frontend.exchange import MAX_BODY_BYTES
from nvserve.frontend.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    Tool,
    parse,
    plain_messages,
)
from nvserve.frontend.tools import resolve_tools
from nvserve.frontend.zmq_connection import message_of
from nvserve.protocol.client_messages import (
    MAX_CLIENT_FRAME_BYTES,
    BadClientFrame,
    Submit,
    encode_client,
)

# Of CPU time, in one of some tries: the core may be shared. Decoded they took 0.3 to 2.5 s.
LIMIT_S = 0.25
MAX_IDS = 4096
NUM_TRIES = 5
T = TypeVar("T")
PROMPT = b'{"prompt":"x","%s":'


def cheaply(work: Callable[[], T]) -> T:
    """Its result, once it took little."""
    took_s = []
    for _ in range(NUM_TRIES):
        begun = time.process_time()
        result = work()
        took_s.append(time.process_time() - begun)
        if took_s[-1] < LIMIT_S:
            return result
    raise AssertionError(f"always more than {LIMIT_S} s: {took_s}")


def filled(start: bytes, item: bytes, end: bytes) -> bytes:
    """As many items as the largest body holds."""
    count = (MAX_BODY_BYTES - len(start) - len(end)) // len(item)
    return start + (item * count).rstrip(b",") + end


@functools.cache
def names() -> bytes:
    return b",".join(b'"%d":1' % number for number in range(2_500_000))


def keys(start: bytes, end: bytes) -> bytes:
    return start + names() + end


Make = Callable[[bytes], bytes]  # of a whole body from its start
BODIES: list[tuple[type[Any], str | None, bytes, Make]] = [
    (CompletionBody, "prompt", b'{"prompt":[', lambda start: filled(start, b"[1],", b"]}")),
    (CompletionBody, "prompt", b'{"prompt":[', lambda start: filled(start, b"[],", b"]}")),
    (CompletionBody, "prompt", b'{"prompt":["a",', lambda start: filled(start, b"[],", b"]}")),
    (CompletionBody, "logit_bias", PROMPT % b"logit_bias" + b"{", lambda at: keys(at, b"}}")),
    (CompletionBody, "guided_json", PROMPT % b"guided_json" + b"[",
     lambda start: filled(start, b"{},", b"]}")),
    (CompletionBody, "metadata", PROMPT % b"metadata" + b"{", lambda at: keys(at, b"}}")),
    (CompletionBody, "0", b"{", lambda start: keys(start, b"}")),
    (ChatBody, "tools", b'{"messages":[],"tools":[',
     lambda start: filled(start, b'{"type":""},', b"]}")),
    (ChatBody, "messages", b'{"messages":[',
     lambda start: filled(start, b'{"role":"user","content":""},', b"]}")),
    (ChatBody, "messages", b'{"messages":[{"role":"user","content":[',
     lambda start: filled(start, b'{"type":"text","text":""},', b"]}]}")),
    (ChatBody, "messages", b'{"messages":[{"role":"assistant","tool_calls":[',
     lambda start: filled(start, b'{"id":"","function":{"name":"","arguments":""}},', b"]}]}")),
    (CompletionBody, "prompt", b'{"prompt":[', lambda start: filled(start, b"5,", b"]}")),
    (CompletionBody, "prompt", b'{"prompt":[', lambda start: filled(start, b'"",', b"]}")),
    (CompletionBody, "prompt", b'{"prompt":[', lambda start: filled(start, rb'"\\",', b"]}")),
    (CompletionBody, "prompt", b'{"prompt":[1,', lambda start: filled(start, b'"",', b"]}")),
    (CompletionBody, "prompt", b'{"prompt":[[1],', lambda start: filled(start, b'"[",', b"]}")),
    (CompletionBody, "prompt", b'{"prompt":[',
     lambda start: filled(start, b"[" + b"5," * 20_000 + b"5],", b"]}")),
    (DetokenizeBody, "tokens", b'{"tokens":[', lambda start: filled(start, b"5,", b"]}")),
    (CompletionBody, None, b"{", lambda start: filled(start, b'"prompt":"x",', b"}")),
    (ChatBody, None, b'{"messages":[]', lambda start: filled(start, b"\n", b"}")),
]  # fmt: skip


@pytest.mark.parametrize(("body_type", "param", "start", "make"), BODIES)
def test_what_is_dear_to_decode_is_refused_first(
    body_type: type[Any], param: str | None, start: bytes, make: Make
) -> None:
    raw = make(start)

    def refuse() -> ApiError:
        with pytest.raises(ApiError) as caught:
            plain_messages(parse(body_type, raw, MAX_IDS).messages)
        return caught.value

    error = cheaply(refuse)
    assert (error.status, error.param) == (400, param)


DOCUMENTS: dict[str, tuple[type[Any], Callable[[], Any]]] = {
    "a text": (CompletionBody, lambda: {"prompt": "a[{b" * 1_000_000}),
    "texts": (CompletionBody, lambda: {"prompt": ["[1]" * 10_000] * 100}),
    "lists of ids": (CompletionBody, lambda: {"prompt": [[7] * 1_000] * 1_024}),
    "ids": (CompletionBody, lambda: {"prompt": [7] * 1_000_000, "stop": ["a"], "n": 2}),
    "a message": (ChatBody, lambda: {"messages": [{"role": "user", "content": "[]" * 1_000_000}]}),
    "ids to detokenize": (DetokenizeBody, lambda: {"tokens": [7] * 1_000_000}),
    "all texts": (CompletionBody, lambda: {"prompt": ['"\\', "a, [b]"] * 511 + ["a" * FREE_BYTES]}),
    "all turns": (ChatBody, lambda: {"messages": [{"role": "user", "content": '"a' * 99}] * 8_192}),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_large_bodies_of_text_and_ids_pass(name: str) -> None:
    body_type, make = DOCUMENTS[name]
    document = make()
    raw = json.dumps(document).encode()
    assert len(raw) > FREE_BYTES
    body = parse(body_type, raw, 1_000_000)
    for field, value in document.items():
        assert msgspec.to_builtins(getattr(body, field)) == value


def test_blanks_before_large_texts_are_no_matter() -> None:
    text = "[1]" * FREE_BYTES
    raw = b'{"prompt": [%b"%b",\n%b"b"]}' % (b" " * 200, text.encode(), b"\t" * 200)
    assert parse(CompletionBody, raw, MAX_IDS).prompt == [text, "b"]


def test_fields_beside_the_prompt_are_bounded_together() -> None:
    """Each for itself would be dear enough: a tenth of a second for a MB of small lists."""
    lists = ",".join(["[]"] * (FREE_BYTES // 3 // 3))
    raw = '{"prompt":"x","stop":["a"],"metadata":{"a":"%s"},"guided_json":[%s],"%s":{"json":[%s]}}'
    half = "a" * (FREE_BYTES // 2)
    with pytest.raises(ApiError) as caught:
        parse(CompletionBody, (raw % (half, lists, "structured_outputs", lists)).encode())
    assert caught.value.param == "metadata"
    assert "all fields but prompt" in caught.value.message
    assert parse(CompletionBody, (raw % (half, lists, "structured_outputs", "")).encode()).stop


def test_all_fields_that_may_be_large_are_named() -> None:
    raw = b'{"prompt":"x","model":"%b"}' % (b"a" * FREE_BYTES)
    with pytest.raises(ApiError) as caught:
        parse(TokenizeBody, raw)
    assert caught.value.param == "model"
    assert "all fields but messages and prompt" in caught.value.message


def test_no_garbage_is_looked_for_while_a_body_is_decoded() -> None:
    collections: list[str] = []
    raw = b'{"prompt":"x","guided_json":[%s]}' % b",".join([b"[]"] * 100_000)
    gc.collect()
    gc.callbacks.append(lambda phase, _: collections.append(phase))
    try:
        assert parse(CompletionBody, raw).guided_json
        num_collections = len(collections)
    finally:
        gc.callbacks.pop()
    assert gc.isenabled()
    assert num_collections <= 2  # begin and end of one, once it may be


def test_all_tools_together_hold_only_so_many_parts() -> None:
    schema = {"type": "object", "enum": [[]] * 2_000}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}}
             for i in range(33)]  # fmt: skip
    body = ChatBody(messages=[], tools=msgspec.convert(tools, list[Tool]), tool_choice="none")
    with pytest.raises(ApiError) as caught:
        resolve_tools(body, "", knows_tools=True)
    assert caught.value.param == "tools"
    body.tools = body.tools[:32] if body.tools else None
    assert resolve_tools(body, "", knows_tools=True).mode == "none"


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"prompt":"%s","n":"x"}', "n"),
        (b'{"prompt":"%s","other":1}', "other"),
        (b'{"prompt":["%s",1]}', "prompt"),
        (b'{"prompt":"%s"', None),
    ],
)
def test_a_large_body_has_the_errors_of_a_small_one(raw: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        parse(CompletionBody, raw % (b"a" * FREE_BYTES))
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "params", [b"\x81\xb2structured_outputs\x81\xa4json\xdd%b", b"\x81\xa4stop\xdd%b"]
)
def test_a_frame_of_small_values_is_refused_first(params: bytes) -> None:
    count = MAX_CLIENT_FRAME_BYTES - 200
    values = count.to_bytes(4, "big") + b"\x90" * count
    frame = b"\x84\xa4type\xa6Submit\xa2id\x05\xa6prompt\xa1x\xa6params" + params % values

    def refuse() -> None:
        with pytest.raises(BadClientFrame, match=r"\$\.params"):
            message_of(frame)

    cheaply(refuse)


def test_a_large_frame_of_text_passes() -> None:
    submit = Submit(id=5, prompt="a" * (8 << 20))
    assert message_of(encode_client(submit)) == submit


def test_arguments_of_all_calls_together_are_bounded() -> None:
    """One string each, so that no count of names and values shows what templates decode of them."""
    half = '{"a":[%s]}' % ("[]," * (FREE_BYTES // 6) + "[]")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": half}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    raw = json.dumps({"messages": [turn, turn]}).encode()
    assert len(plain_messages(parse(ChatBody, raw).messages[:1])) == 1
    with pytest.raises(ApiError) as caught:
        plain_messages(parse(ChatBody, raw).messages)
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"
