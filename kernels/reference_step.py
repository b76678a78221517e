"""Plain torch twins of decode_step.py."""

import torch


def gather_rows(
    rows: torch.Tensor,
    last_token: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    step_tables: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions, positions of what is sampled, places of the KV, keys to attend to."""
    positions = lengths[rows]
    tables = block_table[rows]
    step_tables[: len(rows)] = tables
    blocks = tables.gather(1, (positions // block_size)[:, None]).squeeze(1).long()
    slot_mapping = blocks * block_size + positions % block_size
    return last_token[rows], positions, positions + 1, slot_mapping, (positions + 1).int()


def advance_rows(
    slots: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor | None,
    new_lengths: torch.Tensor,
    last_token: torch.Tensor,
    lengths: torch.Tensor,
    scratch: int,
    bad_token: int,
) -> torch.Tensor:
    """Write last tokens and lengths; the ids as int32."""
    is_bad = ids < 0
    if values is not None:
        is_bad |= ~values.isfinite()
    last_token.index_copy_(0, slots, ids.masked_fill(is_bad, 0))
    lengths.index_copy_(0, slots, new_lengths)
    lengths[scratch] = 0
    return ids.masked_fill(is_bad, bad_token).int()
