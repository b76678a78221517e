"""Tool calls and reasoning in chat, in both forms, through the official client."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from api.fake_core import FakeCore
from api.frontend_process import DEMO_MODEL, MODEL_NAME, FrontendProcess
from tokenizers import Tokenizer

from nvserve.protocol.messages import Submit, unpack_ids

TOKENIZER = Tokenizer.from_file(f"{DEMO_MODEL}/tokenizer.json")
TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %} CALL {{ c.function.name }} {{ c.function.arguments.word }}"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    "{% if messages[0].role == 'system' %}<think>\n{% endif %}"
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks a word up.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}},
                "required": ["word"],
            },
        },
    }
    for name in ("look_up", "spell")
]
HI: list[Any] = [{"role": "user", "content": "What is a sword?"}]
A = '{"name": "look_up", "arguments": {"word": "sword"}}'
B = '{"name": "spell", "arguments": {"word": "crown"}}'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a template that shows tools."""
    folder = tmp_path_factory.mktemp("tools") / "model"
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def started(**changes: Any) -> Iterator[FrontendProcess]:
    process = FrontendProcess(max_model_len=2048, **changes)
    try:
        process.ready()
        process.new_core()
        yield process
    finally:
        process.close()


@pytest.fixture(scope="module")
def hermes(model: Path) -> Iterator[FrontendProcess]:
    yield from started(model=str(model), tool_call_parser="hermes", reasoning_parser="think")


@pytest.fixture(scope="module")
def llama(model: Path) -> Iterator[FrontendProcess]:
    yield from started(model=str(model), tool_call_parser="llama3_json")


HERMES_MARKERS = {
    "<|user|>": "<tool_call>",
    "<|assistant|>": "</tool_call>",
    "<|system|>": "</think>",
}


def with_special(model: Path, folder: Path, markers: dict[str, str]) -> Tokenizer:
    """A copy of the model in a new folder that writes its markers as special tokens."""
    shutil.copytree(model, folder)
    source = (folder / "tokenizer.json").read_text()
    for name, marker in markers.items():
        source = source.replace(json.dumps(name), json.dumps(marker))
    (folder / "tokenizer.json").write_text(source)
    return Tokenizer.from_str(source)


@pytest.fixture(scope="module")
def of_special_markers(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[FrontendProcess, Tokenizer]]:
    folder = tmp_path_factory.mktemp("special") / "model"
    tokenizer = with_special(model, folder, HERMES_MARKERS)
    settings = {"tool_call_parser": "hermes", "reasoning_parser": "think"}
    for process in started(model=str(folder), **settings):
        yield process, tokenizer


@pytest.fixture(scope="module")
def of_a_special_tag(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[FrontendProcess, Tokenizer]]:
    folder = tmp_path_factory.mktemp("tag") / "model"
    tokenizer = with_special(model, folder, {"<|user|>": "<|python_tag|>"})
    for process in started(model=str(folder), tool_call_parser="llama3_json"):
        yield process, tokenizer


class Answer:
    """What the client has in the end, whole or put together from a stream."""

    def __init__(self) -> None:
        self.content = self.reasoning = ""
        self.calls: list[list[Any]] = []  # id, name, arguments
        self.finish_reason: str | None = None


def ask(
    frontend: FrontendProcess,
    text: str,
    *,
    is_stream: bool,
    tokenizer: Tokenizer = TOKENIZER,
    **body: Any,
) -> Answer:
    core = frontend.core
    assert core is not None
    core.script = tokenizer.encode(text, add_special_tokens=False).ids
    request: Any = {"model": MODEL_NAME, "messages": HI, "tools": TOOLS, "max_tokens": 500} | body
    with openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0) as client:
        if is_stream:
            return streamed(client.chat.completions.create(stream=True, **request))
        return whole(client.chat.completions.create(**request))


