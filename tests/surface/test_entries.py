"""Every input of A01 to A18 of the list of public bug reports, on a whole server, at both doors.

A line of a table is what is sent and the field that its 400 must name, or None where it is legal.
Behind each table the server is as it was: the same text, all blocks free, the same processes.
"""

import concurrent.futures
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from process.server import Server
from surface.asking import PLAIN, Asker
from tokenizers import Tokenizer

from nvserve.frontend.client import Client
from nvserve.protocol.client_messages import (
    Accepted,
    Beat,
    Emit,
    Error,
    Finished,
    Hello,
    Welcome,
    decode_to_client,
    encode_client,
)
from nvserve.scripts.model_facts import DEMO_MODEL

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
VOCAB = 1024
MAX_LEN = 128
TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
INTERNALS = ("Body", "Error:", "Traceback", "Struct", "Params", "msgspec", "<class", "object at")
ANSWER_LIMIT_MS = 60_000
NUM_ROUNDS = 5  # this machine may be busy in one of them, but not in all

Case = tuple[dict[str, Any], str | None]


@pytest.fixture(scope="module")
def target() -> Iterator[Asker]:
    """A short context, whose borders requests can reach."""
    server = Server.launch(
        *("--spares", "0", "--zmq-port", "0", "--num-kv-blocks", "100"),
        *("--max-model-len", str(MAX_LEN)),
    )
    try:
        yield Asker(server, server.wait_ready())
    finally:
        server.close()


class Dealer:
    """A client of the ZMQ door that sends what no library would."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._socket.send(encode_client(Hello(version=1)))
        assert isinstance(self._receive(), Welcome)
        self._next_id = 0

    def ask(
        self, fields: dict[str, Any], changed: dict[bytes, bytes] | None = None
    ) -> tuple[Error | Finished, list[int], str]:
        """Its last message, and the ids and text before it; `changed` bytes of the frame."""
        self._next_id += 1
        frame = msgspec.msgpack.encode({"type": "Submit", "id": self._next_id, **fields})
        for before, after in (changed or {}).items():
            assert frame.count(before) == 1
            frame = frame.replace(before, after)
        self._socket.send(frame)
        ids: list[int] = []
        text = ""
        while True:
            message = self._receive()
            match message:
                case Error() | Finished():
                    assert message.id == self._next_id
                    return message, ids, text
                case Emit():
                    ids += memoryview(message.tokens).cast("i").tolist()
                    text += message.text
                case _:
                    assert isinstance(message, Accepted | Beat)

    def _receive(self) -> Any:
        assert self._socket.poll(ANSWER_LIMIT_MS), "no answer over ZMQ"
        return decode_to_client(self._socket.recv())

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def dealer(target: Asker) -> Iterator[Dealer]:
    made = Dealer(target.zmq_endpoint)
    try:
        yield made
    finally:
        made.close()


def shown(value: Any) -> str:
    return repr(value)[:150]


def try_over_http(target: Asker, path: str, base: dict[str, Any], cases: list[Case]) -> None:
    """Each case in both forms, whole and streamed: one status line, before any event."""
    for change, param in cases:
        for is_stream in (False, True):
            body = base | change | ({"stream": True} if is_stream else {})
            status, answer = target.post(path, body)
            if param is None:
                assert status == 200, (shown(change), answer[:300])
                continue
            assert status == 400, (shown(change), status, answer[:300])
            check_error(json.loads(answer)["error"], param, change)
    target.check_alive()
    assert "Traceback" not in target.server.text


def check_error(error: dict[str, Any], param: str, change: Any) -> None:
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, (shown(change), error)
    assert len(error["message"]) < 1000
    assert not any(name in error["message"] for name in INTERNALS), error


def try_over_zmq(target: Asker, dealer: Dealer, base: dict[str, Any], cases: list[Case]) -> None:
    """Each case as a Submit; `params` of the case are added to those of the base."""
    for change, param in cases:
        fields = base | change | {"params": base.get("params", {}) | change.get("params", {})}
        last, _, _ = dealer.ask(fields)
        if param is None:
            assert isinstance(last, Finished), (shown(change), last)
            continue
        assert isinstance(last, Error), (shown(change), last)
        assert last.status == 400, (shown(change), last)
        # What has the wrong type is named with its place in the message.
        assert last.param in (param, f"params.{param}"), (shown(change), last)
        assert not any(name in last.message for name in INTERNALS), last
    target.check_alive()
    assert "Traceback" not in target.server.text


def with_params(cases: list[Case]) -> list[Case]:
    """The same fields in a Submit's params; what msgpack cannot carry is left out."""
    made: list[Case] = []
    for change, param in cases:
        try:
            msgspec.msgpack.encode(change)
        except OverflowError:
            continue
        made.append(({"params": change}, param))
    return made


