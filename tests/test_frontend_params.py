"""Client parameters become core's, with the model's defaults and derived seeds."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from nvserve.frontend.errors import ApiError
from nvserve.frontend.params import (
    Limits,
    check_all_params,
    derive_seed,
    resolve_max_tokens,
    resolve_sampling,
    resolve_seed,
    resolve_text_rules,
    with_max_tokens,
)
from nvserve.protocol.client_messages import SamplingFields
from nvserve.protocol.sampling import SamplingParams

DEMO = Path(__file__).parents[1] / "scripts" / "demo_model" / "tokenizer.json"
TOKENIZER = Tokenizer.from_file(str(DEMO))


def resolve(fields: SamplingFields, **defaults: float) -> SamplingParams:
    limits = Limits(max_model_len=100, vocab_size=1024, sampling_defaults=defaults)
    return resolve_sampling(fields, limits, TOKENIZER, max_tokens=10, logprobs=None)


def test_nothing_given_is_plain_sampling() -> None:
    assert resolve(SamplingFields()) == SamplingParams(max_tokens=10)


def test_the_models_defaults_hold_until_the_client_says_otherwise() -> None:
    defaults = {"temperature": 0.6, "top_k": 20.0, "top_p": 0.9}
    assert resolve(SamplingFields(), **defaults).temperature == 0.6
    asked = resolve(SamplingFields(temperature=0.0, top_k=-1), **defaults)
    assert (asked.temperature, asked.top_k, asked.top_p) == (0.0, -1, 0.9)


def test_bad_words_are_told_apart_by_the_space_before_them() -> None:
    words = resolve(SamplingFields(bad_words=["king"])).bad_words
    spelled = {TOKENIZER.decode(ids) for ids in words}
    assert spelled == {"king", " king"}


def test_biases_have_ids_as_keys() -> None:
    assert resolve(SamplingFields(logit_bias={"5": -3.0})).logit_bias == {5: -3.0}


def test_the_parameters_of_all_choices_are_bounded_together() -> None:
    """Core decodes and checks them once for each choice."""
    params = SamplingParams(grammar="regex:" + "a" * 100_000)
    check_all_params(params, num_prompts=1, num_choices=1)
    check_all_params(params, num_prompts=2, num_choices=64)
    for num_prompts, num_choices, param in ((1024, 1, "prompt"), (8, 128, "n"), (1, 1024, "n")):
        with pytest.raises(ApiError, match="prompts x n is 1024") as caught:
            check_all_params(params, num_prompts=num_prompts, num_choices=num_choices)
        assert caught.value.param == param


def test_another_room_is_checked_as_the_first_one_was() -> None:
    limits = Limits(max_model_len=100, vocab_size=1024, sampling_defaults={})
    params = resolve(SamplingFields(min_tokens=5))
    assert with_max_tokens(params, 7, limits) == resolve_sampling(
        SamplingFields(min_tokens=5), limits, TOKENIZER, max_tokens=7, logprobs=None
    )
    with pytest.raises(ApiError) as caught:
        with_max_tokens(params, 4, limits)
    assert caught.value.param == "min_tokens"


@given(st.integers(0, 2**63 - 1))
def test_derived_seeds_differ_and_the_first_is_the_clients(seed: int) -> None:
    seeds = [derive_seed(seed, index) for index in range(128)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 128
    assert all(0 <= derived < 2**63 for derived in seeds)


@given(st.integers(-(2**63), 2**63 - 1))
def test_every_64_bit_seed_is_taken(seed: int) -> None:
    folded = resolve_seed(seed)
    assert folded is not None
    assert 0 <= folded < 2**63


def test_room_is_exact() -> None:
    limits = Limits(100, 1024, {})
    assert resolve_max_tokens(None, 90, limits, default=16, param="max_tokens") == 10
    assert resolve_max_tokens(None, 10, limits, default=16, param="max_tokens") == 16
    assert resolve_max_tokens(None, 10, limits, default=None, param="max_tokens") == 90
    assert resolve_max_tokens(10, 90, limits, default=16, param="max_tokens") == 10
    with pytest.raises(ApiError, match="90 prompt tokens leave 10 of the context of 100"):
        resolve_max_tokens(11, 90, limits, default=16, param="max_tokens")


def test_one_stop_string_needs_no_list() -> None:
    assert resolve_text_rules(SamplingFields(stop="x")).stops == ["x"]
    assert resolve_text_rules(SamplingFields()).skip_special
    assert not resolve_text_rules(SamplingFields(skip_special_tokens=False)).skip_special
