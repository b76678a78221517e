"""Sums over the ranks of one machine, through memory that all of them read and write.

Each rank writes its addend to its own part of that memory. One-shot: every rank then puts its
addend into all others' inboxes. Two-shot: every rank sums its share of the columns and reads the
others' sums, so that a column crosses the links twice instead of once for each other rank. Both add
in float32 and in rank order and round once, so all ranks get the same bits, whichever is used.

In one shot nobody says that something has come: an inbox is zero where nothing has, and what is put
there is never zero, but for its sign. A row has three inboxes, in turn. One is emptied by the call
behind the one that read it, and only then will anybody fill it again: who comes to the second call
from here has had this rank's addend of the first.

In two shots ranks meet by counting calls: a program tells its twins on the other ranks that its
rank has come to call n, and waits until all have. There is no meeting at the end: a place may be
written again once its rank has been through the next call, at another place, since nobody comes to
that one before it has read all of this one. So consecutive calls must use different places.

N columns; "addresses" are int64 tensors [size] on the device, one for each rank, in rank order.
"""

from dataclasses import dataclass
from typing import Final

import torch

from nvserve.kernels.room import new_rows

NUM_INBOXES: Final = 3  # of a row, in turn


@dataclass(frozen=True)
class Meeting:
    """What the programs of all ranks know each other by."""

    rank: int
    size: int
    max_rows: int
    max_programs: int  # the same on all ranks, and all of them find place on each GPU
    inbox_rows: int  # the most that can be summed in one shot
    inboxes: torch.Tensor  # addresses of [NUM_INBOXES, inbox_rows, size - 1, N], by sender
    turns: torch.Tensor  # int32 [inbox_rows]: the inbox of each row's next sum; ours alone
    # In two shots: addresses of int32 [2, max_rows, size], each program's last call, by rank
    flags: torch.Tensor
    calls: torch.Tensor  # int32 [max_rows]: how many a program has been through; ours alone
    given_up: torch.Tensor  # int32 [1] on the device: set once a program has seen `abort`
    abort: torch.Tensor  # int32 [1] in pinned host memory: any other value than 0 ends all waits


@dataclass(frozen=True)
class Addends:
    """One place: what the ranks add up there, and the sums of their shares when in two shots."""

    meeting: Meeting
    mine: torch.Tensor  # [max_rows, N], of this rank
    all: torch.Tensor  # addresses of every rank's `mine`, for two shots
    sums: torch.Tensor  # addresses of every rank's [max_rows, N] of sums


def sum_rows(addends: Addends, num_rows: int, *, is_two_shot: bool) -> torch.Tensor:
    """The sum of the first num_rows rows over all ranks: a new [num_rows, N].

    Every rank calls this alike. Garbage once the meeting was aborted. In one shot, a sum of nothing
    but zeros is zero of either sign.
    """
    return _reduce(addends, num_rows, None, None, 0.0, is_two_shot)


def sum_add_rms_norm(
    addends: Addends,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    is_two_shot: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """norm.add_rms_norm of sum_rows: (normalized sum + residual, residual).

    residual [R, N] is contiguous and updated in place; weight is [N].
    """
    assert residual.is_contiguous(), "residual is updated in place: it must be contiguous"
    return _reduce(addends, len(residual), residual, weight, eps, is_two_shot), residual


def _reduce(
    addends: Addends,
    num_rows: int,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    is_two_shot: bool,
) -> torch.Tensor:
    # Triton is absent from CPU-only installs.
    from nvserve.kernels import all_reduce_one_shot, all_reduce_two_shot

    out = new_rows(addends.mine, num_rows, addends.mine.shape[1])
    if num_rows:
        launch = all_reduce_two_shot.launch if is_two_shot else all_reduce_one_shot.launch
        launch(addends, out, residual, weight, eps)
    return out
