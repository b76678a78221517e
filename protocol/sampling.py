"""Sampling parameters of one request, and the one check of their ranges.

Used by the frontend (a violation is a 400 naming the field) and again by core (msgpack carries NaN,
so no peer is trusted). Knows numbers only; never text or tokenizers.
"""

import math
from typing import Final

import msgspec

MAX_TOP_LOGPROBS: Final = 20
MAX_LOGIT_BIAS: Final = 1024
MAX_LIST: Final = 1024  # stop ids, bad words, allowed ids: entries each
MAX_BIAS_VALUE: Final = 100.0
GREEDY_BELOW: Final = 1e-5  # a lower temperature is greedy: dividing by it would overflow float32


class BadParameter(ValueError):
    """A sampling parameter out of its range; `param` names the field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param} {message}")
        self.param = param


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How to choose tokens and when to stop; defaults are greedy-free plain sampling.

    `temperature` below 1e-5 is greedy. `top_k` <= 0, `top_p` 1 and `min_p` 0 are off. `logprobs` is
    the number of best alternatives reported per token, -1 for none at all. `n` is not here: the
    frontend submits n requests.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    logprobs: int = -1
    prompt_logprobs: int = -1
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] = []
    bad_words: list[list[int]] = []  # token id sequences that may not be completed
    grammar: str = ""  # "json:", "json_schema:", "regex:", "choice:" or "lark:" and its text

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def is_truncated(self) -> bool:
        """Some of top-k, top-p and min-p is on; greedy rows ignore all three."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def needs_full_tail(self) -> bool:
        """The step's sampling must go beyond greedy and temperature for this row."""
        return (
            self.is_truncated
            or self.has_penalties
            or self.logprobs >= 0
            or bool(self.logit_bias or self.allowed_token_ids or self.bad_words or self.grammar)
            or self.min_tokens > 0
        )


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise BadParameter for the first value out of range."""
    _check_range("temperature", params.temperature, 0.0, 2.0**16)
    _check_range("top_p", params.top_p, 0.0, 1.0)
    if params.top_p == 0.0:
        raise BadParameter("top_p", "must be greater than 0")
    _check_range("min_p", params.min_p, 0.0, 1.0)
    if not -1 <= params.top_k < 2**31:
        raise BadParameter("top_k", f"must be -1 (off) or positive, not {params.top_k}")
    _check_range("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _check_range("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _check_range("repetition_penalty", params.repetition_penalty, 1e-3, 1e3)
    if params.max_tokens < 0:
        raise BadParameter("max_tokens", f"must not be negative, not {params.max_tokens}")
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise BadParameter(
            "min_tokens",
            f"must be from 0 to max_tokens {params.max_tokens}, not {params.min_tokens}",
        )
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if not -1 <= count <= MAX_TOP_LOGPROBS:
            raise BadParameter(name, f"must be at most {MAX_TOP_LOGPROBS}, not {count}")
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise BadParameter(
            "logit_bias", f"has {len(params.logit_bias)} entries, max {MAX_LOGIT_BIAS}"
        )
    _check_ids("logit_bias", list(params.logit_bias), vocab_size)
    for value in params.logit_bias.values():
        _check_range("logit_bias", value, -MAX_BIAS_VALUE, MAX_BIAS_VALUE)
    if len(params.bad_words) > MAX_LIST:
        raise BadParameter("bad_words", f"has {len(params.bad_words)} entries, max {MAX_LIST}")
    for word in params.bad_words:
        if not word:
            raise BadParameter("bad_words", "must not hold an empty word")
        _check_ids("bad_words", word, vocab_size)


def _check_range(param: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise BadParameter(param, f"must be from {low:g} to {high:g}, not {value:g}")


def _check_ids(param: str, ids: list[int], vocab_size: int) -> None:
    if len(ids) > MAX_LIST:
        raise BadParameter(param, f"has {len(ids)} entries, max {MAX_LIST}")
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise BadParameter(param, f"holds token id {token_id}, outside 0..{vocab_size - 1}")
