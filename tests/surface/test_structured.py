"""Output in the form that was asked for: every field, both doors, streams, recoveries, bombs."""

import json
import os
import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from process.server import Server, served
from surface.asking import Asker, in_time
from tokenizers import Tokenizer

from nvserve.frontend.client import Client
from nvserve.frontend.client_session import RequestError
from nvserve.scripts.model_facts import DEMO_MODEL

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"enum": ["king", "queen", "fool"]},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
        "lines": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-z]{1,5}$"},
            "minItems": 1,
            "maxItems": 2,
        },
    },
    "required": ["title", "age", "lines"],
    "additionalProperties": False,
}
EBNF = 'root ::= "go " ("left" | "right") "!"'
LARK = 'start: "go " ("left" | "right") "!"'
CASES: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "[ab]{3,6}c"}, "[ab]{3,6}c"),
    ({"guided_choice": ["yes", "no", "perhaps"]}, "yes|no|perhaps"),
    ({"guided_grammar": LARK}, "go (left|right)!"),
    ({"structured_outputs": {"regex": "\\d{2}:\\d{2}"}}, "\\d{2}:\\d{2}"),
    ({"structured_outputs": {"choice": ["한국", "日本"]}}, "한국|日本"),
    ({"structured_outputs": {"grammar": EBNF}}, "go (left|right)!"),
]
JSON_CASES: list[dict[str, Any]] = [
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
]
TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
# The demo model knows plays, not JSON: left alone it fills the room between tokens with blanks.
NO_BLANKS = {
    str(token_id): -100
    for token_id in range(TOKENIZER.get_vocab_size())
    if not TOKENIZER.decode([token_id], skip_special_tokens=False).strip()
}
LONG = {"max_tokens": 400, "temperature": 0.7, "seed": 11}
LIMIT_S = 2.0


def assert_follows_schema(text: str) -> None:
    found = json.loads(text)
    assert found.keys() == {"title", "age", "lines"}
    assert found["title"] in ("king", "queen", "fool")
    assert 10 <= found["age"] <= 99
    assert all(re.fullmatch("[a-z]{1,5}", line) for line in found["lines"])
    assert 1 <= len(found["lines"]) <= 2


@pytest.mark.parametrize(("fields", "pattern"), CASES)
def test_text_has_the_form(asker: Asker, fields: dict[str, Any], pattern: str) -> None:
    [choice] = asker.complete(prompt="My lord", **LONG, **fields)["choices"]
    assert re.fullmatch(pattern, choice["text"])
    assert choice["finish_reason"] == "stop"
    chat = asker.chat("Speak", **LONG, **fields)["choices"][0]
    assert re.fullmatch(pattern, chat["message"]["content"])
    body = {"prompt": "My lord", **LONG, **fields, "n": 2}
    texts = ["", ""]
    for event in asker.events("/v1/completions", body):
        for one in event["choices"]:
            texts[one["index"]] += one["text"]
    assert texts[0] == choice["text"]
    assert re.fullmatch(pattern, texts[1])


@pytest.mark.parametrize("fields", JSON_CASES)
def test_json_follows_its_schema(asker: Asker, fields: dict[str, Any]) -> None:
    assert_follows_schema(
        asker.complete(prompt="x", **LONG, **fields, logit_bias=NO_BLANKS)["choices"][0]["text"]
    )


def test_an_object_of_any_kind(asker: Asker) -> None:
    fields = {"response_format": {"type": "json_object"}, "max_tokens": 60}
    text = asker.chat("Speak", temperature=0, **fields)["choices"][0]["message"]["content"]
    assert text.startswith("{")


def test_over_zmq(asker: Asker) -> None:
    with Client(asker.zmq_endpoint) as client:
        result = client.generate(
            "x", structured_outputs={"json": SCHEMA}, logit_bias=NO_BLANKS, **LONG
        )
        assert_follows_schema(result.text)
        assert result.finish_reason == "stop"
        with pytest.raises(RequestError) as caught:
            client.generate("x", structured_outputs={"regex": "(?<=x)*"})
        assert (caught.value.status, caught.value.param) == (400, "structured_outputs.regex")
        with pytest.raises(RequestError) as caught:
            client.generate("x", structured_outputs={"regex": "a", "json": {}})
        assert caught.value.status == 400


def test_other_parameters_hold_inside_a_grammar(asker: Asker) -> None:
    fields = {"guided_regex": "[a-z ]{30,60}", "temperature": 0, "logprobs": 1, "max_tokens": 60}
    answer = asker.complete(prompt="My", **fields, presence_penalty=1.0, return_token_ids=True)
    [choice] = answer["choices"]
    assert re.fullmatch("[a-z ]{30,60}", choice["text"])
    assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
    stopped = asker.complete(prompt="My", **fields, stop=[choice["text"][5:8]])["choices"][0]
    assert len(stopped["text"]) < 30
    assert stopped["finish_reason"] == "stop"


