"""Sampling through the whole runner, on one rank and two: noise, penalties, masks, logprobs."""

import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from step_driver import Ask, Case, Run, StepDriver, make_driver, run_ranks, save_model

from nvserve.protocol.messages import (
    Chunks,
    Logprobs,
    Masks,
    NewRows,
    SchedulerOutput,
    TableChanges,
    pack_ids,
    unpack_ids,
)
from nvserve.protocol.sampling import SamplingParams
from nvserve.workers.step_result import StepFault

VOCAB = 97
PROMPT = [11, 22, 33, 44, 33, 22]
NUM_NEW = 16
WARM = SamplingParams(temperature=0.8, ignore_eos=True)


class Tiny:
    """A model with flat logits, so that sampling has a choice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "model"
        self.model: Any = save_model(self.folder, "LlamaForCausalLM", initializer_range=0.06)
        self.driver: StepDriver = make_driver(self.folder, folder)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Float32 logits behind every token, [len(tokens), V]."""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([tokens])).logits[0]
        return logits


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("sampling"))


def company(num: int, start: int = 0) -> list[Ask]:
    """Other requests, of all kinds, with seeds of their own."""
    draw = random.Random(num + start)
    kinds = [
        WARM,
        SamplingParams(0.0, ignore_eos=True),
        SamplingParams(1.3, 0.8, 20, presence_penalty=1.0),
        SamplingParams(0.7, min_p=0.1, logprobs=3),
    ]
    return [
        Ask([draw.randrange(VOCAB) for _ in range(draw.randint(1, 20))], 10, kinds[i % 4], 50 + i)
        for i in range(start, start + num)
    ]