def whole(document: Any) -> Answer:
    answer, choice = Answer(), document.choices[0]
    answer.content = choice.message.content or ""
    answer.reasoning = getattr(choice.message, "reasoning_content", "") or ""
    answer.calls = [
        [call.id, call.function.name, call.function.arguments]
        for call in choice.message.tool_calls or []
    ]
    answer.finish_reason = choice.finish_reason
    return answer


def streamed(chunks: Any) -> Answer:
    answer = Answer()
    for chunk in chunks:
        [choice] = chunk.choices
        assert answer.finish_reason is None, "something behind the last chunk"
        answer.content += choice.delta.content or ""
        answer.reasoning += getattr(choice.delta, "reasoning_content", "") or ""
        for call in choice.delta.tool_calls or []:
            if call.id:
                assert call.index == len(answer.calls)
                answer.calls.append([call.id, call.function.name, ""])
            answer.calls[call.index][2] += call.function.arguments or ""
        answer.finish_reason = choice.finish_reason
    return answer


def named(answer: Answer) -> list[tuple[str, Any]]:
    assert len({call_id for call_id, _, _ in answer.calls}) == len(answer.calls)
    assert all(call_id.startswith("call_") for call_id, _, _ in answer.calls)
    return [(name, json.loads(arguments)) for _, name, arguments in answer.calls]


BOTH = [("look_up", {"word": "sword"}), ("spell", {"word": "crown"})]


@pytest.mark.parametrize("is_stream", [False, True])
def test_hermes_calls_with_reasoning_and_content(hermes: FrontendProcess, is_stream: bool) -> None:
    text = (
        f"<think>\nHm, a word.</think>\n\nLet me see.\n<tool_call>\n{A}\n</tool_call>\n"
        f"<tool_call>\n{B}\n</tool_call>"
    )
    answer = ask(hermes, text, is_stream=is_stream)
    assert answer.reasoning == "\nHm, a word."
    assert answer.content == "Let me see."
    assert named(answer) == BOTH
    assert answer.finish_reason == "tool_calls"


@pytest.mark.parametrize("is_stream", [False, True])
def test_markers_are_found_though_the_model_has_them_as_special_tokens(
    of_special_markers: tuple[FrontendProcess, Tokenizer], is_stream: bool
) -> None:
    frontend, tokenizer = of_special_markers
    assert {tokenizer.id_to_token(one) for one in (2, 3, 4)} == set(HERMES_MARKERS.values())
    text = f"Hm.</think>Let me see.\n<tool_call>\n{A}\n</tool_call>\n<tool_call>{B}</tool_call>"
    turns = [{"role": "system", "content": "Think first."}, *HI]
    answer = ask(frontend, text, is_stream=is_stream, messages=turns, tokenizer=tokenizer)
    assert (answer.reasoning, answer.content) == ("Hm.", "Let me see.")
    assert named(answer) == BOTH
    assert frontend.core is not None
    frontend.core.script = [0, 2]
    _, completed = frontend.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
    assert completed["choices"][0]["text"] == "<tool_call>"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_call_behind_a_special_tag_may_be_of_any_function(
    of_a_special_tag: tuple[FrontendProcess, Tokenizer], is_stream: bool
) -> None:
    frontend, tokenizer = of_a_special_tag
    text = '<|python_tag|>{"name": "unlisted", "parameters": {"a": 1}}'
    assert tokenizer.id_to_token(2) == "<|python_tag|>"
    answer = ask(frontend, text, is_stream=is_stream, tokenizer=tokenizer)
    assert (answer.content, answer.finish_reason) == ("", "tool_calls")
    assert named(answer) == [("unlisted", {"a": 1})]


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_in_json_with_a_name_is_no_call(llama: FrontendProcess, is_stream: bool) -> None:
    text = '{"name": "Bob", "age": 3}'
    answer = ask(llama, text, is_stream=is_stream)
    assert (answer.content, answer.calls, answer.finish_reason) == (text, [], "stop")