def ids(*token_ids: int) -> bytes:
    return b"".join(token_id.to_bytes(4, "little", signed=True) for token_id in token_ids)


# -- A01 to A03: prompts ---------------------------------------------------------------------------

PROMPTS: list[Case] = [
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [[-1]]}, "prompt"),
    ({"prompt": [VOCAB]}, "prompt"),
    ({"prompt": [2**31]}, "prompt"),
    ({"prompt": [2**63]}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [[1], [-1]]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": ["ok", ""]}, "prompt[1]"),
    ({"prompt": [VOCAB - 1]}, None),
    ({"prompt": [0]}, None),
]
ZMQ_PROMPTS: list[Case] = [
    ({"prompt_ids": ids(-1)}, "prompt"),
    ({"prompt_ids": ids(1, VOCAB)}, "prompt"),
    ({"prompt_ids": ids(2**31 - 1)}, "prompt"),
    ({"prompt_ids": ids(-(2**31))}, "prompt"),
    ({"prompt_ids": b"\1\0\0"}, "prompt_ids"),
    ({"prompt_ids": b""}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": "a", "prompt_ids": ids(1)}, "prompt"),
    ({"prompt_ids": [1]}, "prompt_ids"),
    ({"prompt_ids": 1.5}, "prompt_ids"),
    ({"prompt": True}, "prompt"),
    ({"prompt": ["a"]}, "prompt"),
    ({"prompt": "a", "emitted": ids(-1)}, "emitted"),
    ({"prompt": "a", "emitted": ids(VOCAB)}, "emitted"),
    ({"prompt": "a", "emitted": b"\1"}, "emitted"),
    ({"prompt_ids": ids(VOCAB - 1)}, None),
]


def test_a01_a03_prompts_while_others_run(target: Asker, dealer: Dealer) -> None:
    good = PLAIN | {"max_tokens": 60, "ignore_eos": True}
    expected = target.complete(**good)["choices"][0]["text"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = [pool.submit(target.complete, **good) for _ in range(4)]
        try_over_http(target, COMPLETIONS, {"max_tokens": 2}, PROMPTS)
        try_over_zmq(target, dealer, {"params": {"max_tokens": 2}}, ZMQ_PROMPTS)
        try_over_http(target, CHAT, {"max_tokens": 2}, [({"messages": []}, "messages")])
        assert {one.result(60)["choices"][0]["text"] for one in running} == {expected}
    target.check_alive()


# -- A02, A06 to A08, A17: sampling and limits -----------------------------------------------------

BIASES: list[Case] = [
    ({"logit_bias": {"99999999": 5}}, "logit_bias"),
    ({"logit_bias": {str(VOCAB): 5}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"abc": 5}}, "logit_bias"),
    ({"logit_bias": {"5": 1e30}}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias[...]"),
    ({"logit_bias": {str(i): 1 for i in range(50_000)}}, "logit_bias"),
    ({"logit_bias": {str(VOCAB - 1): 100, "0": -100}}, None),
    ({"logit_bias": {}}, None),
]
SAMPLING: list[Case] = [
    ({"temperature": -3}, "temperature"),
    ({"temperature": 1e308}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": -1}, "top_p"),
    ({"top_p": 1.0001}, "top_p"),
    ({"top_p": 7}, "top_p"),
    ({"top_k": 0}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**40}, "top_k"),
    ({"top_k": 10**4000}, "top_k"),
    ({"stop_token_ids": [10**4000]}, "stop_token_ids"),
    ({"min_p": 2}, "min_p"),
    ({"min_p": -1}, "min_p"),
    ({"presence_penalty": 1e308}, "presence_penalty"),
    ({"presence_penalty": -1e308}, "presence_penalty"),
    ({"frequency_penalty": 1e308}, "frequency_penalty"),
    ({"frequency_penalty": -1e308}, "frequency_penalty"),
    ({"repetition_penalty": 1e308}, "repetition_penalty"),
    ({"repetition_penalty": -1e308}, "repetition_penalty"),
    ({"temperature": 0}, None),
    ({"temperature": -0.0}, None),
    ({"temperature": 1e-45}, None),
    ({"top_p": 1}, None),
    ({"top_p": 1e-45}, None),
    ({"top_k": -1}, None),
    ({"min_p": 1}, None),
]
NOT_FINITE = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
STOPS: list[Case] = [
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop[0]"),
    ({"stop": ["x"] * 1000}, "stop"),
    ({"stop": ["x"] * 100_000}, "stop"),
    ({"stop": "x" * 1_000_000}, "stop"),
    ({"stop": []}, None),
    ({"stop": None}, None),
    ({"stop": ["x" * 1024] * 16}, None),
]
MAX_TOKENS: list[Case] = [
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": "2"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"max_tokens": 10**18}, "max_tokens"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"max_tokens": None}, None),
    ({}, None),
]


def renamed(cases: list[Case], name: str) -> list[Case]:
    """The same values for another field."""
    return [({name: next(iter(case.values()))}, param and name) for case, param in cases if case]


@pytest.mark.parametrize("cases", [BIASES, SAMPLING, STOPS], ids=["a02", "a07", "a17"])
def test_fields_of_all_doors(target: Asker, dealer: Dealer, cases: list[Case]) -> None:
    try_over_http(target, COMPLETIONS, {"prompt": "x", "max_tokens": 2}, cases)
    try_over_http(target, CHAT, {"messages": HI, "max_tokens": 2}, cases)
    over_zmq = with_params(cases)
    try_over_zmq(target, dealer, {"prompt": "x", "params": {"max_tokens": 2}}, over_zmq)


def test_a02_a_bad_bias_beside_eight_good_requests(target: Asker, dealer: Dealer) -> None:
    good = PLAIN | {"max_tokens": 40, "ignore_eos": True}
    expected = target.complete(**good)["choices"][0]["text"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = [pool.submit(target.complete, **good) for _ in range(8)]
        try_over_zmq(target, dealer, {"prompt": "x"}, with_params(BIASES[:2]))
        assert {one.result(60)["choices"][0]["text"] for one in running} == {expected}


@pytest.mark.parametrize("number", ["NaN", "1e999", "-1e999", "Infinity"])
def test_a07_numbers_that_are_not_finite(target: Asker, dealer: Dealer, number: str) -> None:
    for name in NOT_FINITE:
        raw = f'{{"prompt":"x","messages":[],"{name}":{number}}}'.encode()
        for path, cut in ((COMPLETIONS, b'"messages":[],'), (CHAT, b'"prompt":"x",')):
            status, answer = target.post(path, raw.replace(cut, b""))
            assert status == 400, answer
        last, _, _ = dealer.ask({"prompt": "x", "params": {name: float(number)}})
        assert isinstance(last, Error)
        assert (last.status, last.param) == (400, name)
    target.check_alive()


def test_a06_max_tokens_at_every_door(target: Asker, dealer: Dealer) -> None:
    base = {"prompt": "x"}
    try_over_http(target, COMPLETIONS, base, [*MAX_TOKENS, ({"max_tokens": 0}, None)])
    try_over_http(target, CHAT, {"messages": HI}, [*MAX_TOKENS, ({"max_tokens": 0}, "max_tokens")])
    name = "max_completion_tokens"
    zero: Case = ({name: 0}, name)
    try_over_http(target, CHAT, {"messages": HI}, [*renamed(MAX_TOKENS, name), zero])
    unknown: list[Case] = [({name: 1}, name)]
    try_over_http(target, COMPLETIONS, base, unknown)
    over_zmq = with_params([*MAX_TOKENS, ({"max_tokens": 0}, None)])
    try_over_zmq(target, dealer, base, over_zmq)


@pytest.mark.parametrize("count", [1, 2])
def test_a06_one_and_two_give_exactly_so_many(target: Asker, dealer: Dealer, count: int) -> None:
    rest = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    for name, path, start in (
        ("max_tokens", COMPLETIONS, {"prompt": "x"}),
        ("max_tokens", CHAT, {"messages": HI}),
        ("max_completion_tokens", CHAT, {"messages": HI}),
    ):
        body = {**start, name: count, **rest}
        status, raw = target.post(path, body)
        assert status == 200
        answer = json.loads(raw)
        assert answer["usage"]["completion_tokens"] == count
        assert len(answer["choices"][0]["token_ids"]) == count
        assert answer["choices"][0]["finish_reason"] == "length"
        events = target.events(path, body)
        streamed = [c.get("token_ids") or [] for event in events for c in event["choices"]]
        assert sum(map(len, streamed)) == count
    params = {"max_tokens": count, "ignore_eos": True}
    last, token_ids, _ = dealer.ask({"prompt": "x", "params": params})
    assert isinstance(last, Finished)
    assert (last.finish_reason, last.num_output_tokens, len(token_ids)) == ("length", count, count)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "is_legal"),
    [
        (MAX_LEN - 2, 2, True),
        (MAX_LEN - 1, 1, True),
        (MAX_LEN - 1, 2, False),
        (MAX_LEN, 1, False),
        (MAX_LEN, 2, False),
        (MAX_LEN + 1, 1, False),
        (MAX_LEN + 1, 2, False),
    ],
)
def test_a06_the_borders_of_the_context(
    target: Asker, dealer: Dealer, num_prompt: int, max_tokens: int, is_legal: bool
) -> None:
    prompt = [5 + i % 900 for i in range(num_prompt)]
    params = {"max_tokens": max_tokens, "ignore_eos": True}
    status, raw = target.post(COMPLETIONS, {"prompt": prompt, **params})
    last, _, _ = dealer.ask({"prompt_ids": ids(*prompt), "params": params})
    if is_legal:
        assert status == 200
        assert json.loads(raw)["usage"]["completion_tokens"] == max_tokens
        assert isinstance(last, Finished)
        assert last.num_output_tokens == max_tokens
    else:
        assert (status, json.loads(raw)["error"]["code"]) == (400, "context_length_exceeded")
        assert isinstance(last, Error)
        assert (last.status, last.code) == (400, "context_length_exceeded")
    target.check_alive()


def test_a08_logprobs_over_the_limit(target: Asker, dealer: Dealer) -> None:
    counts = (-1, 21, VOCAB + 1, 2_000_000_000)
    for name in ("logprobs", "prompt_logprobs"):
        bad: list[Case] = [({name: count}, name) for count in counts]
        legal: list[Case] = [({name: count}, None) for count in (0, 20)]
        cases: list[Case] = bad + (legal if name == "logprobs" else [])
        streamable = {"prompt": "x", "max_tokens": 2}
        if name == "logprobs":
            try_over_http(target, COMPLETIONS, streamable, cases)
        for change, param in bad if name == "prompt_logprobs" else []:
            assert target.refusal(COMPLETIONS, streamable | change)["param"] == param
        try_over_zmq(target, dealer, {"prompt": "x"}, with_params(bad + legal))
    top = "top_logprobs"
    base = {"messages": HI, "max_tokens": 2}
    tops: list[Case] = [({"logprobs": True, top: count}, top) for count in counts]
    tops += [({"logprobs": True, top: count}, None) for count in (0, 20)]
    tops += [({top: 2}, top), ({"logprobs": False, top: 2}, top), ({"logprobs": 5}, "logprobs")]
    try_over_http(target, CHAT, base, tops)


def test_a08_zero_reports_the_chosen_token_alone(target: Asker) -> None:
    plain = target.complete(prompt="x", max_tokens=3, logprobs=0)["choices"][0]["logprobs"]
    assert len(plain["token_logprobs"]) == 3
    assert all(len(tops or {}) <= 1 for tops in plain["top_logprobs"] or [])
    chat = target.chat("x", max_tokens=3, logprobs=True, top_logprobs=0)["choices"][0]["logprobs"]
    assert [entry["top_logprobs"] for entry in chat["content"]] == [[], [], []]
    with Client(target.zmq_endpoint) as client:
        entries = client.generate("x", max_tokens=3, logprobs=0, ignore_eos=True).logprobs
    assert entries is not None
    assert [entry.top_ids for entry in entries] == [(), (), ()]


# -- A04: scores only ------------------------------------------------------------------------------


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 1])
def test_a04_no_output_tokens(target: Asker, echo: bool, logprobs: int | None) -> None:
    body = {"prompt": "a b c", "echo": echo, "max_tokens": 0, "logprobs": logprobs}
    num_prompt = len(TOKENIZER.encode("a b c").ids)
    answer = target.complete(**body)
    assert answer["choices"][0]["text"] == ("a b c" if echo else "")
    assert answer["choices"][0]["finish_reason"] == "length"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, 0)
    events = target.events(COMPLETIONS, body | {"stream_options": {"include_usage": True}})
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == ("a b c" if echo else "")
    assert choices[-1]["finish_reason"] == "length"
    assert events[-1]["usage"] == usage
    target.check_alive()


