"""Sampling as clients name it -> the SamplingParams that core and workers take, checked.

The same for HTTP and ZMQ: defaults from the model's generation config, ranges from
protocol.sampling, room from the context length. Every violation is a 400 naming the field.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from tokenizers import Tokenizer as FastTokenizer

from nvserve.frontend.errors import invalid
from nvserve.protocol.client_messages import SamplingFields
from nvserve.protocol.sampling import BadParameter, SamplingParams, check_sampling

MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1024
MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_CHARS: Final = 256
MAX_PARAM_BYTES: Final = 32 << 20  # of all choices of a request, as core gets them
MAX_SALT_CHARS: Final = 256
MAX_PRIORITY: Final = 2**31 - 1
MAX_TIMEOUT_S: Final = 86400.0
SEED_MASK: Final = 2**63 - 1
_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}")
_LONG_NUMBER: Final = re.compile(r"-?[0-9]{21,}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must fit in, and the model's own defaults."""

    max_model_len: int
    vocab_size: int
    sampling_defaults: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TextRules:
    """How a request's ids become text; these never leave the frontend."""

    stops: list[str]
    include_stop: bool
    skip_special: bool


def check_prompt(ids: Sequence[int], limits: Limits, param: str = "prompt") -> None:
    """Refuse ids outside the vocabulary, no ids, and more than leave room for one token."""
    if not ids:
        raise invalid(param, "must not be empty")
    check_prompt_size(len(ids), limits, param)
    check_ids(ids, limits, param)


def check_prompt_size(num_tokens: int, limits: Limits, param: str = "prompt") -> None:
    """Refuse more than leave room for one token."""
    if num_tokens >= limits.max_model_len:
        raise invalid(
            param,
            f"has {num_tokens} tokens, which leave no room for output in the context of "
            f"{limits.max_model_len}",
            "context_length_exceeded",
        )


def check_ids(ids: Sequence[int], limits: Limits, param: str) -> None:
    """Refuse ids outside the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= limits.vocab_size):
        raise invalid(param, f"holds a token id outside 0..{limits.vocab_size - 1}")


def resolve_max_tokens(
    asked: int | None, num_prompt_tokens: int, limits: Limits, *, default: int | None, param: str
) -> int:
    """Tokens to generate. `default` is cut to the room left (None takes all); `asked` never is."""
    room = limits.max_model_len - num_prompt_tokens
    if asked is None:
        return room if default is None else min(default, room)
    if asked < 0:
        raise invalid(param, "must not be negative")
    if asked > room:
        raise invalid(
            param,
            f"is larger than the room left: {num_prompt_tokens} prompt tokens leave {room} of the "
            f"context of {limits.max_model_len}",
            "context_length_exceeded",
        )
    return asked


def resolve_sampling(
    fields: SamplingFields,
    limits: Limits,
    tokenizer: FastTokenizer,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    grammar: str = "",
) -> SamplingParams:
    """All parameters with their defaults, or a 400 for the first one out of range."""
    defaults = limits.sampling_defaults

    def pick(value: float | None, name: str, fallback: float) -> float:
        return value if value is not None else float(defaults.get(name, fallback))

    params = SamplingParams(
        temperature=pick(fields.temperature, "temperature", 1.0),
        top_p=pick(fields.top_p, "top_p", 1.0),
        top_k=_top_k(fields.top_k, defaults),
        min_p=pick(fields.min_p, "min_p", 0.0),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=pick(fields.repetition_penalty, "repetition_penalty", 1.0),
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens or 0,
        ignore_eos=bool(fields.ignore_eos),
        stop_token_ids=fields.stop_token_ids or [],
        logprobs=_logprobs(logprobs, "logprobs"),
        prompt_logprobs=_logprobs(prompt_logprobs, "prompt_logprobs"),
        logit_bias=_logit_bias(fields.logit_bias or {}),
        allowed_token_ids=_allowed(fields.allowed_token_ids),
        bad_words=_bad_words(fields.bad_words or [], tokenizer),
        grammar=grammar,
    )
    return _checked(params, limits)


def with_max_tokens(params: SamplingParams, max_tokens: int, limits: Limits) -> SamplingParams:
    """The same for a prompt that leaves other room; a 400 where that is too little."""
    return _checked(msgspec.structs.replace(params, max_tokens=max_tokens), limits)


def check_all_params(params: SamplingParams, *, num_prompts: int, num_choices: int) -> None:
    """Refuse more than core can take at once, which gets the parameters anew with each choice.

    `num_choices`: of each prompt.
    """
    num_all = num_prompts * num_choices
    if num_all == 1:
        return
    num_bytes = len(msgspec.msgpack.encode(params))
    if num_all * num_bytes > MAX_PARAM_BYTES:
        raise invalid(
            "prompt" if num_choices == 1 else "n",
            f"prompts x n is {num_all}, and parameters of {num_bytes} bytes for each of them are "
            f"more than {MAX_PARAM_BYTES} bytes together",
        )


def _checked(params: SamplingParams, limits: Limits) -> SamplingParams:
    try:
        check_sampling(params, limits.vocab_size)
    except BadParameter as error:
        told = str(error).removeprefix(f"{error.param} ")
        raise invalid(error.param, _LONG_NUMBER.sub("a number of that size", told)) from error
    return params


def resolve_text_rules(fields: SamplingFields) -> TextRules:
    """Stop strings and special tokens, or a 400."""
    stop = fields.stop
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"holds {len(stops)} strings, at most {MAX_STOPS} are allowed")
    for text in stops:
        if not text:
            raise invalid("stop", "must not hold an empty string")
        if len(text) > MAX_STOP_CHARS:
            raise invalid("stop", f"a string is longer than {MAX_STOP_CHARS} characters")
    return TextRules(
        stops=stops,
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special=fields.skip_special_tokens is not False,
    )


def resolve_seed(seed: int | None) -> int | None:
    """A client's seed folded into 63 bits; None when it gave none."""
    if seed is None:
        return None
    if not -(2**63) <= seed < 2**63:
        raise invalid("seed", "must fit in 64 bits, signed")
    return seed & SEED_MASK


