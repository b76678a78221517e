"""Triton kernels of decode_step.py."""

import torch
import triton
import triton.language as tl

from nvserve.kernels.launch import inputs_ready, jit, jit_general, launch_options, start_next


@jit
def _gather_kernel(  # type: ignore[no-untyped-def]
    rows_ptr,
    last_token_ptr,
    lengths_ptr,
    block_table_ptr,
    step_tables_ptr,
    columns_ptr,  # [4, stride] int64: tokens, positions, next positions, slot mapping
    seq_lens_ptr,
    max_blocks,
    BLOCK_SIZE: tl.constexpr,
    ENTRIES: tl.constexpr,  # table entries of one pass
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    stride = tl.cdiv(tl.num_programs(0), 2) * 2
    each = tl.arange(0, ENTRIES)
    start_next(PDL)
    inputs_ready(PDL)
    slot = tl.load(rows_ptr + row)
    position = tl.load(lengths_ptr + slot)
    token = tl.load(last_token_ptr + slot)
    table = block_table_ptr + slot * max_blocks
    last = position // BLOCK_SIZE
    block = tl.load(table + last).to(tl.int64)
    tl.store(columns_ptr + row, token)
    tl.store(columns_ptr + stride + row, position)
    tl.store(columns_ptr + 2 * stride + row, position + 1)
    tl.store(columns_ptr + 3 * stride + row, block * BLOCK_SIZE + position % BLOCK_SIZE)
    tl.store(seq_lens_ptr + row, (position + 1).to(tl.int32))
    step_table = step_tables_ptr + row.to(tl.int64) * max_blocks
    for first in range(0, last + 1, ENTRIES):
        inside = first + each <= last
        blocks = tl.load(table + first + each, mask=inside, other=0)
        tl.store(step_table + first + each, blocks, mask=inside)


@jit_general("num_rows")
def _advance_kernel(  # type: ignore[no-untyped-def]
    slots_ptr,
    ids_ptr,
    values_ptr,
    new_lengths_ptr,
    last_token_ptr,
    lengths_ptr,
    out_ptr,
    num_rows,
    scratch,
    HAS_VALUES: tl.constexpr,
    BAD_TOKEN: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    start_next(PDL)
    inputs_ready(PDL)
    slots = tl.load(slots_ptr + rows, mask=inside, other=0)
    ids = tl.load(ids_ptr + rows, mask=inside, other=0)
    length = tl.load(new_lengths_ptr + rows, mask=inside, other=0)
    is_good = ids >= 0
    if HAS_VALUES:
        values = tl.load(values_ptr + rows, mask=inside, other=0.0)
        is_good = is_good & (tl.abs(values) < float("inf"))  # false for NaN too
    tl.store(last_token_ptr + slots, tl.where(is_good, ids, 0), mask=inside)
    tl.store(lengths_ptr + slots, tl.where(slots == scratch, 0, length), mask=inside)
    tl.store(out_ptr + rows, tl.where(is_good, ids, BAD_TOKEN).to(tl.int32), mask=inside)


def gather_rows(
    rows: torch.Tensor,
    last_token: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    step_tables: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See decode_step.gather_rows."""
    num_rows, max_blocks = rows.shape[0], block_table.shape[1]
    assert block_table.is_contiguous()
    assert step_tables.is_contiguous()
    assert step_tables.shape[0] >= num_rows
    assert step_tables.shape[1] == max_blocks
    # Columns start at multiples of 16 bytes: kernels are compiled for that, or once more without.
    columns = rows.new_empty(4, -(-num_rows // 2) * 2)
    seq_lens = rows.new_empty(num_rows, dtype=torch.int32)
    if num_rows:
        _gather_kernel[(num_rows,)](
            rows,
            last_token,
            lengths,
            block_table,
            step_tables,
            columns,
            seq_lens,
            max_blocks,
            BLOCK_SIZE=block_size,
            ENTRIES=128,
            num_warps=1,
            **launch_options(rows.device),
        )
    tokens, positions, next_positions, slot_mapping = columns[:, :num_rows].unbind(0)
    return tokens, positions, next_positions, slot_mapping, seq_lens


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
    """See decode_step.advance_rows."""
    num_rows = slots.shape[0]
    out = slots.new_empty(num_rows, dtype=torch.int32)
    if num_rows == 0:
        return out
    _advance_kernel[(triton.cdiv(num_rows, 128),)](
        slots,
        ids,
        ids if values is None else values,
        new_lengths,
        last_token,
        lengths,
        out,
        num_rows,
        scratch,
        HAS_VALUES=values is not None,
        BAD_TOKEN=bad_token,
        ROWS=128,
        num_warps=4,
        **launch_options(slots.device),
    )
    return out