@pytest.mark.parametrize("scores", [None, 0, 1])
def test_a04_no_output_tokens_over_zmq(target: Asker, dealer: Dealer, scores: int | None) -> None:
    params = {"max_tokens": 0, "prompt_logprobs": scores}
    last, token_ids, text = dealer.ask({"prompt": "a b c", "params": params})
    assert isinstance(last, Finished)
    assert (last.num_output_tokens, token_ids, text) == (0, [], "")
    assert last.finish_reason == "length"
    target.check_alive()


BAD_FORMS: list[Case] = [
    ({"structured_outputs": {"regex": "(("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": {"type": "x"}}}, "structured_outputs.json"),
]


def test_a10_a_bad_grammar_is_refused_without_output_too(target: Asker, dealer: Dealer) -> None:
    good: list[Case] = [({"structured_outputs": {"regex": "a+"}}, None)]
    for more in ({}, {"echo": True}):
        base = {"prompt": "a b c", "max_tokens": 0, **more}
        try_over_http(target, COMPLETIONS, base, BAD_FORMS + good)
    answer = target.complete(prompt="a", max_tokens=0, guided_regex="a+")
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("", 0)
    base = {"prompt": "a b c", "params": {"max_tokens": 0}}
    try_over_zmq(target, dealer, base, with_params(BAD_FORMS + good))


# -- A05: fan-out ----------------------------------------------------------------------------------

FAN_OUT: list[Case] = [
    ({name: value}, name)
    for name in ("n", "best_of")
    for value in (0, -1, 129, 10**6, 10**18, 1.0, True, "2")
]
FAN_OUT += [({"prompt": ["a"] * 100_000, "n": 8}, "prompt"), ({"prompt": ["a"] * 129, "n": 8}, "n")]


def rss_mb(pid: int) -> float:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * 4096 / 1e6


def test_a05_fan_out_is_bounded(target: Asker, dealer: Dealer) -> None:
    pids = [target.pids["frontend"], target.pids["core"]]
    try_over_http(target, COMPLETIONS, {"prompt": "x", "max_tokens": 2}, FAN_OUT)
    before = [rss_mb(pid) for pid in pids]
    over_chat = [(change, param) for change, param in FAN_OUT if "prompt" not in change]
    try_over_http(target, CHAT, {"messages": HI, "max_tokens": 2}, over_chat)
    over_zmq: list[Case] = [({"params": {name: 2}}, name) for name in ("n", "best_of")]
    try_over_zmq(target, dealer, {"prompt": "x"}, over_zmq)
    found: list[tuple[float, float]] = []
    while not any(refusal_s < 0.1 and health_s < 0.2 for refusal_s, health_s in found):
        assert len(found) < NUM_ROUNDS, f"medians of refusals and of /health: {found}"
        found.append(waits_of_fan_out(target))
    assert [now - then < 30 for now, then in zip(map(rss_mb, pids), before, strict=True)] == [
        True,
        True,
    ]


def waits_of_fan_out(target: Asker) -> tuple[float, float]:
    """The median seconds until a refusal, and until /health is there meanwhile."""
    health: list[float] = []
    refusals: list[float] = []
    for change, _ in FAN_OUT:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            asked = pool.submit(timed, target, "POST", COMPLETIONS, {"prompt": "x"} | change)
            health.append(timed(target, "GET", "/health", None))
            refusals.append(asked.result(60))
    return sorted(refusals)[len(refusals) // 2], sorted(health)[len(health) // 2]


def timed(target: Asker, method: str, path: str, body: Any) -> float:
    """Seconds until the answer is there."""
    raw = b"" if body is None else json.dumps(body).encode()
    begun = time.monotonic()
    target.request(method, path, raw, {"content-type": "application/json"})
    return time.monotonic() - begun


# -- A09: text that is none ------------------------------------------------------------------------

CALL = '{"role":"assistant","content":null,"tool_calls":[{"id":"1","function":%s}]}'
LONE: list[tuple[str, str]] = [
    (COMPLETIONS, r'{"prompt":"\ud800"}'),
    (COMPLETIONS, r'{"prompt":["a","\udfff"]}'),
    (COMPLETIONS, r'{"prompt":"x","stop":"\ud800"}'),
    (COMPLETIONS, r'{"prompt":"x","stop":["\ud800"]}'),
    (COMPLETIONS, r'{"prompt":"x","model":"\ud800"}'),
    (COMPLETIONS, r'{"prompt":"x","cache_salt":"\ud800"}'),
    (COMPLETIONS, r'{"prompt":"x","guided_regex":"\ud800"}'),
    (COMPLETIONS, r'{"prompt":"x","guided_json":"\ud800"}'),
    (COMPLETIONS, r'{"prompt":"x","guided_json":{"const":"\ud800"}}'),
    (COMPLETIONS, r'{"prompt":"x","bad_words":["\ud800"]}'),
    (COMPLETIONS, r'{"prompt":"x","user":"\ud800"}'),
    (COMPLETIONS, r'{"prompt":"x","\ud800":1}'),
    (CHAT, r'{"messages":[{"role":"user","content":"\ud800"}]}'),
    (CHAT, r'{"messages":[{"role":"user","content":[{"type":"text","text":"\ud800"}]}]}'),
    (CHAT, r'{"messages":[{"role":"\ud800","content":"a"}]}'),
    (CHAT, r'{"messages":[{"role":"user","content":"a"}],"model":"\ud800"}'),
    (CHAT, r'{"messages":[{"role":"tool","content":"a","tool_call_id":"\ud800"}]}'),
    (CHAT, r'{"messages":[%s]}' % (CALL % r'{"name":"f","arguments":"\ud800"}')),
    (CHAT, r'{"messages":[%s]}' % (CALL % r'{"name":"\ud800","arguments":"{}"}')),
]
BAD_UTF8 = [b"\xff\xfe", b'{"prompt":"\xff\xfe"}', b'{"prompt":"\xed\xa0\x80"}']


@pytest.mark.parametrize("is_stream", [False, True])
def test_a09_lone_surrogates(target: Asker, is_stream: bool) -> None:
    for path, text in LONE:
        raw = text.replace("{", '{"stream":true,', 1) if is_stream else text
        status, answer = target.post(path, raw.encode())
        assert status == 400, (text, status, answer)
        message = json.loads(answer)["error"]["message"]
        assert not any(name in message for name in INTERNALS), (text, message)
    for broken in BAD_UTF8:
        for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
            assert target.post(path, broken)[0] == 400
    target.check_alive()


def test_a09_text_that_is_legal(target: Asker, dealer: Dealer) -> None:
    for text in (r"\ud83d\ude00", r"a\u0000b", r"\u0000", "\U0001f600"):
        for path, body in (
            (COMPLETIONS, f'{{"prompt":"{text}","max_tokens":2}}'),
            (CHAT, f'{{"messages":[{{"role":"user","content":"{text}"}}],"max_tokens":2}}'),
        ):
            status, answer = target.post(path, body.encode())
            assert status == 200, (text, answer)
        prompt = json.loads(f'"{text}"')
        assert isinstance(dealer.ask({"prompt": prompt, "params": {"max_tokens": 2}})[0], Finished)
    target.check_alive()


@pytest.mark.parametrize("field", ["prompt", "stop", "cache_salt", "bad_words"])
@pytest.mark.parametrize("text", [b"\xed\xa0\x80", b"\xff\xfe\xff"], ids=["surrogate", "noise"])
def test_a09_text_that_is_none_over_zmq(
    target: Asker, dealer: Dealer, field: str, text: bytes
) -> None:
    """Strings that are no UTF-8: msgpack carries any bytes under the name of text."""
    value: Any = ["QQQ"] if field == "bad_words" else "QQQ"
    submit = {"prompt": "x", "params": {"max_tokens": 2}}
    (submit if field == "prompt" else submit["params"])[field] = value  # type: ignore[index]  # of mixed types
    last, _, _ = dealer.ask(submit, {b"QQQ": text})
    assert isinstance(last, Error)
    assert last.status == 400
    assert not any(name in last.message for name in INTERNALS), last
    assert isinstance(dealer.ask({"prompt": "x", "params": {"max_tokens": 2}})[0], Finished)
    target.check_alive()


# -- A10, A11, A13 ---------------------------------------------------------------------------------

OUR_AFFAIRS: list[Case] = [
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"add_generation_prompt": "x"}}, "chat_template_kwargs"),
    ({"chat_template": "{% for i in range(10**9) %}{% endfor %}"}, "chat_template"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"documents": []}, "documents"),
    ({"request_id": "a"}, "request_id"),
    ({"arrival": 0}, "arrival"),
    ({"strikes": 1}, "strikes"),
    ({"grammar": "a"}, "grammar"),
    ({"anything": None}, "anything"),
]


