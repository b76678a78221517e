"""Answers sent whole: what is kept of a choice while it runs, and what comes of it at the end."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from nvserve.frontend.generation import Delta
from nvserve.frontend.responses import Collector
from nvserve.protocol.client_messages import TokenLogprob

FIRST, SECOND = (TokenLogprob(token_id=token_id, logprob=-0.5) for token_id in (7, 8))


def choice(index: int) -> Any:
    return SimpleNamespace(index=index)


def test_deltas_are_joined_by_choice() -> None:
    collector = Collector(2)
    collector.sink(choice(0), Delta("a", [7], [FIRST], None))
    collector.sink(choice(1), Delta("x", [9, 10], None, None))
    collector.sink(choice(0), Delta("", [], [], None))
    collector.sink(choice(0), Delta("b", [8], [SECOND], "stop"))
    collector.sink(choice(1), Delta("", [], None, "length"))
    one, two = (collector.joined(choice(index)) for index in range(2))
    assert (one.text, list(one.token_ids), one.logprobs) == ("ab", [7, 8], [FIRST, SECOND])
    assert (two.text, list(two.token_ids), two.logprobs) == ("x", [9, 10], None)
    assert (one.finish_reason, two.finish_reason) == ("stop", "length")


def test_scores_that_were_asked_for_are_none_without_a_token() -> None:
    collector = Collector(1)
    collector.sink(choice(0), Delta("", [], [], "length"))
    assert collector.joined(choice(0)).logprobs == []


@pytest.mark.parametrize("has_logprobs", [False, True])
def test_an_answer_gives_a_collection_nothing_to_look_at(has_logprobs: bool) -> None:
    collector, one = Collector(1), choice(0)
    gc.collect()
    num_before = len(gc.get_objects())
    for number in range(1000):
        scores = [TokenLogprob(token_id=number, logprob=-0.5)] if has_logprobs else None
        collector.sink(one, Delta(f"text {number}", [number], scores, None))
    gc.collect()
    assert len(gc.get_objects()) < num_before + 100  # the process may have made others meanwhile
