"""What surrounds the model in a decode step: read the rows of the batch, and move them on.

Each is one kernel, since in a small model the launches are the cost. S slots, R rows of the step, M
blocks of a block table.
"""

from typing import Final, NamedTuple

import torch

from nvserve.kernels import reference_step
from nvserve.kernels.dispatch import uses_triton

BAD_TOKEN: Final = -1  # in place of a sampled id: the row's logits were not finite


class DecodeRows(NamedTuple):
    """One token for each row; new tensors, but for the block tables of whoever asked."""

    tokens: torch.Tensor  # [R] int64, the last one of each row, whose KV the step writes
    positions: torch.Tensor  # [R] int64, of those
    next_positions: torch.Tensor  # [R] int64, of the tokens that the step samples
    slot_mapping: torch.Tensor  # [R] int64, where the KV goes
    seq_lens: torch.Tensor  # [R] int32, keys to attend to, the new one included


def gather_rows(
    rows: torch.Tensor,
    last_token: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    step_tables: torch.Tensor,
    block_size: int,
) -> DecodeRows:
    """Read slots rows [R] int64 from last_token and lengths [S] int64 and block_table [S, M] int32.

    Their block tables are written to step_tables [>= R, M] int32, as far as seq_lens reaches; what
    lies behind is left as it is. All tensors are contiguous; every length is under M * block_size.
    """
    arguments = (rows, last_token, lengths, block_table, step_tables, block_size)
    if not uses_triton(rows):
        return DecodeRows(*reference_step.gather_rows(*arguments))
    # Triton is absent from CPU-only installs, so its kernels load with their first use.
    from nvserve.kernels import decode_step_triton

    return DecodeRows(*decode_step_triton.gather_rows(*arguments))


def advance_rows(
    slots: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor | None,
    new_lengths: torch.Tensor,
    last_token: torch.Tensor,
    lengths: torch.Tensor,
    scratch: int,
) -> torch.Tensor:
    """Slots [R] int64 get ids [R] int64 as their last token, behind new_lengths [R] int64 others.

    An id is bad if negative or, with values [R] float32, where its value is not finite: last_token
    becomes 0 then. The length of slot `scratch` stays 0. Returns the ids, BAD_TOKEN for bad ones,
    [R] int32. No slot but scratch may come twice.
    """
    arguments = (slots, ids, values, new_lengths, last_token, lengths, scratch, BAD_TOKEN)
    if not uses_triton(slots):
        return reference_step.advance_rows(*arguments)
    from nvserve.kernels import decode_step_triton

    return decode_step_triton.advance_rows(*arguments)
