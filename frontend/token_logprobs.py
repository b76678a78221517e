"""Columns of Logprobs, as core sends them, into one entry a token.

Pure; knows ids and positions, never text.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

from nvserve.protocol.client_messages import TokenLogprob
from nvserve.protocol.messages import Logprobs
from nvserve.protocol.sampling import MAX_TOP_LOGPROBS


def output_entries(
    logprobs: Logprobs, tokens: Sequence[int], *, num_skipped: int
) -> list[TokenLogprob]:
    """One entry for each of the emit's new tokens, which start at its row `num_skipped`."""
    by_row = dict(_entries(logprobs, dict(enumerate(tokens, num_skipped))))
    return [by_row[num_skipped + index] for index in range(len(tokens))]


class PromptScores:
    """The scores of one prompt's tokens from position 1 on, each taken once.

    They stay columns until they are read: entries of a long prompt take long to make.
    """

    __slots__ = ("_prompt", "_runs", "num_taken")

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt = prompt
        self._runs: list[ScoreRun] = []
        self.num_taken = 0

    def take(self, logprobs: Logprobs) -> "ScoreRun | None":
        """What is new of these rows, which are positions; a replay brings some again."""
        start = self.num_taken + 1
        fresh = [row for row in logprobs.rows if row >= start]
        end = start + len(fresh)
        assert fresh == list(range(start, end)), f"scores of {fresh[:3]}..., due is {start}"
        if not fresh:
            return None
        run = ScoreRun(logprobs, start, self._prompt[start:end])
        self._runs.append(run)
        self.num_taken += len(fresh)
        return run

    def entries(self, num_tops: int) -> Iterator[TokenLogprob]:
        """Of positions 1, 2, ..., each made when it is asked for, with so many alternatives."""
        for run in self._runs:
            yield from run.entries(num_tops)


class ScoreRun:
    """Scores of consecutive positions of a prompt, from `start` on."""

    __slots__ = ("_ids", "_logprobs", "start")

    def __init__(self, logprobs: Logprobs, start: int, ids: Sequence[int]) -> None:
        self._logprobs: Final = logprobs
        self._ids: Final = ids
        self.start: Final = start

    def entries(self, num_tops: int = MAX_TOP_LOGPROBS) -> Iterator[TokenLogprob]:
        """One for each position, in order, with at most so many alternatives."""
        wanted = dict(enumerate(self._ids, self.start))
        return (entry for _, entry in _entries(self._logprobs, wanted, num_tops))


def _entries(
    logprobs: Logprobs, token_of: dict[int, int], most: int = MAX_TOP_LOGPROBS
) -> Iterator[tuple[int, TokenLogprob]]:
    """(row, entry) of the rows whose token is known, in their order; of alternatives the best."""
    chosen, values, ids = array("f"), array("f"), array("i")
    chosen.frombytes(logprobs.chosen)
    values.frombytes(logprobs.top_values)
    ids.frombytes(logprobs.top_ids)
    start = 0
    for row, logprob, num_tops in zip(logprobs.rows, chosen, logprobs.num_tops, strict=True):
        end = start + num_tops
        if row in token_of:
            last = min(end, start + most)
            yield (
                row,
                TokenLogprob(
                    token_id=token_of[row],
                    logprob=logprob,
                    top_ids=tuple(ids[start:last]),
                    top_logprobs=tuple(values[start:last]),
                ),
            )
        start = end
