"""Finds stop strings in a stream of text, across any token border, holding back only what it must.

The match that completes first wins; of those that complete with the same character, the longest.
So the answer does not depend on how the text was cut. While matches do not count yet, text is only
kept in mind: a match may begin in it. Knows text only.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """Where a stop string lies: indices into the text fed last; `start` may be negative."""

    start: int
    end: int


class _Pattern:
    """One stop string and how much of it the text so far ends with (Knuth, Morris and Pratt)."""

    __slots__ = ("first", "matched", "shorter", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.first = text[0]
        self.matched = 0
        self.shorter = _borders(text)

    def feed(self, text: str, *, counts: bool) -> int:
        """Index behind the first completed match in `text`, or 0, also where none counts."""
        pattern, shorter, matched = self.text, self.shorter, self.matched
        if not matched and self.first not in text:
            return 0
        for index, char in enumerate(text):
            while matched and char != pattern[matched]:
                matched = shorter[matched - 1]
            if char == pattern[matched]:
                matched += 1
                if matched == len(pattern):
                    if counts:
                        return index + 1
                    matched = shorter[matched - 1]
        self.matched = matched
        return 0


def _borders(text: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0]
    length = 0
    for char in text[1:]:
        while length and char != text[length]:
            length = borders[length - 1]
        length += char == text[length]
        borders.append(length)
    return borders


class StopMatcher:
    """One request's stop strings; none of them may be empty."""

    __slots__ = ("_held", "_include", "_patterns")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._patterns = [_Pattern(stop) for stop in dict.fromkeys(stops)]
        self._include = include  # put out the stop string itself
        self._held = ""

    def feed(self, text: str, *, counts: bool = True) -> tuple[str, bool]:
        """The text that may go out now, and whether a stop string ended the stream.

        One that would end in a text that does not count is none.
        """
        if not text:
            return "", False
        match = self._first_match(text, counts=counts)
        joined = self._held + text
        if match is not None:
            cut = len(self._held) + (match.end if self._include else match.start)
            self._held = ""
            return joined[:cut], True
        keep = max(pattern.matched for pattern in self._patterns)
        cut = len(joined) - keep
        self._held = joined[cut:]
        return joined[:cut], False

    def flush(self) -> str:
        """What was held back; the stream has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, *, counts: bool) -> Match | None:
        best: Match | None = None
        for pattern in self._patterns:
            end = pattern.feed(text, counts=counts)
            if not end:
                continue
            match = Match(end - len(pattern.text), end)
            if best is None or (match.end, match.start) < (best.end, best.start):
                best = match
        return best