def test_pydantic_through_the_official_client(asker: Asker) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Person(pydantic.BaseModel):  # type: ignore[misc, name-defined]  # imported at run time
        name: str = pydantic.Field(pattern="^[a-z]{2,8}$")
        age: int = pydantic.Field(ge=1, le=99)

    with openai.OpenAI(base_url=f"{asker.url}/v1", api_key="none", timeout=60) as client:
        answer = client.chat.completions.parse(
            model="demo",
            messages=[{"role": "user", "content": "Who goes there?"}],
            response_format=Person,
            max_tokens=300,
            temperature=0.7,
            seed=3,
            logit_bias=NO_BLANKS,
        )
    person = answer.choices[0].message.parsed
    assert person is not None
    assert 1 <= person.age <= 99


# -- refusals (A10) --------------------------------------------------------------------------------

DEEP: Any = {"type": "string"}
for _ in range(200):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
DEEPER = '{"type":"object","properties":{"a":' * 10_000 + "{}" + "}}" * 10_000
BOMBS: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "(" * 60_000}, "guided_regex"),
    ({"guided_regex": "(" * 3_000}, "guided_regex"),
    ({"guided_regex": "(?<=x)*"}, "guided_regex"),
    ({"guided_regex": "*a"}, "guided_regex"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": "a{100000}"}, "guided_regex"),
    ({"guided_json": DEEP}, "guided_json"),
    ({"guided_json": "[" * 100_000}, "guided_json"),
    ({"guided_json": DEEPER}, "guided_json"),
    ({"guided_json": {"type": "something"}}, "guided_json"),
    ({"guided_json": {"type": "string", "pattern": "(?<=x)*"}}, "guided_json"),
    ({"guided_json": {"type": "string", "pattern": "(" * 60_000}}, "guided_json"),
    ({"guided_json": {"type": "string", "pattern": 5}}, "guided_json"),
    ({"guided_json": {"$ref": "#"}}, "guided_json"),
    ({"guided_json": {"$ref": "file:///etc/passwd"}}, "guided_json"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["x" * 200_000]}, "guided_choice"),
    ({"guided_grammar": "start: start start"}, "guided_grammar"),
    ({"guided_grammar": "start: (" + "(" * 5000}, "guided_grammar"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
]


@pytest.mark.parametrize(("fields", "param"), BOMBS)
def test_a10_bad_grammars_are_refused_fast(
    asker: Asker, fields: dict[str, Any], param: str
) -> None:
    body = {"prompt": "x", "max_tokens": 4, **fields}
    error = in_time(LIMIT_S, lambda: asker.refusal("/v1/completions", body))
    assert error["param"] == param, error
    assert error["message"].startswith(param)
    assert len(error["message"]) < 1000
    asker.check_alive()


def over_zmq(fields: dict[str, Any]) -> dict[str, Any] | None:
    """The same asked of the ZMQ door, where that has a form for it."""
    given = dict(fields.get("structured_outputs") or {})
    for name, value in fields.items():
        if name.startswith("guided_"):
            given[name.removeprefix("guided_")] = value
    return {"structured_outputs": given} if given or "structured_outputs" in fields else None


@pytest.mark.parametrize(("fields", "param"), BOMBS)
def test_a10_bad_grammars_are_refused_over_zmq_too(
    asker: Asker, fields: dict[str, Any], param: str
) -> None:
    asked = over_zmq(fields)
    if asked is None:
        pytest.skip("this form is HTTP's alone")
    with Client(asker.zmq_endpoint) as client:

        def refusal() -> RequestError:
            with pytest.raises(RequestError) as caught:
                client.generate("x", max_tokens=4, **asked)
            return caught.value

        error = in_time(LIMIT_S, refusal)
    assert error.status == 400
    assert error.param == param.replace("guided_", "structured_outputs.")
    assert len(error.message) < 1000
    asker.check_alive()


@pytest.mark.parametrize(
    "field", ["guided_json", "tools", "response_format", "structured_outputs", "metadata", "stop"]
)
def test_a10_deep_json_in_any_field(asker: Asker, field: str) -> None:
    start = b'{"%s":' % field.encode()
    for depth in (200, 10_000, 100_000):
        deep = b'{"a":' * depth + b"1" + b"}" * depth
        for path, rest in (
            ("/v1/completions", b'"prompt":"x"'),
            ("/v1/chat/completions", b'"messages":[{"role":"user","content":"a"}]'),
            ("/tokenize", b'"prompt":"x"'),
        ):
            raw = start + deep + b"," + rest + b"}"
            status, answer = in_time(LIMIT_S, partial(asker.post, path, raw))
            assert status == 400, (path, depth, answer)
    asker.check_alive()


