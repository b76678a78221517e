"""Columns of Logprobs, as core sends them, into one entry a token.

Pure; knows ids and positions, never text.
"""

from array import array
from collections.abc import Iterator, Sequence

from nvserve.protocol.client_messages import TokenLogprob
from nvserve.protocol.messages import Logprobs, unpack_ids


def output_entries(
    logprobs: Logprobs, tokens: Sequence[int], *, num_skipped: int
) -> list[TokenLogprob]:
    """One entry for each of the emit's new tokens, which start at its row `num_skipped`."""
    by_row = dict(_entries(logprobs, dict(enumerate(tokens, num_skipped))))
    return [by_row[num_skipped + index] for index in range(len(tokens))]


class PromptScores:
    """The scores of one prompt's tokens from position 1 on, each taken once."""

    __slots__ = ("_prompt", "entries")

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt = prompt
        self.entries: list[TokenLogprob] = []  # of positions 1, 2, ...

    def take(self, logprobs: Logprobs) -> list[TokenLogprob]:
        """What is new of these rows, which are positions; a replay brings some again."""
        start = len(self.entries) + 1
        wanted = {row: self._prompt[row] for row in logprobs.rows if row >= start}
        fresh = list(_entries(logprobs, wanted))
        positions = [position for position, _ in fresh]
        expected = list(range(start, start + len(fresh)))
        assert positions == expected, f"scores of {positions[:3]}..., due is {start}"
        self.entries += [entry for _, entry in fresh]
        return [entry for _, entry in fresh]


def _entries(logprobs: Logprobs, token_of: dict[int, int]) -> Iterator[tuple[int, TokenLogprob]]:
    """(row, entry) of the rows whose token is known, in their order."""
    chosen, values = array("f"), array("f")
    chosen.frombytes(logprobs.chosen)
    values.frombytes(logprobs.top_values)
    ids = unpack_ids(logprobs.top_ids)
    start = 0
    for row, logprob, num_tops in zip(logprobs.rows, chosen, logprobs.num_tops, strict=True):
        end = start + num_tops
        if row in token_of:
            yield (
                row,
                TokenLogprob(
                    token_id=token_of[row],
                    logprob=logprob,
                    top_ids=tuple(ids[start:end]),
                    top_logprobs=tuple(values[start:end]),
                ),
            )
        start = end