def test_a11_what_is_not_the_clients_to_choose(target: Asker, dealer: Dealer) -> None:
    try_over_http(target, CHAT, {"messages": HI, "max_tokens": 2}, OUR_AFFAIRS)
    try_over_http(target, COMPLETIONS, {"prompt": "x", "max_tokens": 2}, OUR_AFFAIRS)
    over_zmq = [({"params": change}, param) for change, param in OUR_AFFAIRS]
    try_over_zmq(target, dealer, {"prompt": "x"}, list(over_zmq))


TURN = {"role": "user", "content": "hi"}
CALLED = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALLED]}
SHAPES: list[tuple[list[Any], str | None]] = [
    ([TURN | {"content": None}], "messages[0].content"),
    ([TURN | {"content": []}], "messages[0].content"),
    ([TURN | {"content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([TURN | {"content": 5}], "messages[0].content"),
    ([TURN | {"content": [5]}], "messages[0].content[0]"),
    ([TURN, {"role": "tool", "content": "a"}], "messages[1].tool_call_id"),
    ([{"role": "x", "content": "a"}], "messages[0].role"),
    ([{"role": None, "content": "a"}], "messages[0].role"),
    ([{"role": "assistant", "content": None}], "messages[0].content"),
    ([5], "messages[0]"),
    ([TURN | {"content": ""}], None),
    ([TURN, TURN], None),
    ([{"role": "developer", "content": "a"}, TURN], None),
    ([{"role": "system", "content": "a"}, TURN], None),
    ([TURN | {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]}], None),
    ([TURN, {"role": "assistant", "content": "a"}], None),
    ([TURN, CALLING], None),
    ([TURN, CALLING, {"role": "tool", "content": "a", "tool_call_id": "1"}], None),
]


def test_a13_odd_chat_shapes(target: Asker) -> None:
    cases: list[Case] = [({"messages": messages}, param) for messages, param in SHAPES]
    try_over_http(target, CHAT, {"max_tokens": 2}, cases)
    for messages, param in SHAPES:
        status, _ = target.post("/tokenize", {"messages": messages})
        assert status == (200 if param is None else 400), shown(messages)


# -- A14, A18 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("force", ["allowed_token_ids", "logit_bias"])
def test_a14_the_prompt_is_no_part_of_the_output(target: Asker, dealer: Dealer, force: str) -> None:
    *prompt, last = TOKENIZER.encode("Hello world 한").ids  # no merges for it: three byte tokens
    forced: Any = [last] if force == "allowed_token_ids" else {str(last): 100}
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, force: forced}
    assert target.complete(**body)["choices"][0]["text"] == "한"
    events = target.events(COMPLETIONS, body)
    assert "".join(event["choices"][0]["text"] for event in events) == "한"
    params = {name: value for name, value in body.items() if name != "prompt"}
    _, token_ids, text = dealer.ask({"prompt_ids": ids(*prompt), "params": params})
    assert (token_ids, text) == ([last], "한")
    target.check_alive()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a18_usage_in_streams(target: Asker, path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 12, "n": 3, "seed": 4, "temperature": 1.0}
    body |= {"prompt": ["To be", "The king"]} if path == COMPLETIONS else {"messages": HI}
    expected = json.loads(target.post(path, body)[1])["usage"]
    for options, is_reported in (
        (None, False),
        ({"include_usage": True}, True),
        ({"include_usage": False}, False),
        ({"include_usage": None}, False),
        ({}, False),
    ):
        events = target.events(path, body | {"stream_options": options})
        reported = [event for event in events if event.get("usage")]
        assert len(reported) == is_reported
        if is_reported:
            assert events[-1] is reported[0]
            assert events[-1]["choices"] == []
            counts = ("prompt_tokens", "completion_tokens", "total_tokens")
            assert [events[-1]["usage"][name] for name in counts] == [
                expected[name] for name in counts
            ]
        error = target.refusal(path, body | {"stream_options": options or {}, "stream": False})
        assert error["param"] == "stream_options"
    target.check_alive()


def test_a18_usage_over_zmq_equals_that_over_http(target: Asker, dealer: Dealer) -> None:
    body = {"max_tokens": 12, "seed": 4, "temperature": 1.0}
    usage = target.complete(prompt="To be", **body)["usage"]
    last, token_ids, _ = dealer.ask({"prompt": "To be", "params": body})
    assert isinstance(last, Finished)
    assert (last.num_prompt_tokens, last.num_output_tokens) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert len(token_ids) == last.num_output_tokens
