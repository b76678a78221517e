"""Tools on a real server: a forced choice gives calls that follow their schema."""

import json
from typing import Any

import openai
import pytest
from surface.asking import Asker
from surface.test_structured import NO_BLANKS

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string", "pattern": "^[a-z]{1,8}$"},
                    "count": {"type": "integer", "minimum": 0, "maximum": 9},
                },
                "required": ["word", "count"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("look_up", "spell")
]
HI: list[Any] = [{"role": "user", "content": "What is a sword?"}]
BODY: dict[str, Any] = {"model": "demo", "messages": HI, "tools": TOOLS, "max_tokens": 400}
BODY |= {"temperature": 0.8, "seed": 4, "logit_bias": NO_BLANKS}


def check(name: str, arguments: str) -> None:
    assert name in ("look_up", "spell")
    found = json.loads(arguments)
    assert found.keys() == {"word", "count"}
    assert found["word"].islower()
    assert 0 <= found["count"] <= 9


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "spell"}}], ids=str
)
def test_forced_calls_in_both_forms(asker: Asker, choice: Any) -> None:
    body = BODY | {"tool_choice": choice, "parallel_tool_calls": False}
    with openai.OpenAI(base_url=f"{asker.url}/v1", api_key="none", timeout=60) as client:
        answer = client.chat.completions.create(**body)
        [call] = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        check(call.function.name, call.function.arguments)
        pieces: list[str] = []
        for chunk in client.chat.completions.create(**body, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or []:
                assert delta.function is not None
                pieces.append(delta.function.arguments or "")
        assert "".join(pieces) == call.function.arguments
        assert len(pieces) > 2, "the arguments were not streamed"
    asker.check_alive()


def test_a_bad_tool_schema_is_refused(asker: Asker) -> None:
    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "something"}}}
    body = {"messages": HI, "tools": [tool], "tool_choice": "required"}
    assert asker.refusal("/v1/chat/completions", body)["param"] == "tools"
