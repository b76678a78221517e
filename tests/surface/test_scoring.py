"""Logprobs of prompts and outputs, in every form, against `transformers` in float32."""

from typing import Any

import pytest
import torch
from surface.asking import Asker
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from nvserve.frontend.client import Client
from nvserve.scripts.model_facts import DEMO_MODEL

TEXT = (
    "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n\n"
    "First Citizen:\nYou are all resolved rather to die than to famish?\n\nAll:\nResolved."
)  # longer than one step's budget
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(str(DEMO_MODEL), dtype=torch.float32).train(False)


@torch.inference_mode()
def logprobs_of(model: Any, ids: list[int]) -> torch.Tensor:
    """[len(ids) - 1, V]: row i scores token i + 1."""
    return torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], dim=-1)


def test_an_echo_with_logprobs_scores_the_prompt(
    asker: Asker, model: Any, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(TEXT).ids
    assert len(ids) > 48, "the prompt takes several steps"
    expected = logprobs_of(model, ids)
    answer = asker.complete(prompt=TEXT, echo=True, max_tokens=0, logprobs=3)
    [choice] = answer["choices"]
    columns = choice["logprobs"]
    assert choice["text"] == TEXT
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": len(ids),
        "completion_tokens": 0,
        "total_tokens": len(ids),
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert len(columns["tokens"]) == len(columns["text_offset"]) == len(ids)
    assert columns["token_logprobs"][0] is None is columns["top_logprobs"][0]
    for row, token_id in enumerate(ids[1:]):
        got = columns["token_logprobs"][row + 1]
        assert got == pytest.approx(float(expected[row, token_id]), abs=TOLERANCE)
        best = expected[row].topk(3).values.tolist()
        assert sorted(columns["top_logprobs"][row + 1].values())[-3:] == pytest.approx(
            best[::-1], abs=TOLERANCE
        )
    asker.check_alive()


def test_the_form_evaluation_harnesses_read(asker: Asker, model: Any, tokenizer: Tokenizer) -> None:
    context, continuation = "To be, or", " not to be"
    ids = tokenizer.encode(context + continuation).ids
    num_context = len(tokenizer.encode(context).ids)
    answer = asker.complete(
        prompt=[ids], echo=True, max_tokens=1, logprobs=1, temperature=0, seed=1234
    )
    columns = answer["choices"][0]["logprobs"]
    assert len(columns["tokens"]) == len(ids) + 1
    total = sum(columns["token_logprobs"][num_context:-1])
    expected = logprobs_of(model, ids)
    rows = range(num_context - 1, len(ids) - 1)
    assert total == pytest.approx(
        sum(float(expected[row, ids[row + 1]]) for row in rows), abs=TOLERANCE * len(ids)
    )
    for row in rows:
        is_greedy = (
            max(columns["top_logprobs"][row + 1].values()) == (columns["token_logprobs"][row + 1])
        )
        assert is_greedy == (int(expected[row].argmax()) == ids[row + 1])


def test_a_streamed_echo_carries_the_same_logprobs(asker: Asker) -> None:
    body = {"prompt": [TEXT, "To be"], "echo": True, "max_tokens": 4, "logprobs": 2, "n": 2}
    body |= {"temperature": 0}
    whole = asker.complete(**body)
    columns: dict[int, dict[str, list[Any]]] = {}
    texts = dict.fromkeys(range(4), "")
    for event in asker.events("/v1/completions", body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            got = columns.setdefault(choice["index"], {})
            for name, column in (choice["logprobs"] or {}).items():
                got.setdefault(name, []).extend(column)
    for choice in whole["choices"]:
        assert texts[choice["index"]] == choice["text"]
        streamed = columns[choice["index"]]
        assert streamed["tokens"] == choice["logprobs"]["tokens"]
        assert streamed["text_offset"] == choice["logprobs"]["text_offset"]
        assert streamed["token_logprobs"][1:] == pytest.approx(
            choice["logprobs"]["token_logprobs"][1:], abs=TOLERANCE
        )


@pytest.mark.parametrize("prompt", ["To be", "a한글😀é…z", "<|user|>Hi 한<|end|><|assistant|>x"])
def test_an_echos_offsets_are_places_in_its_text(
    asker: Asker, tokenizer: Tokenizer, prompt: str
) -> None:
    ids = tokenizer.encode(prompt).ids
    num_added = len(ids) - len(tokenizer.encode(prompt, add_special_tokens=False).ids)
    assert num_added == 1, "the first token is no part of the text"
    body = {"echo": True, "max_tokens": 3, "logprobs": 0, "temperature": 0, "ignore_eos": True}
    [choice] = asker.complete(prompt=prompt, return_token_ids=True, **body)["choices"]
    text, offsets = choice["text"], choice["logprobs"]["text_offset"]
    assert text.startswith(prompt)
    assert len(offsets) == len(ids) + 3
    assert offsets[0] == offsets[1] == 0
    for count, offset in enumerate(offsets[1 : len(ids)]):
        before = tokenizer.decode(ids[1 : count + 1], skip_special_tokens=False)
        assert text[:offset] == before.rstrip("\ufffd")
    for count, offset in enumerate(offsets[len(ids) :]):
        output = tokenizer.decode(choice["token_ids"][:count]).rstrip("\ufffd")
        assert text[:offset] == prompt + output
    if "<" in prompt:
        return  # as ids the special tokens are no text
    [by_ids] = asker.complete(prompt=ids, **body)["choices"]
    assert by_ids["text"] == text
    assert by_ids["logprobs"]["text_offset"] == offsets


@pytest.mark.parametrize("is_chat", [False, True])
def test_output_logprobs(asker: Asker, model: Any, is_chat: bool) -> None:
    body: dict[str, Any] = {"max_tokens": 8, "temperature": 0.7, "seed": 5, "ignore_eos": True}
    body["return_token_ids"] = True
    if is_chat:
        answer = asker.chat("Who goes there?", logprobs=True, top_logprobs=4, **body)
    else:
        answer = asker.complete(prompt="Who goes there?", logprobs=4, **body)
    [choice] = answer["choices"]
    prompt, output = choice["prompt_token_ids"], choice["token_ids"]
    expected = logprobs_of(model, prompt + output)[len(prompt) - 1 :]
    for row, token_id in enumerate(output):
        best = expected[row].topk(4).values.tolist()
        if is_chat:
            entry = choice["logprobs"]["content"][row]
            got, tops = entry["logprob"], [top["logprob"] for top in entry["top_logprobs"]]
            assert tops == pytest.approx(best, abs=TOLERANCE)
        else:
            got = choice["logprobs"]["token_logprobs"][row]
            tops = choice["logprobs"]["top_logprobs"][row].values()
            assert max(tops) == pytest.approx(best[0], abs=TOLERANCE)
        assert got == pytest.approx(float(expected[row, token_id]), abs=TOLERANCE)


@pytest.mark.parametrize("is_chat", [False, True])
def test_prompt_logprobs_as_a_field_of_their_own(asker: Asker, model: Any, is_chat: bool) -> None:
    body: dict[str, Any] = {"prompt_logprobs": 2, "max_tokens": 2, "return_token_ids": True}
    answer = asker.chat(TEXT, **body) if is_chat else asker.complete(prompt=TEXT, **body)
    [choice] = answer["choices"]
    scores = answer["prompt_logprobs"] if is_chat else choice["prompt_logprobs"]
    ids = choice["prompt_token_ids"]
    expected = logprobs_of(model, ids)
    assert scores[0] is None
    assert len(scores) == len(ids)
    for row, token_id in enumerate(ids[1:]):
        entry = scores[row + 1][str(token_id)]
        assert entry["logprob"] == pytest.approx(float(expected[row, token_id]), abs=TOLERANCE)
        ranks = [one["rank"] for one in scores[row + 1].values()]
        assert ranks in ([1, 2], [1, 2, None])


@pytest.mark.parametrize(("num_shown", "num_own"), [(3, 1), (0, 2), (1, 0)])
def test_an_echo_and_prompt_logprobs_have_each_as_many_alternatives_as_asked_for(
    asker: Asker, num_shown: int, num_own: int
) -> None:
    body = {"prompt": TEXT, "max_tokens": 2, "echo": True, "seed": 1}
    one = asker.complete(**body, logprobs=num_shown)["choices"][0]
    other = asker.complete(**body, prompt_logprobs=num_own)["choices"][0]
    both = asker.complete(**body, logprobs=num_shown, prompt_logprobs=num_own)["choices"][0]
    tops, expected = both["logprobs"]["top_logprobs"], one["logprobs"]["top_logprobs"]
    assert [row and row.keys() for row in tops] == [row and row.keys() for row in expected]
    ranks = [
        [row and [entry["rank"] for entry in row.values()] for row in scores["prompt_logprobs"]]
        for scores in (both, other)
    ]
    assert ranks[0] == ranks[1]


def test_prompt_logprobs_over_zmq(asker: Asker, model: Any, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT).ids
    expected = logprobs_of(model, ids)
    with Client(asker.zmq_endpoint) as client:
        for max_tokens in (0, 3):
            result = client.generate(TEXT, prompt_logprobs=1, max_tokens=max_tokens)
            assert len(result.token_ids) == result.num_output_tokens == max_tokens
            assert result.prompt_logprobs is not None
            assert [entry.token_id for entry in result.prompt_logprobs] == ids[1:]
            for row, entry in enumerate(result.prompt_logprobs):
                want = float(expected[row, entry.token_id])
                assert entry.logprob == pytest.approx(want, abs=TOLERANCE)
    asker.check_alive()


def test_scores_come_in_spite_of_a_prefix_that_is_cached(asker: Asker) -> None:
    asker.complete(prompt=TEXT, max_tokens=1)
    answer = asker.complete(prompt=TEXT, echo=True, max_tokens=0, logprobs=0)
    values = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert None not in values[1:]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_streams_refuse_prompt_logprobs(asker: Asker) -> None:
    body = {"prompt": "a", "prompt_logprobs": 1, "stream": True}
    assert asker.refusal("/v1/completions", body)["param"] == "prompt_logprobs"
