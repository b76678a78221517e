"""Bodies, byte streams and frames that were right once; every one follows from its seed."""

import json
import random
from typing import Any

ODD_VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    10**40,
    1.5,
    -0.0,
    1e308,
    1e-320,
    "",
    "x",
    "a" * 5000,
    "\x00",
    "\u202e\u0301",
    "<|end|>",
    "{{x}}",
    [],
    [[]],
    [None],
    {},
    {"": {}},
    [1, "a"],
    ["a"] * 200,
    [0] * 300,
    {"type": "text"},
    [{"type": "text", "text": "x"}],
    {"1": 1},
    {"a": [{"b": []}]},
]
RAW_PIECES = [
    b"NaN",
    b"1e999",
    b'"\\ud800"',
    b"\xff\xfe",
    b"[" * 3000,
    b'{"a":' * 500,
    b"9" * 400,
    b'"\\u0000"',
    b"{}",
    b"[]",
    b"-",
    b'"',
    b"\\",
    b",",
    b":",
    b"}",
    b"]",
]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
HI = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "To be", "max_tokens": 3}),
    (COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 2, "echo": True, "logprobs": 2}),
    (COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "max_tokens": 2, "stop": ["x"], "seed": 4}),
    (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": 3, "logit_bias": {"5": 3}, "bad_words": ["the king"]},
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}},
    ),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 4, "guided_regex": "[ab]{2,3}"}),
    (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": 4, "structured_outputs": {"choice": ["yes", "no"]}},
    ),
    (
        CHAT,
        {
            "messages": HI,
            "max_tokens": 3,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
        },
    ),
    (CHAT, {"messages": HI, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "stream": True}),
    (CHAT, {"messages": HI, "max_tokens": 4, "response_format": {"type": "json_object"}}),
    (CHAT, {"messages": HI, "max_tokens": 4, "tools": [TOOL], "tool_choice": "auto"}),
    (
        CHAT,
        {
            "messages": [
                *HI,
                {"role": "assistant", "content": [{"type": "text", "text": "y"}]},
                *HI,
            ],
            "max_tokens": 2,
        },
    ),
    ("/tokenize", {"prompt": "a b c"}),
    ("/tokenize", {"messages": HI}),
    ("/detokenize", {"tokens": [5, 6]}),
]


def mutated_body(seed: int) -> tuple[str, bytes]:
    """A path and a body: values replaced, moved and removed, then perhaps bytes broken."""
    draw = random.Random(seed)
    path, good = draw.choice(GOOD)
    body: Any = json.loads(json.dumps(good))
    for _ in range(draw.choice([0, 1, 1, 2, 4])):
        body = _mutate(draw, body)
    raw = json.dumps(body).encode()
    if draw.random() < 0.3:
        raw = broken(draw, raw)
    return path, raw


def broken(draw: random.Random, raw: bytes) -> bytes:
    """The same bytes with pieces cut out, put in, doubled or flipped."""
    for _ in range(draw.choice([1, 1, 2, 5])):
        at = draw.randrange(len(raw) + 1)
        match draw.randrange(5):
            case 0:
                raw = raw[:at] + draw.choice(RAW_PIECES) + raw[at:]
            case 1:
                raw = raw[:at] + raw[at + draw.randrange(1, 9) :]
            case 2:
                raw = raw[:at]
            case 3:
                raw = raw[:at] + bytes([draw.randrange(256)]) + raw[at + 1 :]
            case _:
                raw = raw[:at] + raw[max(0, at - 20) : at] + raw[at:]
    return raw


def _odd(draw: random.Random) -> Any:
    return json.loads(json.dumps(draw.choice(ODD_VALUES)))


def _mutate(draw: random.Random, value: Any) -> Any:
    """Change one place somewhere inside a value."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        match draw.randrange(6):
            case 0:
                del value[key]
            case 1:
                value[key + draw.choice(["", "_", "\x00"])] = _odd(draw)
            case 2:
                _, other = draw.choice(GOOD)
                name = draw.choice(list(other))
                value[name] = json.loads(json.dumps(other[name]))
            case _:
                value[key] = _mutate(draw, value[key])
        return value
    if isinstance(value, list) and value and draw.random() < 0.7:
        place = draw.randrange(len(value))
        value[place] = _mutate(draw, value[place])
        return value
    return _odd(draw)


REQUEST_LINES = [
    b"POST /v1/completions HTTP/1.1",
    b"POST /v1/chat/completions HTTP/1.0",
    b"GET /health HTTP/1.1",
    b"GET /metrics HTTP/1.1",
    b"OPTIONS * HTTP/1.1",
    b"HEAD / HTTP/1.1",
    b"PUT /v1/models HTTP/1.1",
    b"GET /%ff%00/../x HTTP/1.1",
    b"POST /tokenize HTTP/2.0",
    b"PRI * HTTP/2.0",
    b"\x16\x03\x01\x02\x00",
]
HEADERS = [
    b"host: x",
    b"content-type: application/json",
    b"content-length: 37",
    b"content-length: 0",
    b"content-length: -1",
    b"content-length: 99999999999999999999",
    b"transfer-encoding: chunked",
    b"transfer-encoding: gzip, chunked",
    b"expect: 100-continue",
    b"connection: upgrade",
    b"upgrade: websocket",
    b"connection: close",
    b"x-request-timeout: 1",
    b"x: " + b"y" * 20_000,
    b"authorization: Bearer \xff",
    b": empty",
    b"no colon",
    b" folded: x",
    b"x-request-id: a\tb",
]
HTTP_BODIES = [
    b'{"prompt": "a", "max_tokens": 1}     ',
    b"5\r\nhello\r\n0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"",
    b"\r\n" * 50,
]


def raw_stream(seed: int) -> bytes:
    """Something like one or several pipelined HTTP requests."""
    draw = random.Random(seed)
    if draw.random() < 0.1:
        return draw.randbytes(draw.randrange(1, 4000))
    stream = b""
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        headers = draw.sample(HEADERS, draw.randrange(0, 6))
        lines = [draw.choice(REQUEST_LINES), *headers]
        stream += b"\r\n".join(lines) + b"\r\n\r\n" + draw.choice(HTTP_BODIES)
    return broken(draw, stream) if draw.random() < 0.5 else stream
