"""Texts of very many token ids, decoded in turns: the event loop serves others in between.

An id takes half a microsecond or, by a window, twenty; a body may hold millions.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Final

from nvserve.frontend.detokenizer import Vocabulary
from nvserve.frontend.exchange import Exchange
from nvserve.frontend.turns import Turns

INLINE_IDS: Final = 2048  # fewer in all are decoded at once
STRIDE_IDS: Final = 256  # between looks at the clock
PIECE_S: Final = 0.002  # of one turn


class IdTexts:
    """The way from ids to text for handlers."""

    def __init__(self, vocabulary: Vocabulary, turns: Turns) -> None:
        self._vocabulary: Final = vocabulary
        self._turns: Final = turns

    async def of(
        self, sequences: Sequence[Sequence[int]], exchange: Exchange, *, skip_special: bool = True
    ) -> list[str]:
        """What `Vocabulary.decode` says to each sequence.

        Of many ids it raises what `Turns.one` does: for want of a turn, or of the client.
        """
        texts: list[str] = []
        work = _decoding(sequences, texts, self._vocabulary, skip_special=skip_special)
        if sum(map(len, sequences)) <= INLINE_IDS:
            for _ in work:
                pass
        while len(texts) < len(sequences):
            async with self._turns.one(exchange):
                end = time.monotonic() + PIECE_S
                for _ in work:
                    if time.monotonic() >= end:
                        break
        return texts


def _decoding(
    sequences: Sequence[Sequence[int]],
    texts: list[str],
    vocabulary: Vocabulary,
    *,
    skip_special: bool,
) -> Iterator[None]:
    """Put each sequence's text behind `texts`, in as many steps as there are strides."""
    for ids in sequences:
        state = vocabulary.detokenizer((), skip_special=skip_special, is_start=True)
        parts = []
        for start in range(0, len(ids), STRIDE_IDS):
            parts.append("".join(map(state.feed, ids[start : start + STRIDE_IDS])))
            yield
        texts.append("".join(parts) + state.flush())
