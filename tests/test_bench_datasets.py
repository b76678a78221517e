"""Prompts and arrival times: the same for the same seed, and what the flags promise."""

import json
import math
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from nvserve.scripts.bench.datasets import (
    BadDataset,
    Question,
    arrivals_s,
    random_questions,
    read_questions,
)


def test_random_prompts_depend_on_the_seed_alone() -> None:
    first = random_questions(5, input_len=8, output_len=4, range_ratio=0.5, seed=3)
    assert first == random_questions(5, input_len=8, output_len=4, range_ratio=0.5, seed=3)
    assert first != random_questions(5, input_len=8, output_len=4, range_ratio=0.5, seed=4)


def test_random_lengths_fill_the_range_and_ids_stay_below_the_limit() -> None:
    questions = random_questions(400, input_len=10, output_len=20, range_ratio=0.5, max_id=7)
    assert {q.num_prompt_tokens for q in questions} == set(range(5, 16))
    assert {q.max_tokens for q in questions} == set(range(10, 31))
    assert {i for q in questions for i in q.prompt} == set(range(7))


def test_without_a_range_every_length_is_exact() -> None:
    questions = random_questions(20, input_len=10, output_len=20)
    assert {(q.num_prompt_tokens, q.max_tokens) for q in questions} == {(10, 20)}


def test_a_short_length_never_becomes_zero() -> None:
    questions = random_questions(50, input_len=1, output_len=1, range_ratio=0.9)
    assert min(q.num_prompt_tokens for q in questions) == 1


def test_sharegpt_takes_the_first_human_turn_and_skips_other_conversations(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    human = {"from": "human", "value": "What news?"}
    assistant = {"from": "gpt", "value": "None, my lord."}
    chats = [{"conversations": [human, assistant]}, {"conversations": [assistant]}]
    path.write_text(json.dumps(chats))
    assert read_questions(path, 2, output_len=9, seed=0) == [Question("What news?", 9)] * 2


def test_json_lines_may_hold_ids_and_their_own_lengths(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": [1, 2], "output_tokens": 3.0}\n\n{"prompt": "Who?"}\n')
    questions = read_questions(path, 2, output_len=9, seed=0)
    assert sorted(questions, key=lambda q: q.max_tokens) == [
        Question([1, 2], 3),
        Question("Who?", 9),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "holds no prompt"), ("{", "neither"), ('{"text": "x"}', 'entry 1: no "prompt"')],
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(BadDataset, match=message):
        read_questions(path, 1, output_len=1, seed=0)


@pytest.mark.parametrize("length", ['"x"', "-3", "[1]", "1e400", "2.5", "true"])
def test_a_length_that_is_none_is_refused_by_its_entry(tmp_path: Path, length: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "Who?"}}\n{{"prompt": "Who?", "output_tokens": {length}}}\n')
    with pytest.raises(BadDataset, match="entry 2: output_tokens must be a positive integer"):
        read_questions(path, 1, output_len=1, seed=0)


def test_turns_of_another_form_are_no_conversation(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text('[{"conversations": ["x"]}, {"conversations": [null]}, {"conversations": 3}]')
    with pytest.raises(BadDataset, match="holds no prompt"):
        read_questions(path, 1, output_len=1, seed=0)


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 5.0, math.inf])
def test_arrivals_ascend_and_keep_the_mean_rate(burstiness: float) -> None:
    times = arrivals_s(1000, 20.0, burstiness, Random(1))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(50.0, abs=0.06)


def test_a_poisson_process_has_a_gap_deviation_equal_to_its_mean_and_bursts_more() -> None:
    def spread(burstiness: float) -> float:
        times = arrivals_s(20_000, 10.0, burstiness, Random(2))
        gaps = [b - a for a, b in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        return math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean

    assert spread(1.0) == pytest.approx(1.0, abs=0.05)
    assert spread(0.25) == pytest.approx(2.0, abs=0.15)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrivals_s(3, math.inf, 1.0, Random(0)) == [0.0, 0.0, 0.0]