@pytest.mark.parametrize("is_stream", [False, True])
def test_llama_calls(llama: FrontendProcess, is_stream: bool) -> None:
    text = f"{A.replace('arguments', 'parameters')}; {B}"
    answer = ask(llama, text, is_stream=is_stream)
    assert named(answer) == BOTH
    assert (answer.content, answer.finish_reason) == ("", "tool_calls")


@pytest.mark.parametrize("is_stream", [False, True])
def test_text_without_calls_is_content(
    hermes: FrontendProcess, llama: FrontendProcess, is_stream: bool
) -> None:
    for frontend in (hermes, llama):
        answer = ask(frontend, "A blade, {not} a call. ", is_stream=is_stream)
        assert (answer.content, answer.calls) == ("A blade, {not} a call. ", [])
        assert answer.finish_reason == "stop"


@pytest.mark.parametrize("is_stream", [False, True])
def test_one_call_where_parallel_ones_are_not_wanted(
    hermes: FrontendProcess, is_stream: bool
) -> None:
    text = f"<tool_call>{A}</tool_call><tool_call>{B}</tool_call>"
    answer = ask(hermes, text, is_stream=is_stream, parallel_tool_calls=False)
    assert named(answer) == BOTH[:1]


@pytest.mark.parametrize("is_stream", [False, True])
def test_calls_required_come_from_a_grammar(hermes: FrontendProcess, is_stream: bool) -> None:
    text = f"[{A}, {B}]".replace("arguments", "parameters")
    answer = ask(hermes, text, is_stream=is_stream, tool_choice="required")
    assert named(answer) == BOTH
    assert answer.finish_reason == "tool_calls"
    grammar = last_submit(hermes).sampling.grammar
    schema = json.loads(grammar.removeprefix("json_schema:"))
    names = [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]]
    assert names == ["look_up", "spell"]


@pytest.mark.parametrize("keyword", ["$id", "$anchor"])
def test_tools_that_call_two_schemas_the_same_cannot_be_required_together(
    hermes: FrontendProcess, keyword: str
) -> None:
    def tool(name: str, size: int) -> dict[str, Any]:
        part = {keyword: "size", "const": size}
        reference = {"$ref": "#size" if keyword == "$anchor" else "size"}
        parameters = {"type": "object", "properties": {"a": reference}, "$defs": {"x": part}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    body = {"messages": HI, "tool_choice": "required", "max_tokens": 1}
    _, refused = hermes.post("/v1/chat/completions", body | {"tools": [tool("a", 1), tool("b", 2)]})
    assert refused["error"]["param"] == "tools[1].function.parameters"
    same = body | {"tools": [tool("a", 1), tool("b", 1)]}
    assert hermes.post("/v1/chat/completions", same)[0] == 200
    by_name = {"type": "function", "function": {"name": "a"}}
    other = body | {"tools": [tool("a", 1), tool("b", 2)], "tool_choice": by_name}
    assert hermes.post("/v1/chat/completions", other)[0] == 200


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_call_by_name_is_all_arguments(hermes: FrontendProcess, is_stream: bool) -> None:
    choice = {"type": "function", "function": {"name": "spell"}}
    answer = ask(hermes, '{"word": "crown"}', is_stream=is_stream, tool_choice=choice)
    assert named(answer) == BOTH[1:]
    assert answer.finish_reason == "stop"
    grammar = last_submit(hermes).sampling.grammar
    schema = json.loads(grammar.removeprefix("json_schema:"))
    assert schema == TOOLS[1]["function"]["parameters"]


def test_the_template_shows_tools_and_earlier_calls(hermes: FrontendProcess) -> None:
    turns = [
        *HI,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "look_up", "arguments": '{"word": "sword"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "a blade"},
    ]
    ask(hermes, "A blade.", is_stream=False, messages=turns)
    prompt = TOKENIZER.decode(unpack_ids(last_submit(hermes).prompt), skip_special_tokens=False)
    assert "CALL look_up sword" in prompt
    assert "tool: a blade" in prompt
    assert '"description": "Looks a word up."' in prompt
    ask(hermes, "A blade.", is_stream=False, tool_choice="none")
    prompt = TOKENIZER.decode(unpack_ids(last_submit(hermes).prompt), skip_special_tokens=False)
    assert "TOOLS" not in prompt


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("form", "text", "reasoning", "content"),
    [
        ({}, "Hm.</think>\n\nYes.", "Hm.", "Yes."),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes", "", "yes"),
        ({"structured_outputs": {"json": {"type": "object"}}}, '{"a": 1}', "", '{"a": 1}'),
        ({"structured_outputs": {"regex": ".*</think>yes"}}, "Hm.</think>yes", "Hm.", "yes"),
        ({"structured_outputs": {"regex": r".*<\/think>yes"}}, "Hm.</think>yes", "Hm.", "yes"),
        ({"structured_outputs": {"regex": "[^{]*yes"}}, "Hm.</think>yes", "Hm.", "yes"),
        ({"structured_outputs": {"grammar": "start: /[^{]*/"}}, "Hm.</think>yes", "Hm.", "yes"),
    ],
)
def test_a_form_without_room_for_thoughts_is_content_behind_an_open_marker(
    hermes: FrontendProcess,
    form: dict[str, Any],
    text: str,
    reasoning: str,
    content: str,
    is_stream: bool,
) -> None:
    turns = [{"role": "system", "content": "Think first."}, *HI]
    answer = ask(hermes, text, is_stream=is_stream, messages=turns, extra_body=form)
    assert (answer.reasoning, answer.content) == (reasoning, content)


