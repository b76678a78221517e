"""Texts of very many token ids, decoded in turns: the event loop serves others in between.

An id takes half a microsecond or, by a window, twenty; a body may hold millions.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from nvserve.frontend.detokenizer import Vocabulary
from nvserve.frontend.turns import Client, Turns

INLINE_IDS: Final = 2048  # fewer in all are decoded at once
STRIDE_IDS: Final = 256  # between looks at the clock


class IdTexts:
    """The way from ids to text for handlers."""

    def __init__(self, vocabulary: Vocabulary, turns: Turns) -> None:
        self._vocabulary: Final = vocabulary
        self._turns: Final = turns

    async def of(
        self, sequences: Sequence[Sequence[int]], client: Client, *, skip_special: bool = True
    ) -> list[str]:
        """What `Vocabulary.decode` says to each sequence.

        Of many ids it raises what `Turns.work_off` does: for want of time, or of the client.
        """
        texts: list[str] = []
        work = _decoding(sequences, texts, self._vocabulary, skip_special=skip_special)
        if sum(map(len, sequences)) > INLINE_IDS:
            await self._turns.work_off(work, client)
        else:
            for _ in work:
                pass
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
