"""Triton kernels of the logits' edits in sampling.py: penalties, token masks, output counts."""

import torch
import triton
import triton.language as tl

from nvserve.kernels.launch import inputs_ready, jit, jit_general, launch_options, start_next


@jit
def _penalties_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    slots_ptr,
    counts_ptr,
    prompt_ptr,
    frequency_ptr,
    presence_ptr,
    repetition_ptr,
    num_tokens,
    row_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_tokens
    start_next(PDL)
    inputs_ready(PDL)
    frequency = tl.load(frequency_ptr + row)
    presence = tl.load(presence_ptr + row)
    repetition = tl.load(repetition_ptr + row)
    if (frequency == 0.0) & (presence == 0.0) & (repetition == 1.0):
        return
    slot = tl.load(slots_ptr + row).to(tl.int64)
    counts = tl.load(counts_ptr + slot * num_tokens + columns, mask=inside, other=0)
    prompt = tl.load(prompt_ptr + slot * num_tokens + columns, mask=inside, other=0)
    at = logits_ptr + row * row_stride + columns
    logits = tl.load(at, mask=inside).to(tl.float32)
    repeated = tl.where(logits > 0, logits / repetition, logits * repetition)
    logits = tl.where((counts > 0) | (prompt != 0), repeated, logits)
    logits -= frequency * counts.to(tl.float32) + tl.where(counts > 0, presence, 0.0)
    tl.store(at, logits.to(logits_ptr.dtype.element_ty), mask=inside)


@jit
def _token_mask_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    mask_ptr,
    num_tokens,
    row_stride,
    mask_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_tokens
    start_next(PDL)
    inputs_ready(PDL)
    words = tl.load(mask_ptr + row * mask_stride + columns // 32, mask=inside, other=-1)
    banned = ((words >> (columns % 32)) & 1) == 0
    tl.store(logits_ptr + row * row_stride + columns, float("-inf"), mask=inside & banned)


@jit_general("num_rows")
def _count_tokens_kernel(  # type: ignore[no-untyped-def]
    counts_ptr, slots_ptr, ids_ptr, num_rows, num_tokens, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start_next(PDL)
    inputs_ready(PDL)
    ids = tl.load(ids_ptr + rows, mask=rows < num_rows, other=-1).to(tl.int64)
    slots = tl.load(slots_ptr + rows, mask=rows < num_rows, other=0).to(tl.int64)
    counted = (ids >= 0) & (ids < num_tokens)
    tl.atomic_add(counts_ptr + slots * num_tokens + ids, 1, mask=counted)


def apply_penalties(
    logits: torch.Tensor,
    slots: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_mask: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """See sampling.apply_penalties."""
    num_rows, num_tokens = logits.shape
    assert logits.stride(1) == 1
    assert output_counts.is_contiguous()
    assert prompt_mask.is_contiguous()
    if num_rows == 0:
        return logits
    block = min(2048, triton.next_power_of_2(num_tokens))
    _penalties_kernel[(num_rows, triton.cdiv(num_tokens, block))](
        logits,
        slots,
        output_counts,
        prompt_mask.view(torch.uint8),
        frequency,
        presence,
        repetition,
        num_tokens,
        logits.stride(0),
        BLOCK=block,
        num_warps=4,
        **launch_options(logits.device),
    )
    return logits


def apply_token_mask(logits: torch.Tensor, token_mask: torch.Tensor) -> torch.Tensor:
    """See sampling.apply_token_mask."""
    num_rows, num_tokens = logits.shape
    if num_rows == 0:
        return logits
    block = min(2048, triton.next_power_of_2(num_tokens))
    _token_mask_kernel[(num_rows, triton.cdiv(num_tokens, block))](
        logits,
        token_mask,
        num_tokens,
        logits.stride(0),
        token_mask.stride(0),
        BLOCK=block,
        num_warps=4,
        **launch_options(logits.device),
    )
    return logits


def count_tokens(output_counts: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
    """See sampling.count_tokens."""
    num_rows = token_ids.shape[0]
    if num_rows == 0:
        return
    assert output_counts.is_contiguous()
    block = min(256, max(16, triton.next_power_of_2(num_rows)))
    _count_tokens_kernel[(triton.cdiv(num_rows, block),)](
        output_counts,
        slots,
        token_ids,
        num_rows,
        output_counts.shape[1],
        BLOCK=block,
        num_warps=1,
        **launch_options(output_counts.device),
    )
