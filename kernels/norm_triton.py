"""Triton kernels of norm.py: one program a row."""

import torch
import triton
import triton.language as tl

from nvserve.kernels.launch import inputs_ready, jit, launch_options, start_next
from nvserve.kernels.room import new_rows


@jit
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    width,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    start_next(PDL)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    inputs_ready(PDL)
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row * width + columns, mask=inside, other=0.0)
        rounded = (x + residual.to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * width + columns, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / width + eps)
    out = (x * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + columns, out, mask=inside)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    width = x.shape[-1]
    rows = x.reshape(-1, width).contiguous()
    out = new_rows(rows, len(rows), width)
    if rows.shape[0] == 0:
        return out.view(x.shape)
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(rows.shape[0],)](
        rows,
        rows if residual is None else residual,
        weight,
        out,
        width,
        eps,
        ADD=residual is not None,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        **launch_options(x.device),
    )
    return out.view(x.shape)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See norm.rms_norm."""
    return _launch(x, None, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See norm.add_rms_norm."""
    assert residual.is_contiguous(), "residual is updated in place: it must be contiguous"
    return _launch(x, residual, weight, eps), residual


@jit
def _embed_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr,
    embedding_ptr,
    weight_ptr,
    residual_ptr,
    out_ptr,
    width,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    start_next(PDL)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    inputs_ready(PDL)
    token = tl.load(tokens_ptr + row)
    raw = tl.load(embedding_ptr + token * width + columns, mask=inside, other=0.0)
    tl.store(residual_ptr + row * width + columns, raw, mask=inside)
    x = raw.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / width + eps)
    out = (x * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + columns, out, mask=inside)


def embed_rms_norm(
    tokens: torch.Tensor, embedding: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See norm.embed_rms_norm."""
    num_tokens, width = tokens.shape[0], embedding.shape[1]
    assert embedding.is_contiguous()
    residual = embedding.new_empty(num_tokens, width)
    out = new_rows(embedding, num_tokens, width)
    if num_tokens == 0:
        return out, residual
    block = triton.next_power_of_2(width)
    _embed_kernel[(num_tokens,)](
        tokens,
        embedding,
        weight,
        residual,
        out,
        width,
        eps,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        **launch_options(tokens.device),
    )
    return out, residual
