"""What limits the next token of one request beyond its sampling: a grammar, words it may not say.

Both need the last token on the host, so such a request runs every second step. Makes the row's bit
mask; knows ids only.
"""

from array import array
from collections.abc import Collection, Sequence
from typing import Final, Protocol


class Matcher(Protocol):
    """A compiled grammar, behind the ids it was advanced over."""

    def mask(self) -> bytes:
        """The ids that may follow: int32 [ceil(vocab / 32)], least bit first, at least one set."""

    def advance(self, token_id: int) -> None:
        """Take an id that the mask allowed."""

    @property
    def is_over(self) -> bool:
        """Nothing may follow: the text is complete, or the grammar cannot go on."""

    @property
    def error(self) -> str:
        """Why it cannot go on; empty while it can, and when it is complete."""


class Constraint:
    """A request's matcher, if it has one, and its words of several tokens.

    A word counts as said when all its ids stand in a row, those of the prompt included. `ignored`
    are the ids that would end the text although the grammar could go on. `choice` are the ids that
    the request allows at all, where those are not all: the worker sees to them.
    """

    def __init__(
        self,
        vocab_size: int,
        words: Sequence[Sequence[int]] = (),
        matcher: Matcher | None = None,
        ignored: Collection[int] = (),
        choice: Collection[int] = (),
    ) -> None:
        everything = (1 << vocab_size) - 1
        self._everything: Final = everything.to_bytes(4 * -(-vocab_size // 32), "little")
        chosen = bytearray(len(self._everything))
        for token_id in choice:
            chosen[token_id >> 3] |= 1 << (token_id & 7)
        self._choice: Final = int.from_bytes(chosen, "little") or everything
        self._words: Final = [array("i", word) for word in words]
        self._ignored: Final = ignored
        self.matcher: Final = matcher

    def mask(self, tokens: "array[int]") -> bytes | None:
        """The mask of the id behind `tokens`; None when every id may follow.

        Words, and then what is ignored, give way where they would leave nothing that the grammar
        and the request's choice allow.
        """
        allowed = None if self.matcher is None else self.matcher.mask()
        last_ids = [
            word[-1] for word in self._words if tokens[-len(word) + 1 :] == word[: len(word) - 1]
        ]
        if last_ids:
            allowed = self._without(allowed or self._everything, last_ids) or allowed
        if allowed is not None and self._ignored:
            allowed = self._without(allowed, self._ignored) or allowed
        return allowed

    def advance(self, token_id: int) -> None:
        """Take the id that was sampled."""
        if self.matcher is not None and not self.matcher.is_over:
            self.matcher.advance(token_id)

    def _without(self, mask: bytes, token_ids: Collection[int]) -> bytes | None:
        """The mask with these ids forbidden; None when that leaves none of the choice."""
        bits = bytearray(mask)
        for token_id in token_ids:
            bits[token_id >> 3] &= ~(1 << (token_id & 7))
        return bytes(bits) if int.from_bytes(bits, "little") & self._choice else None