def derive_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: 0 keeps it, the others differ from it and from each other."""
    return (seed + index * 0x9E3779B97F4A7C15) & SEED_MASK


def resolve_priority(priority: int | None) -> int:
    """Lower runs first, 0 by default."""
    if priority is not None and not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise invalid("priority", f"must be from {-MAX_PRIORITY} to {MAX_PRIORITY}")
    return priority or 0


def resolve_timeout(seconds: float | None, param: str) -> float | None:
    """How long a request may take; None leaves it to the server's default."""
    if seconds is not None and not 0 < seconds <= MAX_TIMEOUT_S:
        raise invalid(param, f"must be more than 0 and at most {MAX_TIMEOUT_S:g} seconds")
    return seconds


def resolve_salt(salt: str | None) -> str:
    """The extra key of the prefix cache, empty by default."""
    if salt is not None and len(salt) > MAX_SALT_CHARS:
        raise invalid("cache_salt", f"is longer than {MAX_SALT_CHARS} characters")
    return salt or ""


# -- single fields ---------------------------------------------------------------------------------


def _top_k(asked: int | None, defaults: Mapping[str, float]) -> int:
    if asked is None:
        return int(defaults.get("top_k", 0)) or -1
    if asked == 0:
        raise invalid("top_k", "must be -1 (off) or positive, not 0")
    return asked


def _logprobs(asked: int | None, param: str) -> int:
    if asked is None:
        return -1
    if asked < 0:
        raise invalid(param, "must not be negative")
    return asked


def _allowed(ids: list[int] | None) -> list[int]:
    if ids is not None and not ids:
        raise invalid("allowed_token_ids", "must not be empty")
    return ids or []


def _logit_bias(bias: Mapping[str | int, float]) -> dict[int, float]:
    """Keys as ids. Only plain numbers count: int() would also take `" 5"`, `"1_0"` and `"05"`."""
    for key in bias:
        if not _ID.fullmatch(str(key)):
            raise invalid("logit_bias", "keys must be token ids")
        if isinstance(key, int) and str(key) in bias:
            raise invalid("logit_bias", f"has token {key} twice")
    return {int(key): value for key, value in bias.items()}


def _bad_words(words: Sequence[str], tokenizer: FastTokenizer) -> list[list[int]]:
    """Each word as the ids it has at a start and behind a space, as most tokenizers tell apart."""
    if len(words) > MAX_BAD_WORDS:
        raise invalid("bad_words", f"holds {len(words)} words, at most {MAX_BAD_WORDS} are allowed")
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            raise invalid("bad_words", f"a word must have 1 to {MAX_BAD_WORD_CHARS} characters")
        for text in (word, f" {word.lstrip()}"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
            if ids:
                sequences[ids] = None
    return [list(ids) for ids in sequences]