KINDS = {
    "plain": WARM,
    "top-k": SamplingParams(0.8, top_k=20),
    "top-p": SamplingParams(0.8, 0.7),
    "min-p": SamplingParams(0.8, min_p=0.05),
    "penalties": SamplingParams(0.8, frequency_penalty=0.5, repetition_penalty=1.2),
    "bias": SamplingParams(0.8, logit_bias={5: 1.5, 7: -2.0}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_seeded_sample_does_not_depend_on_slot_company_or_chunks(tiny: Tiny, kind: str) -> None:
    ask = Ask(PROMPT, NUM_NEW, KINDS[kind], seed=42)
    (alone,) = tiny.driver.generate([ask])
    assert len(set(alone)) > 4
    elsewhere = Ask(PROMPT, NUM_NEW, KINDS[kind], seed=42, slot=13, start_step=3)
    crowd = tiny.driver.generate([*company(9), elsewhere], chunk_tokens=4)
    assert crowd[-1] == alone


@pytest.mark.parametrize("kind", KINDS)
def test_a_seeded_sample_continues_after_a_preemption(tiny: Tiny, kind: str) -> None:
    (whole,) = tiny.driver.generate([Ask(PROMPT, NUM_NEW, KINDS[kind], seed=42)])
    for num_done in (1, 7, NUM_NEW - 1):
        rest = Ask(PROMPT, NUM_NEW - num_done, KINDS[kind], seed=42, emitted=whole[:num_done])
        assert tiny.driver.generate([*company(3), rest])[-1] == whole[num_done:]


def test_two_ranks_sample_what_one_does(tiny: Tiny, tmp_path: Path) -> None:
    asks = [Ask(PROMPT, NUM_NEW, params, seed=42) for params in KINDS.values()]
    cases = [Case([ask]) for ask in asks] + [Case([*asks, *company(8)], 5)]
    expected = [tiny.driver.generate(case.asks, chunk_tokens=case.chunk_tokens) for case in cases]
    assert run_ranks(tiny.folder, tmp_path, 2, cases) == expected


def test_different_seeds_give_different_samples(tiny: Tiny) -> None:
    outputs = tiny.driver.generate([Ask(PROMPT, 8, WARM, seed=seed) for seed in range(12)])
    assert len({tuple(output) for output in outputs}) == 12


def test_samples_follow_the_softmax_of_the_logits(tiny: Tiny) -> None:
    """First tokens over 1600 seeds against their probabilities."""
    num_rounds, counts = 100, torch.zeros(VOCAB)
    for first in range(0, 16 * num_rounds, 16):
        asks = [Ask(PROMPT, 1, WARM, seed=seed) for seed in range(first, first + 16)]
        for (token,) in tiny.driver.generate(asks):
            counts[token] += 1
    total = 16 * num_rounds
    probs = (tiny.logits(PROMPT)[-1] / 0.8).softmax(-1)
    deviation = (counts - total * probs) / (total * probs * (1 - probs)).sqrt()
    assert float(deviation.abs().max()) < 4.5


def greedy(tiny: Tiny, params: SamplingParams, num_new: int = NUM_NEW) -> list[int]:
    return tiny.driver.generate([*company(2), Ask(PROMPT, num_new, params)])[-1]


def test_penalties_are_those_of_a_plain_loop(tiny: Tiny) -> None:
    params = SamplingParams(
        0.0, presence_penalty=0.3, frequency_penalty=0.2, repetition_penalty=1.3
    )
    tokens = list(PROMPT)
    for _ in range(NUM_NEW):
        logits = tiny.logits(tokens)[-1].clone()
        for token in set(tokens):
            logits[token] /= 1.3 if logits[token] > 0 else 1 / 1.3
        for token in tokens[len(PROMPT) :]:
            logits[token] -= 0.2
        for token in set(tokens[len(PROMPT) :]):
            logits[token] -= 0.3
        tokens.append(int(logits.argmax()))
    assert greedy(tiny, params) == tokens[len(PROMPT) :]


def test_penalties_of_a_slot_end_with_its_request(tiny: Tiny) -> None:
    strong = SamplingParams(0.0, frequency_penalty=2.0, repetition_penalty=1.5)
    weak = SamplingParams(0.0, frequency_penalty=1e-6)
    plain = tiny.driver.generate([Ask(PROMPT, NUM_NEW)])
    assert tiny.driver.generate([Ask(PROMPT, NUM_NEW, strong)]) != plain
    assert tiny.driver.generate([Ask(PROMPT, NUM_NEW, weak)]) == plain


def test_logit_bias_moves_the_choice(tiny: Tiny) -> None:
    assert greedy(tiny, SamplingParams(0.0, logit_bias={61: 100.0})) == [61] * NUM_NEW
    first = greedy(tiny, SamplingParams(0.0))[0]
    banned = greedy(tiny, SamplingParams(0.0, logit_bias={first: -100.0}))
    assert first not in banned


def test_allowed_ids_are_the_only_ones_sampled(tiny: Tiny) -> None:
    allowed = [0, 31, 32, 96]
    output = greedy(tiny, SamplingParams(1.5, allowed_token_ids=allowed), 40)
    assert set(output) == set(allowed)


def test_allowed_ids_of_a_slot_end_with_its_request(tiny: Tiny) -> None:
    plain = tiny.driver.generate([Ask(PROMPT, NUM_NEW)])
    only = SamplingParams(0.0, allowed_token_ids=[9], logit_bias={3: 1.0}, bad_words=[[4]])
    assert tiny.driver.generate([Ask(PROMPT, 3, only)]) == [[9, 9, 9]]
    neutral = SamplingParams(0.0, logprobs=0)
    assert tiny.driver.generate([Ask(PROMPT, NUM_NEW, neutral)]) == plain


def test_bad_words_of_one_token_never_come(tiny: Tiny) -> None:
    plain = greedy(tiny, SamplingParams(0.0, logprobs=0))
    words = [[token] for token in set(plain)] + [[1, 2]]
    output = greedy(tiny, SamplingParams(0.0, bad_words=words))
    assert not set(output) & set(plain)


def test_bad_words_that_forbid_every_token_are_ignored(tiny: Tiny) -> None:
    params = SamplingParams(0.0, allowed_token_ids=[5, 6], bad_words=[[5], [6]])
    assert set(greedy(tiny, params)) <= {5, 6}


def test_stop_ids_wait_for_min_tokens(tiny: Tiny) -> None:
    plain = greedy(tiny, SamplingParams(0.0, logprobs=0))
    stop = plain[0]
    params = SamplingParams(0.0, min_tokens=5, stop_token_ids=[stop], logit_bias={stop: 100.0})
    output = greedy(tiny, params)
    assert stop not in output[:5]
    assert output[5] == stop


def test_min_tokens_counts_tokens_from_before_a_preemption(tiny: Tiny) -> None:
    params = SamplingParams(0.0, min_tokens=5, stop_token_ids=[7], logit_bias={7: 100.0})
    (whole,) = tiny.driver.generate([Ask(PROMPT, 8, params)])
    assert whole.index(7) == 5
    rest = tiny.driver.generate([Ask(PROMPT, 5, params, emitted=whole[:3])])
    assert rest == [whole[3:]]


# -- logprobs ------------------------------------------------------------------------------------


def floats(column: bytes) -> list[float]:
    return array("f", column).tolist()


def row_of(logprobs: Logprobs, index: int) -> tuple[float, list[int], list[float]]:
    """Chosen logprob, best ids and their logprobs of entry `index`."""
    first = sum(logprobs.num_tops[:index])
    tops = slice(first, first + logprobs.num_tops[index])
    chosen, values = floats(logprobs.chosen), floats(logprobs.top_values)
    return chosen[index], unpack_ids(logprobs.top_ids)[tops], values[tops]


@pytest.mark.parametrize("num_tops", [0, 1, 5])
def test_logprobs_are_those_of_the_model_before_penalties(tiny: Tiny, num_tops: int) -> None:
    params = SamplingParams(0.7, logprobs=num_tops, presence_penalty=0.4, logit_bias={3: 2.0})
    run = tiny.driver.run([Ask(PROMPT, 6, params, seed=3), *company(2)])[0]
    expected = tiny.logits(PROMPT + run.output).log_softmax(-1)[len(PROMPT) - 1 : -1]
    assert len(run.logprobs) == 6
    for index, (message, row) in enumerate(zip(run.logprobs, expected, strict=True)):
        # Our request is the first of the decode list, but behind others while it prefills.
        where = message.rows.index(run.rows[index])
        chosen, ids, values = row_of(message, where)
        assert chosen == pytest.approx(float(row[run.output[index]]), abs=1e-4)
        assert ids == row.topk(num_tops).indices.tolist()
        assert values == pytest.approx(row.topk(num_tops).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 64])
def test_prompt_logprobs_score_every_position_once(tiny: Tiny, chunk_tokens: int) -> None:
    prompt = [(7 * i) % VOCAB for i in range(18)]
    ask = Ask(prompt, 2, SamplingParams(0.0, prompt_logprobs=2))
    run = tiny.driver.run([*company(2), ask], chunk_tokens=chunk_tokens)[-1]
    expected = tiny.logits(prompt).log_softmax(-1)
    positions = list[int]()
    for message in run.prompt_logprobs:
        for index, position in enumerate(message.rows):
            chosen, ids, _ = row_of(message, index)
            row = expected[position - 1]
            assert chosen == pytest.approx(float(row[prompt[position]]), abs=1e-4)
            assert ids == row.topk(2).indices.tolist()
            positions.append(position)
    assert positions == list(range(1, len(prompt)))


# -- masks and faults ----------------------------------------------------------------------------


def single_step(tiny: Tiny, step: SchedulerOutput) -> list[int]:
    return unpack_ids(tiny.driver.runner.launch(step).result().tokens)


def two_prompts(params: SamplingParams) -> SchedulerOutput:
    """Slots 2 and 5 prefill one prompt each."""
    new = NewRows([2, 5], [params] * 2, [0, 0], [b"", b""], [b"", b""])
    tables = TableChanges([2, 5], [0, 0], [2, 2], pack_ids([1, 2, 3, 4]))
    chunks = Chunks([2, 5], [0, 0], [6, 6], pack_ids(PROMPT * 2), [True, True])
    return SchedulerOutput(0, 0, True, new=new, tables=tables, chunks=chunks)


def test_a_step_mask_holds_for_its_slot_and_its_step_only(tiny: Tiny) -> None:
    masks = Masks([5], pack_ids([0, 0, 1 << 6, 0]))  # token 70 alone
    first = two_prompts(SamplingParams(0.0))
    free = single_step(tiny, first)
    masked = SchedulerOutput(
        0,
        1,
        True,
        freed=[2, 5],
        new=first.new,
        tables=first.tables,
        chunks=first.chunks,
        masks=masks,
    )
    assert single_step(tiny, masked) == [free[0], 70]
    decode = SchedulerOutput(0, 2, True, joins=[2, 5])
    assert single_step(tiny, decode)[1] != 70
    single_step(tiny, SchedulerOutput(0, 3, freed=[2, 5]))


@pytest.mark.parametrize("is_full_tail", [False, True])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_fail_the_step_and_name_the_row(
    tmp_path: Path, is_full_tail: bool, poison: float
) -> None:
    save_model(tmp_path / "model", "LlamaForCausalLM")
    driver = make_driver(tmp_path / "model", tmp_path)
    driver.runner.model.embedding[80] = poison
    empty = [b""] * 2
    step = SchedulerOutput(
        0,
        0,
        is_full_tail,
        new=NewRows([0, 7], [SamplingParams()] * 2, [0, 1], empty, empty),
        tables=TableChanges([0, 7], [0, 0], [1, 1], pack_ids([1, 2])),
        chunks=Chunks([0, 7], [0, 0], [2, 2], pack_ids([1, 2, 3, 80]), [True, True]),
    )
    with pytest.raises(StepFault, match=r"row 1 \(slot 7\)"):
        driver.runner.launch(step).result()


def test_a_step_without_rows_has_an_empty_answer(tiny: Tiny) -> None:
    assert single_step(tiny, SchedulerOutput(0, 0)) == []


def test_runs_remember_the_rows_of_their_tokens(tiny: Tiny) -> None:
    run: Run = tiny.driver.run([Ask(PROMPT, 3)])[0]
    assert run.rows == [0, 0, 0]
