"""Loading a model's tokenizer and templates, and encoding by Hugging Face's rules."""

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer

from nvserve.frontend.chat_template import ChatTemplate
from nvserve.frontend.errors import ApiError, StartFailure
from nvserve.frontend.tokenizer import INLINE_CHARS, INLINE_CONTENT_CHARS, Tokenizer

DEMO = Path(__file__).parents[1] / "scripts" / "demo_model"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    shutil.copy(DEMO / "chat_template.jinja", tmp_path)
    return tmp_path


def load(folder: Path, max_model_len: int = 4096) -> Tokenizer:
    return Tokenizer(str(folder), max_model_len)


def encode(tokenizer: Tokenizer, text: str, **more: Any) -> list[int]:
    return asyncio.run(tokenizer.encode([text], param="prompt", **more))[0]


def render(source: str, messages: list[dict[str, Any]] = USER) -> str:
    return ChatTemplate(source, SPECIAL).render(messages, add_generation_prompt=True)


def test_a_missing_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(StartFailure, match=r"no tokenizer: .*tokenizer\.json is missing"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("tokenizer.json", "{", "cannot read the tokenizer"),
        ("tokenizer_config.json", "{", "is not JSON"),
        ("generation_config.json", "[]", "does not hold a JSON object"),
        ("chat_template.jinja", "{% if %}", "chat template, line 1"),
    ],
)
def test_a_broken_file_is_one_clear_line(folder: Path, name: str, text: str, expected: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(StartFailure, match=expected):
        load(folder)


def test_a_template_that_is_not_utf_8_is_one_clear_line(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(StartFailure, match=r"chat_template\.jinja is not UTF-8"):
        load(folder)


def test_short_and_long_texts_encode_as_the_library_does(folder: Path) -> None:
    tokenizer = load(folder)
    fast = FastTokenizer.from_file(str(DEMO / "tokenizer.json"))
    for text in ("To be", "", "x y\n" * INLINE_CHARS):
        assert encode(tokenizer, text) == fast.encode(text).ids
    assert encode(tokenizer, "To", add_special_tokens=False)[0] != 0
    tokenizer.close()


def test_markers_encode_as_ever_and_are_text_unless_they_are_special(folder: Path) -> None:
    text = "a <|user|>b<|system|> c"
    shown = Tokenizer(str(folder), 4096, frozenset({"<|user|>", "not a token"}))
    ids = encode(shown, text)
    assert ids == encode(load(folder), text)
    assert shown.vocabulary.decode(ids) == "a <|user|>b c"
    assert load(folder).vocabulary.decode(ids) == "a b c"
    assert shown.vocabulary.kind == "bytes"


def test_padding_and_truncation_of_the_file_are_off(folder: Path) -> None:
    fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    fast.enable_padding(length=64)
    fast.enable_truncation(4)
    fast.save(str(folder / "tokenizer.json"))
    tokenizer = load(folder)
    assert 4 < len(encode(tokenizer, "to be or not to be that is")) < 20


def test_a_text_that_cannot_fit_is_refused_by_its_bytes(folder: Path) -> None:
    tokenizer = load(folder, 16)
    limit = 16 * tokenizer.vocabulary.max_token_bytes
    assert encode(tokenizer, "x" * limit)
    with pytest.raises(ApiError, match=f"{limit + 1} bytes of text cannot fit in 16 tokens"):
        encode(tokenizer, "x" * (limit + 1))


def test_a_lone_surrogate_is_the_clients_error(folder: Path) -> None:
    with pytest.raises(ApiError, match="lone surrogate"):
        encode(load(folder), "\ud800")


def test_a_chat_has_the_bos_of_its_template_alone(folder: Path) -> None:
    ids = asyncio.run(load(folder).encode_chat(USER))
    assert ids.count(0) == 1
    assert ids[0] == 0


def test_without_a_template_only_chat_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load(folder)
    assert encode(tokenizer, "x")
    with pytest.raises(ApiError, match="no chat template"):
        asyncio.run(tokenizer.encode_chat(USER))


def test_named_templates_and_tokens_written_as_objects(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["bos_token"] = {"content": "<|begin|>", "special": True}
    config["chat_template"] = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load(folder)
    fast = tokenizer.fast
    assert asyncio.run(tokenizer.encode_chat(USER)) == fast.encode("hi").ids


@pytest.mark.parametrize("is_in_files", [True, False])
def test_a_chat_with_tools_has_the_template_for_them(folder: Path, is_in_files: bool) -> None:
    sources = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools[0] }}", "rag": "no"}
    if is_in_files:
        (folder / "chat_template.jinja").write_text(sources["default"])
        (folder / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(sources[name])
    else:
        (folder / "chat_template.jinja").unlink()
        config = json.loads((folder / "tokenizer_config.json").read_text())
        named = [{"name": name, "template": source} for name, source in sources.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    tokenizer = load(folder)
    fast = tokenizer.fast
    for tools, text in (((), "hi"), (({"a": 1},), "{'a': 1}")):
        ids = asyncio.run(tokenizer.encode_chat(USER, tools=tools))
        assert ids == fast.encode(text, add_special_tokens=False).ids
    assert tokenizer.chat_template is not None
    assert tokenizer.tool_template is not None
    assert tokenizer.tool_template.knows_tools
    assert not tokenizer.chat_template.knows_tools


@pytest.mark.parametrize("broken", [b"{% if %}", b"{{ tools }} \xff"])
def test_a_broken_template_for_tools_is_told_and_the_default_takes_its_place(
    folder: Path, broken: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_bytes(broken)
    tokenizer = load(folder)
    assert tokenizer.tool_template is tokenizer.chat_template is not None
    (warning,) = caplog.records
    assert f"the template 'tool_use' of {folder} is not used" in warning.getMessage()


def test_only_the_template_for_tools_is_read_beside_the_default(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = asyncio.run(load(folder).encode_chat(USER))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_bytes(b"\xff")
    (folder / "additional_chat_templates" / "default.jinja").write_text("no")
    assert asyncio.run(load(folder).encode_chat(USER)) == expected
    assert not caplog.records


def test_sampling_defaults_come_from_the_generation_config(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.6, "top_k": 20, "do_sample": True, "top_p": None}))
    assert load(folder).sampling_defaults == {"temperature": 0.6, "top_k": 20}


# -- templates -------------------------------------------------------------------------------------


def test_blocks_are_trimmed_and_special_tokens_known() -> None:
    source = "{{ bos_token }}\n{% for m in messages %}\n    {{- m.content }}\n{% endfor %}"
    assert render(source) == "<s>\nhi\n"


def test_the_generation_block_only_marks() -> None:
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "ahib"


def test_loop_controls_and_json_work() -> None:
    source = "{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}"
    assert render(source, [{"role": "user", "content": "<é>"}] * 2) == (
        '{"role": "user", "content": "<é>"}'
    )
    assert render("{{ messages | tojson(indent=2) }}").startswith("[\n  {")


def test_a_refusal_of_the_template_is_told() -> None:
    with pytest.raises(ApiError, match="refused by the chat template: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_failure_of_the_template_is_the_clients_error_without_details() -> None:
    for source in ("{{ messages[0].content.nothing.here }}", "{{ 'a' + messages }}"):
        with pytest.raises(ApiError, match="the chat template cannot render these messages"):
            render(source)


def test_the_sandbox_holds() -> None:
    for source in (
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ):
        with pytest.raises(ApiError):
            render(source)


def test_the_date_is_available() -> None:
    assert render("{{ strftime_now('%Y') }}").isdigit()


def test_a_developer_is_the_system_unless_the_template_knows_better() -> None:
    chat = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", chat) == "system"
    assert render("{# developer #}{{ messages[0].role }}", chat) == "developer"


def test_a_template_that_renders_for_ever_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvserve.frontend.chat_template.MAX_RENDER_S", 0.2)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{{ none or '' }}{% endfor %}"
    begun_s = time.thread_time()
    with pytest.raises(ApiError, match=r"messages: take more than 0\.2 s to render"):
        render(endless + "{% endfor %}")
    assert time.thread_time() - begun_s < 2.0
    huge = "{% for a in range(99999) %}{{ messages[0].content }}{% endfor %}"
    with pytest.raises(ApiError, match="messages: render to more than"):
        render(huge, [{"role": "user", "content": "x" * 500}])


def test_many_messages_are_rendered_beside_the_loop(folder: Path) -> None:
    tokenizer = load(folder)
    turns = USER * 300
    assert tokenizer.chat_template is not None
    text = tokenizer.chat_template.render(turns, add_generation_prompt=True)
    expected = tokenizer.fast.encode(text, add_special_tokens=False).ids
    assert asyncio.run(tokenizer.encode_chat(turns)) == expected
    tokenizer.close()


def test_long_messages_are_rendered_beside_the_loop(folder: Path) -> None:
    slow = "{% for a in range(100000) %}{{ none or '' }}{% endfor %}{{ messages[0].content[:5] }}"
    (folder / "chat_template.jinja").write_text(slow)
    tokenizer = load(folder)

    async def count_turns_of_others(num_chars: int) -> int:
        messages = [{"role": "user", "content": "a" * num_chars}]
        encoding = asyncio.create_task(tokenizer.encode_chat(messages))
        num_turns = 0
        while not encoding.done():
            await asyncio.sleep(0)
            num_turns += 1
        return num_turns

    assert asyncio.run(count_turns_of_others(INLINE_CONTENT_CHARS)) < 5
    assert asyncio.run(count_turns_of_others(INLINE_CONTENT_CHARS + 1)) > 5
    tokenizer.close()


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content + '.' }}{% endfor %}",
        "{% for m in messages %}{% if 'x' in m.content %}{% endif %}{{ m.content }}.{% endfor %}",
        "{% for m in messages %}{{ m.content.strip() }}.{% endfor %}",
        "{% for m in messages %}{{ m.content | trim if m.content is not none }}.{% endfor %}",
    ],
)
def test_a_turn_of_calls_without_content_is_rendered_by_any_template(source: str) -> None:
    turns: list[dict[str, Any]] = [*USER]
    turns.append({"role": "assistant", "content": None, "tool_calls": []})
    assert render(source, turns) == "hi.."
