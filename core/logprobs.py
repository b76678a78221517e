"""Cuts and joins Logprobs columns; the values themselves are never looked at."""

from bisect import bisect_left
from itertools import pairwise

from nvserve.protocol.messages import Logprobs


def split(logprobs: Logprobs) -> dict[int, Logprobs]:
    """One piece a row, by row; inside a piece the row is 0: the only new token of its request."""
    pieces = {}
    first_top = 0
    for index, (row, num_tops) in enumerate(zip(logprobs.rows, logprobs.num_tops, strict=True)):
        tops = slice(4 * first_top, 4 * (first_top + num_tops))
        pieces[row] = Logprobs(
            rows=[0],
            chosen=logprobs.chosen[4 * index : 4 * index + 4],
            num_tops=[num_tops],
            top_ids=logprobs.top_ids[tops],
            top_values=logprobs.top_values[tops],
        )
        first_top += num_tops
    return pieces


def join(left: Logprobs | None, right: Logprobs | None, *, shift: int = 0) -> Logprobs | None:
    """Both, the rows of `right` moved by `shift`."""
    if right is not None and shift:
        right = Logprobs(
            [row + shift for row in right.rows],
            right.chosen,
            right.num_tops,
            right.top_ids,
            right.top_values,
        )
    if left is None or right is None:
        return right if left is None else left
    return Logprobs(
        left.rows + right.rows,
        left.chosen + right.chosen,
        left.num_tops + right.num_tops,
        left.top_ids + right.top_ids,
        left.top_values + right.top_values,
    )


def between(logprobs: Logprobs, start: int, end: int) -> Logprobs | None:
    """The rows from position `start` up to `end`; None without any, or when they do not ascend."""
    rows = logprobs.rows
    first, last = bisect_left(rows, start), bisect_left(rows, end)
    is_ascending = all(left < right for left, right in pairwise(rows))
    if first >= last or not is_ascending:
        return None
    first_top = sum(logprobs.num_tops[:first])
    tops = slice(4 * first_top, 4 * (first_top + sum(logprobs.num_tops[first:last])))
    return Logprobs(
        rows=rows[first:last],
        chosen=logprobs.chosen[4 * first : 4 * last],
        num_tops=logprobs.num_tops[first:last],
        top_ids=logprobs.top_ids[tops],
        top_values=logprobs.top_values[tops],
    )