@pytest.mark.parametrize(
    ("parameters", "choice"),
    [
        ({"type": "something"}, "required"),
        ({"properties": {"a": {"pattern": "(?<=x)*"}}}, "required"),
        ({"properties": {"a": {"pattern": "(" * 60_000}}}, "required"),
        ({"properties": {"a": DEEP}}, "required"),
        ({"properties": {"a": DEEP}}, "auto"),
        ({"type": "something"}, {"type": "function", "function": {"name": "f"}}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a10_bad_schemas_of_tools(asker: Asker, parameters: Any, choice: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "tool_choice": choice}
    error = in_time(LIMIT_S, lambda: asker.refusal("/v1/chat/completions", body))
    assert str(error["param"]).startswith("tools")
    asker.check_alive()


@pytest.mark.parametrize("pattern", ["(a+)+b", "((a{200}){200}){200}", "(a+)+"])
def test_a10_patterns_that_explode_elsewhere_are_harmless(asker: Asker, pattern: str) -> None:
    body = {"prompt": "a" * 40, "max_tokens": 30, "temperature": 0}
    fields = {"guided_regex": pattern}
    answer = in_time(LIMIT_S, lambda: asker.complete(**body, **fields))
    assert re.fullmatch("a+b?", answer["choices"][0]["text"])
    schema = {"type": "string", "pattern": "^(a+)+$"}
    answer = in_time(LIMIT_S, lambda: asker.complete(**body, guided_json=schema))
    assert re.fullmatch('"a+"?', answer["choices"][0]["text"])


# -- grammars that end outputs ---------------------------------------------------------------------

FORBIDDING = {"guided_regex": "ab+", "allowed_token_ids": TOKENIZER.encode("a").ids[-1:]}


def test_an_output_that_cannot_go_on_is_an_error_naming_the_grammar(asker: Asker) -> None:
    body = {"prompt": "x", "max_tokens": 20, "temperature": 0, **FORBIDDING}
    error = asker.refusal("/v1/completions", body)
    assert (error["param"], error["code"]) == ("guided_regex", "grammar_error")
    events = asker.events("/v1/completions", body)
    assert "".join(e["choices"][0]["text"] for e in events if "choices" in e) in ("", "a")
    assert events[-1]["error"]["code"] == "grammar_error"
    with Client(asker.zmq_endpoint) as client, pytest.raises(RequestError) as caught:
        client.generate(
            "x",
            max_tokens=20,
            structured_outputs={"regex": "ab+"},
            allowed_token_ids=FORBIDDING["allowed_token_ids"],
        )
    assert (caught.value.status, caught.value.param) == (400, "structured_outputs.regex")
    asker.check_alive()


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize(
    ("pattern", "shortest", "longest"),
    [("[ab]{3}", 3, 3), ("a{0,5}", 5, 5), ("a*", 12, 20), ("(yes|no)", 2, 3)],
)
def test_min_tokens_holds_as_far_as_the_grammar_goes(
    asker: Asker, pattern: str, shortest: int, longest: int, ignore_eos: bool
) -> None:
    """Neither text outside of the grammar nor a request that never ends; `a` is one token."""
    params = {"max_tokens": 20, "min_tokens": 12, "ignore_eos": ignore_eos, "temperature": 0}
    choice = asker.complete(prompt="x", guided_regex=pattern, **params)["choices"][0]
    with Client(asker.zmq_endpoint) as client:
        result = client.generate("x", structured_outputs={"regex": pattern}, **params)
    assert result.text == choice["text"]
    assert re.fullmatch(pattern, choice["text"])
    assert shortest <= len(choice["text"]) <= longest
    assert choice["finish_reason"] == ("length" if pattern == "a*" else "stop")
    asker.check_alive()


# -- recoveries ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mortal() -> Iterator[Asker]:
    """A server whose processes are killed."""
    with served(Server.launch("--max-restarts", "10")) as server:
        asker = Asker(server, server.wait_ready())
        maps = Path(f"/proc/{asker.pids['core']}/maps").read_text()
        assert "llguidance" in maps, "the first grammar would stall the streams of others"
        yield asker


@pytest.mark.parametrize("victim", ["core", "worker 0"])
def test_a_grammar_goes_on_after_a_death(mortal: Asker, victim: str) -> None:
    regex = "([a-z]{3,9} ){80}end"
    body = {"prompt": "My lord", "max_tokens": 400, "temperature": 0.8, "seed": 5}
    expected = mortal.complete(**body, guided_regex=regex)["choices"][0]["text"]
    assert re.fullmatch(regex, expected) or len(expected) > 300
    server = mortal.server
    server.wait_status("ready", lambda status: status["state"] == "ready")
    before = server.pids()[victim]
    with openai.OpenAI(base_url=f"{mortal.url}/v1", api_key="none", timeout=120) as client:
        extra = {"guided_regex": regex}
        fields: Any = {"model": "demo", "stream": True, "extra_body": extra} | body
        text = ""
        for chunk in client.completions.create(**fields):
            if not text:
                os.kill(before, signal.SIGKILL)
            text += chunk.choices[0].text
    assert text == expected
    server.wait_status("another one", lambda _: server.pids()[victim] != before)
