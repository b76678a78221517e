"""Masks: words of several ids, grammars, and both together."""

from array import array

import pytest
from model_check.answer import EveryThird
from model_check.cases import assert_all_as_expected, make_world

from nvserve.core.constraint import Constraint
from nvserve.protocol.messages import FinishReason

VOCAB = 70


def forbidden(mask: bytes | None) -> set[int]:
    assert mask is not None
    assert len(mask) == 12
    bits = int.from_bytes(mask, "little")
    assert not bits >> VOCAB, "ids beyond the vocabulary are allowed"
    return {token for token in range(VOCAB) if not bits >> token & 1}


def test_the_last_id_of_a_word_is_forbidden_behind_its_others() -> None:
    constraint = Constraint(VOCAB, [[1, 2], [7, 1, 69], [1, 2, 3]])
    assert forbidden(constraint.mask(array("i", [7, 1]))) == {2, 69}
    assert forbidden(constraint.mask(array("i", [1, 2]))) == {3}
    assert constraint.mask(array("i", [2, 5])) is None
    assert constraint.mask(array("i", [9])) is None, "shorter than the word"


def test_a_word_gives_way_where_the_grammar_allows_nothing_else() -> None:
    class Only:
        error, is_over = "", False

        def mask(self) -> bytes:
            return (1 << 5).to_bytes(12, "little")

        def advance(self, token_id: int) -> None: ...

    constraint = Constraint(VOCAB, [[1, 5]], Only())
    assert forbidden(constraint.mask(array("i", [1]))) == set(range(VOCAB)) - {5}


class Twofold:
    """A grammar that allows id 5 and the end, 7, and from its second id on the end alone."""

    is_over, error = False, ""

    def __init__(self) -> None:
        self.allowed = 1 << 5 | 1 << 7

    def mask(self) -> bytes:
        return self.allowed.to_bytes(12, "little")

    def advance(self, token_id: int) -> None:
        self.allowed = 1 << 7


def test_an_end_that_is_ignored_waits_until_the_grammar_allows_nothing_else() -> None:
    constraint = Constraint(VOCAB, [], Twofold(), ignored={7})
    assert forbidden(constraint.mask(array("i", [1]))) == set(range(VOCAB)) - {5}
    constraint.advance(5)
    assert forbidden(constraint.mask(array("i", [1, 5]))) == set(range(VOCAB)) - {7}


def test_a_forbidden_word_makes_way_for_the_end_of_a_grammar() -> None:
    constraint = Constraint(VOCAB, [[1, 5]], Twofold(), ignored={7})
    assert forbidden(constraint.mask(array("i", [1]))) == set(range(VOCAB)) - {7}


def test_words_and_ignored_ends_give_way_where_the_request_allows_nothing_else() -> None:
    constraint = Constraint(VOCAB, [[1, 5], [1, 6]], choice=[5, 6])
    assert constraint.mask(array("i", [1])) is None
    constraint = Constraint(VOCAB, [[1, 5]], choice=[5, 6])
    assert forbidden(constraint.mask(array("i", [1]))) == {5}
    constraint = Constraint(VOCAB, [[1, 5]], Twofold(), choice=[5])
    assert forbidden(constraint.mask(array("i", [1]))) == set(range(VOCAB)) - {5, 7}
    constraint = Constraint(VOCAB, [], Twofold(), ignored={7}, choice=[7])
    assert forbidden(constraint.mask(array("i", [1]))) == set(range(VOCAB)) - {5, 7}


def test_a_request_knows_its_allowed_ids_where_it_has_words() -> None:
    world = make_world()
    words, choice = [[9, 9]], [9]
    request_id = world.submit([2, 9], max_tokens=3, bad_words=words, allowed_token_ids=choice)
    request = world.request(request_id)
    assert request.constraint is not None
    assert request.constraint.mask(request.tokens) is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [("", FinishReason.STOP), ("out of fuel", FinishReason.GRAMMAR)],
)
def test_a_request_ends_with_its_grammar(error: str, reason: FinishReason) -> None:
    world = make_world()
    request_id = world.submit([2, 3], max_tokens=12, grammar="every third", ignore_eos=True)
    request = world.request(request_id)
    assert request.must_wait
    assert request.constraint is not None
    matcher: object = request.constraint.matcher
    assert isinstance(matcher, EveryThird)
    assert request.finish_reason() is FinishReason.NONE
    matcher.error, matcher.is_over = error, True
    assert request.finish_reason() is reason


def test_a_replay_goes_on_with_the_grammar_where_it_stood() -> None:
    world = make_world()
    request_id = world.submit([2, 3], max_tokens=12, grammar="every third", ignore_eos=True)
    for _ in range(4):
        world.step()
    world.restart_core()
    world.run()
    assert_all_as_expected(world, [request_id])
    assert len(world.outcome(request_id)[0]) > 4