@pytest.mark.parametrize("is_stream", [False, True])
def test_n_choices_are_taken_apart_each_by_itself(hermes: FrontendProcess, is_stream: bool) -> None:
    core = hermes.core
    assert core is not None
    core.script = TOKENIZER.encode(f"<tool_call>{A}</tool_call>", add_special_tokens=False).ids
    body = {"messages": HI, "tools": TOOLS, "n": 2, "max_tokens": 200, "stream": is_stream}
    _, raw = hermes.request(
        "POST", "/v1/chat/completions", json.dumps(body).encode(),
        {"content-type": "application/json"},
    )  # fmt: skip
    if is_stream:
        events = [line for line in raw.decode().split("\n\n") if line][:-1]
        choices = [json.loads(e.removeprefix("data: "))["choices"][0] for e in events]
        finishes = {c["index"]: c["finish_reason"] for c in choices if c["finish_reason"]}
        assert finishes == {0: "tool_calls", 1: "tool_calls"}
    else:
        calls = [c["message"]["tool_calls"] for c in json.loads(raw)["choices"]]
        assert [call[0]["function"]["name"] for call in calls] == ["look_up", "look_up"]
        assert calls[0][0]["id"] != calls[1][0]["id"]


def last_submit(frontend: FrontendProcess) -> Submit:
    core = frontend.core
    assert core is not None
    return core.of_type(Submit)[-1]


def test_a_call_cut_short_keeps_its_reason(hermes: FrontendProcess, model: Path) -> None:
    core: FakeCore | None = hermes.core
    assert core is not None
    text = f"<tool_call>{A}"
    num_tokens = len(TOKENIZER.encode(text, add_special_tokens=False).ids) - 4
    answer = ask(hermes, text, is_stream=True, max_tokens=num_tokens)
    assert answer.finish_reason == "length"
    assert answer.calls[0][1] == "look_up"
    assert A.count(answer.calls[0][2]) == 1


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_call_without_arguments_has_an_empty_object(
    hermes: FrontendProcess, llama: FrontendProcess, is_stream: bool
) -> None:
    call = '{"name": "look_up"}'
    for frontend, text in ((hermes, f"<tool_call>{call}</tool_call>"), (llama, call)):
        answer = ask(frontend, text, is_stream=is_stream)
        assert named(answer) == [("look_up", {})]
        assert answer.finish_reason == "tool_calls"
