"""The dearest bodies and frames of the largest size are refused, and never decoded."""

import json
import time
from typing import Any

import msgspec
import pytest

from nvserve.frontend.bulk import FREE_BYTES
from nvserve.frontend.errors import ApiError
from nvserve.frontend.exchange import MAX_BODY_BYTES
from nvserve.frontend.schema import ChatBody, CompletionBody, DetokenizeBody, parse, plain_messages
from nvserve.frontend.zmq_connection import message_of
from nvserve.protocol.client_messages import (
    MAX_CLIENT_FRAME_BYTES,
    BadClientFrame,
    Submit,
    encode_client,
)

LIMIT_S = 1.0  # of CPU time, on a busy machine; decoded, they took 0.6 to 2.5 s on a quiet one
PROMPT = b'{"prompt":"x","%s":'


def filled(start: bytes, item: bytes, end: bytes) -> bytes:
    """As many items as the largest body holds."""
    count = (MAX_BODY_BYTES - len(start) - len(end)) // len(item)
    return start + (item * count).rstrip(b",") + end


def keys(start: bytes, end: bytes) -> bytes:
    return start + b",".join(b'"%d":1' % number for number in range(2_500_000)) + end


BODIES: list[tuple[type[Any], str, bytes]] = [
    (CompletionBody, "prompt", filled(b'{"prompt":[', b"[1],", b"]}")),
    (CompletionBody, "prompt", filled(b'{"prompt":[', b"[],", b"]}")),
    (CompletionBody, "prompt", filled(b'{"prompt":["a",', b"[],", b"]}")),
    (CompletionBody, "logit_bias", keys(PROMPT % b"logit_bias" + b"{", b"}}")),
    (CompletionBody, "guided_json", filled(PROMPT % b"guided_json" + b"[", b"{},", b"]}")),
    (CompletionBody, "metadata", keys(PROMPT % b"metadata" + b"{", b"}}")),
    (CompletionBody, "0", keys(b"{", b"}")),
    (ChatBody, "tools", filled(b'{"messages":[],"tools":[', b'{"type":""},', b"]}")),
    (ChatBody, "messages", filled(b'{"messages":[', b'{"role":"user","content":""},', b"]}")),
    (ChatBody, "messages", filled(b'{"messages":[{"role":"user","content":[',
                                  b'{"type":"text","text":""},', b"]}]}")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body_type", "param", "raw"), BODIES, ids=[repr(raw[:40]) for _, _, raw in BODIES]
)
def test_what_is_dear_to_decode_is_refused_first(
    body_type: type[Any], param: str, raw: bytes
) -> None:
    begun = time.process_time()
    with pytest.raises(ApiError) as caught:
        plain_messages(parse(body_type, raw).messages)
    assert time.process_time() - begun < LIMIT_S
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("body_type", "document"),
    [
        (CompletionBody, {"prompt": "a[{b" * 1_000_000}),
        (CompletionBody, {"prompt": ["[1]" * 10_000] * 100}),
        (CompletionBody, {"prompt": [[7] * 1_000] * 1_024}),
        (CompletionBody, {"prompt": [7] * 1_000_000, "stop": ["a"], "n": 2}),
        (ChatBody, {"messages": [{"role": "user", "content": "[]" * 1_000_000}]}),
        (DetokenizeBody, {"tokens": [7] * 1_000_000}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_large_bodies_of_text_and_ids_pass(body_type: type[Any], document: Any) -> None:
    raw = json.dumps(document).encode()
    assert len(raw) > FREE_BYTES
    body = parse(body_type, raw)
    for name, value in document.items():
        assert msgspec.to_builtins(getattr(body, name)) == value


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
    begun = time.process_time()
    with pytest.raises(BadClientFrame, match=r"\$\.params"):
        message_of(frame)
    assert time.process_time() - begun < LIMIT_S


def test_a_large_frame_of_text_passes() -> None:
    submit = Submit(id=5, prompt="a" * (8 << 20))
    assert message_of(encode_client(submit)) == submit
