"""Bodies that must be a 400 naming the field, and the proof that one hurt nobody else."""

from typing import Any

from api.fake_core import tokens_of
from api.frontend_process import FrontendProcess

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

HI = [{"role": "user", "content": "hi"}]

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

CLASS_NAMES = ("Body", "Error:", "Traceback", "Struct", "Params", "msgspec", "`", "dict", "<class")


def assert_400(
    shared: FrontendProcess, path: str, body: Any, param: str | None, status: int = 400
) -> None:
    got, answer = shared.post(path, body)
    error = answer["error"]
    assert (got, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert not any(name in error["message"] for name in CLASS_NAMES), error
    alive, answer = shared.post(
        COMPLETIONS, {"prompt": [5], "max_tokens": 2, "temperature": 0, "return_token_ids": True}
    )
    assert alive == 200
    assert answer["choices"][0]["token_ids"] == tokens_of([5], 2)


BAD_FIELDS: list[tuple[str, Any]] = [
    ("logit_bias", {"99999999": 5}),
    ("logit_bias", {"-1": 5}),
    ("logit_bias", {"abc": 5}),
    ("logit_bias", {"1_0": 5}),
    ("logit_bias", {"05": 5}),
    ("logit_bias", {"5": 1, " 5": 2}),
    ("logit_bias", {"5": 1e30}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {str(i): 1 for i in range(2000)}),
    ("max_tokens", -1),
    ("max_tokens", 10**9),
    ("max_tokens", 10**400),
    ("min_tokens", 9),
    ("min_tokens", -1),
    ("temperature", -3),
    ("temperature", 1e308),
    ("top_p", 0),
    ("top_p", -1),
    ("top_p", 1.0001),
    ("top_k", 0),
    ("top_k", -2),
    ("top_k", 2**40),
    ("min_p", 2),
    ("presence_penalty", 1e308),
    ("frequency_penalty", -1e308),
    ("repetition_penalty", 0),
    ("seed", 2**63),
    ("seed", -(10**400)),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["x"] * 17),
    ("stop", ["x"] * 100_000),
    ("stop", "x" * 1_000_000),
    ("stop_token_ids", [1024]),
    ("stop_token_ids", [-1]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [2**40]),
    ("bad_words", [""]),
    ("bad_words", ["x"] * 1000),
    ("priority", 2**31),
    ("cache_salt", "x" * 1000),
]
