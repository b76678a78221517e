"""A03 and A13 of the list of bug reports: models without BOS, without template, with odd ones."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from api.fake_core import tokens_of
from api.frontend_process import DEMO_MODEL, FrontendProcess

from nvserve.frontend.client import Client
from nvserve.frontend.client_session import RequestError
from nvserve.protocol.messages import Submit

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@contextmanager
def serving(folder: Path, change: Callable[[Path], None]) -> Iterator[FrontendProcess]:
    """The demo model's folder without weights, changed."""
    model = folder / "model"
    shutil.copytree(DEMO_MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    change(model)
    process = FrontendProcess(model=str(model))
    try:
        process.endpoint = process.ready().zmq_endpoint
        process.new_core()
        yield process
    finally:
        process.close()


def check_refused(frontend: FrontendProcess, path: str, body: Any, param: str) -> str:
    for is_stream in (False, True):
        status, answer = frontend.post(path, {**body, "stream": is_stream})
        assert (status, answer["error"]["param"]) == (400, param), answer
    body = {"prompt": [5], "max_tokens": 2, "temperature": 0, "return_token_ids": True}
    status, alive = frontend.post(COMPLETIONS, body)
    assert status == 200
    assert alive["choices"][0]["token_ids"] == tokens_of([5], 2)
    message: str = answer["error"]["message"]
    return message


def without_bos(model: Path) -> None:
    """As GPT-2's: nothing is put before a text; blanks around it go, so that some have no ids."""
    path = model / "tokenizer.json"
    document = json.loads(path.read_text())
    document["post_processor"] = None
    document["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    path.write_text(json.dumps(document))
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )


def test_a03_texts_without_any_token(tmp_path: Path) -> None:
    with serving(tmp_path, without_bos) as frontend:
        for prompt in ("", [""], "   ", ["ok", " "], ["ok", ""], [" \n ", "ok"]):
            status, answer = frontend.post(COMPLETIONS, {"prompt": prompt})
            assert status == 400, prompt
            assert answer["error"]["param"].startswith("prompt")
        check_refused(frontend, COMPLETIONS, {"prompt": " "}, "prompt")
        silent = [{"role": "system", "content": "the template shows users alone"}]
        for messages in ([], silent, [{"role": "user", "content": " "}]):
            check_refused(frontend, CHAT, {"messages": messages}, "messages")
        with Client(frontend.endpoint) as client:
            for text in ("", " ", " \n\t "):
                with pytest.raises(RequestError) as caught:
                    client.generate(text, max_tokens=2)
                assert (caught.value.status, caught.value.param) == (400, "prompt")
            expected = tokens_of([5], 2)
            assert client.generate([5], max_tokens=2, temperature=0.0).token_ids == expected
        assert frontend.core is not None
        assert all(submit.prompt for submit in frontend.core.of_type(Submit))


def without_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink(missing_ok=True)
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    path.write_text(json.dumps(config))


def test_a13_a_model_without_a_template_serves_completions(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path, without_template) as frontend:
        message = check_refused(frontend, CHAT, {"messages": HI}, "messages")
        assert "no chat template" in message
        status, _ = frontend.post("/tokenize", {"messages": HI})
        assert status == 400
        with Client(frontend.endpoint) as client:
            assert client.generate("hi", max_tokens=2).num_output_tokens == 2
    assert "has no chat template" in capfd.readouterr().err


def strict_template(model: Path) -> None:
    """One that knows neither tools nor turns without content."""
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if loop.index0 % 2 != (m.role == 'assistant') | int %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content + '!' }}"
        "{% if m.name %}{{ m.name.first.last }}{% endif %}{% endfor %}"
    )


def test_a13_what_a_template_refuses_or_cannot_render_is_told(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with serving(tmp_path, strict_template) as frontend:
        twice = check_refused(frontend, CHAT, {"messages": HI * 2}, "messages")
        assert "refused by the chat template: roles must alternate" in twice
        broken = check_refused(frontend, CHAT, {"messages": [HI[0] | {"name": "a"}]}, "messages")
        assert broken == "messages: the chat template cannot render these messages"
        for content in ({"content": None}, {}):
            turns = [*HI, {"role": "assistant", "tool_calls": [call], **content}]
            status, answer = frontend.post("/tokenize", {"messages": turns})
            assert status == 200, answer
            _, text = frontend.post("/detokenize", {"tokens": answer["tokens"]})
            assert text["prompt"] == "hi!!"
        assert frontend.post(CHAT, {"messages": HI, "max_tokens": 1})[0] == 200
