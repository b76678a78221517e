"""Stop strings: the first to complete wins, however the text was cut; little text waits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvserve.frontend.stop_strings import StopMatcher

LETTERS = "abc"
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=4)


def run(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops, include=include)
    out: list[str] = []
    for piece in pieces:
        text, is_stopped = matcher.feed(piece)
        out.append(text)
        if is_stopped:
            return out, True
    return [*out, matcher.flush()], False


def brute_force(text: str, stops: list[str], *, include: bool) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end if include else end - max(map(len, ended))], True
    return text, False


@settings(max_examples=2000, deadline=None)
@given(st.lists(st.text(LETTERS, max_size=4), max_size=12), STOPS, st.booleans())
def test_any_cut_of_the_text_gives_what_brute_force_gives(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    out, is_stopped = run(pieces, stops, include=include)
    assert ("".join(out), is_stopped) == brute_force("".join(pieces), stops, include=include)


@settings(max_examples=1000, deadline=None)
@given(st.text(LETTERS, max_size=20), STOPS)
def test_only_the_longest_possible_prefix_of_a_stop_waits(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops, include=False)
    fed, out = "", ""
    for char in text:
        piece, is_stopped = matcher.feed(char)
        fed, out = fed + char, out + piece
        if is_stopped:
            return
        waiting = max(
            (n for stop in stops for n in range(1, len(stop)) if fed.endswith(stop[:n])), default=0
        )
        assert out == fed[: len(fed) - waiting]


@pytest.mark.parametrize("cut", range(1, 10))
def test_no_part_of_a_stop_leaks_at_any_token_border(cut: int) -> None:
    text = "ABCDEFGHIJ"
    assert run([text[:cut], text[cut:]], ["DEFGHIJ"]) == (
        ["ABC"[:cut], "ABC"[cut:]],
        True,
    )


def test_text_behind_a_stop_in_the_middle_of_a_token_is_dropped() -> None:
    assert run(["on", "e END two"], ["END"]) == (["on", "e "], True)


def test_a_stop_that_is_never_completed_is_released() -> None:
    assert run(["xAB", "ABx", "AB"], ["ABC"]) == (["x", "ABABx", "", "AB"], False)


def test_the_shorter_of_two_stops_ends_first() -> None:
    assert run(["xabc"], ["abc", "ab"]) == (["x"], True)


def test_a_stop_inside_a_longer_one_ending_together_cuts_at_the_longer() -> None:
    assert run(["xabc"], ["bc", "abc"]) == (["x"], True)


def test_an_emoji_can_be_a_stop() -> None:
    assert run(["a👩", "\u200d", "👧b"], ["👩\u200d👧"]) == (["a", "", ""], True)


def test_a_stop_can_be_part_of_the_output() -> None:
    assert run(["aE", "NDb"], ["END"], include=True) == (["a", "END"], True)
