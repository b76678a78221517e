"""One request for every parameter, each long enough that a fault can come in its middle.

`rows` asks a server that nobody disturbs for the places where stops shall come.
"""

from dataclasses import dataclass
from typing import Any

from surface.asking import Asker
from surface.test_structured import NO_BLANKS
from surface.test_tools import TOOLS

NUM_TOKENS = 64
PROMPT = "KING RICHARD III:\nMy lords, before I speak of war and of the crown,\n"
EOS = 1
LINES_SCHEMA = {
    "type": "object",
    "properties": {
        "lines": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-z]{4,6}$"},
            "minItems": 6,
            "maxItems": 8,
        }
    },
    "required": ["lines"],
    "additionalProperties": False,
}
LONG_CHOICES = [f"the {who} was here, and he said unto me that all was {how}" * 3
                for who, how in (("king", "well"), ("fool", "lost"), ("duke", "done"))]  # fmt: skip
GRAMMAR = 'start: step{12}\nstep: ("go" | "turn") " " ("left" | "right") "; "'
REGEX = "([a-z]{2,6} ){30}"


@dataclass(frozen=True)
class Row:
    """A request; `chat` ones go to the chat endpoint."""

    name: str
    fields: dict[str, Any]
    is_chat: bool = False

    @property
    def streams(self) -> bool:
        """Scores of the prompt come whole only, but for an echo's."""
        return "prompt_logprobs" not in self.fields

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    @property
    def is_warm(self) -> bool:
        """Its prompt shall be found in the prefix cache."""
        return "cache_salt" in self.fields

    def body(self, salt: str) -> dict[str, Any]:
        """What is sent; requests of one salt share cached prefixes, of two never."""
        common = {"ignore_eos": True, "max_tokens": NUM_TOKENS, "cache_salt": f"{salt} {self.name}"}
        if self.is_chat:
            common["messages"] = [{"role": "user", "content": PROMPT}]
        else:
            common["prompt"] = PROMPT
        return common | self.fields


def rows(asker: Asker) -> list[Row]:
    """The table."""
    [choice] = asker.complete(**Row("", _seeded(0)).body("places"))["choices"]
    late_text = choice["text"][len(choice["text"]) * 3 // 4 :][:8]
    late_id = next(
        token_id
        for index, token_id in enumerate(choice["token_ids"])
        if index > NUM_TOKENS // 2 and token_id not in choice["token_ids"][:index]
    )
    return [*_sampling(), *_ends(late_text, late_id), *_scores(), *_forms(), *_chats()]


def _seeded(seed: int, **fields: Any) -> dict[str, Any]:
    return {"temperature": 0.9, "seed": seed, "return_token_ids": True} | fields


def _sampling() -> list[Row]:
    return [
        Row("temperature 0", _seeded(36, temperature=0)),
        Row("cached prompt", _seeded(37, cache_salt="warm")),
        Row("temperature, seed", _seeded(1, temperature=1.3)),
        Row("top_p", _seeded(2, top_p=0.8)),
        Row("top_k", _seeded(3, top_k=8)),
        Row("min_p", _seeded(4, min_p=0.1)),
        Row("truncation, all", _seeded(5, top_p=0.9, top_k=40, min_p=0.02)),
        Row("presence_penalty", _seeded(6, presence_penalty=1.2)),
        Row("frequency_penalty", _seeded(7, frequency_penalty=0.9)),
        Row("repetition_penalty", _seeded(8, repetition_penalty=1.4)),
        Row("logit_bias", _seeded(9, logit_bias={"300": 3, "301": -100, "12": 2})),
        Row("n", _seeded(10, n=3)),
        Row("bad_words", _seeded(11, bad_words=["my lord", "the", "I"])),
        Row("allowed_token_ids", _seeded(12, allowed_token_ids=list(range(280, 420)))),
        Row("no field but a seed", {"seed": 13}),
    ]


def _ends(late_text: str, late_id: int) -> list[Row]:
    return [
        Row("stop", _seeded(0, stop=[late_text, "xyzzy"])),
        Row("include_stop", _seeded(0, stop=late_text, include_stop_str_in_output=True)),
        Row("stop_token_ids", _seeded(0, stop_token_ids=[late_id])),
        Row("max_tokens", _seeded(0, max_tokens=NUM_TOKENS - 9)),
        Row(
            "min_tokens",
            _seeded(14, ignore_eos=False, min_tokens=40, logit_bias={str(EOS): 5}),
        ),
        Row("skip_special_tokens", _seeded(15, logit_bias={str(EOS): 5})),
        Row(
            "skip_special_tokens off",
            _seeded(15, logit_bias={str(EOS): 5}, skip_special_tokens=False),
        ),
    ]


def _scores() -> list[Row]:
    return [
        Row("logprobs", _seeded(16, logprobs=0)),
        Row("logprobs, top", _seeded(17, logprobs=3, repetition_penalty=1.2)),
        Row("prompt_logprobs", _seeded(18, prompt_logprobs=2)),
        Row("echo", _seeded(19, echo=True)),
        Row("echo, logprobs", _seeded(20, echo=True, logprobs=1)),
    ]


def _forms() -> list[Row]:
    long = {"max_tokens": 200}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": LINES_SCHEMA}}
    return [
        Row("json_schema", _seeded(21, response_format=schema, logit_bias=NO_BLANKS, **long)),
        Row("json_object", _seeded(22, response_format={"type": "json_object"})),
        Row("regex", _seeded(23, structured_outputs={"regex": REGEX})),
        Row("guided_regex", _seeded(24, guided_regex=REGEX, presence_penalty=0.5)),
        Row("choice", _seeded(25, structured_outputs={"choice": LONG_CHOICES}, **long)),
        Row("grammar", _seeded(26, structured_outputs={"grammar": GRAMMAR}, **long)),
    ]


def _chats() -> list[Row]:
    tools = {"tools": TOOLS, "logit_bias": NO_BLANKS, "max_tokens": 150}
    named = {"type": "function", "function": {"name": "spell"}}
    return [
        Row("chat", _seeded(27), is_chat=True),
        Row("chat, plain stream", {"temperature": 0.9, "seed": 28}, is_chat=True),
        Row("chat, n", _seeded(29, n=2, top_p=0.9), is_chat=True),
        Row("chat, logprobs", _seeded(30, logprobs=True, top_logprobs=2), is_chat=True),
        Row("chat, prompt_logprobs", _seeded(31, prompt_logprobs=1), is_chat=True),
        Row(
            "max_completion_tokens",
            _seeded(32, max_tokens=None, max_completion_tokens=55),
            is_chat=True,
        ),
        Row("tools, required", _seeded(33, tool_choice="required", **tools), is_chat=True),
        Row("tools, named", _seeded(34, tool_choice=named, **tools), is_chat=True),
    ]
