"""Triton kernels of norm.py: one program a row."""

import torch
import triton
import triton.language as tl

from nvserve.kernels.launch import inputs_ready, jit, launch_options, start_next
from nvserve.kernels.norm import DeferredNorm


@jit
def norm_scale(squares, width, eps):  # type: ignore[no-untyped-def]
    """What rows of a DeferredNorm have yet to be multiplied by, from their squares [T, S]: [T]."""
    return tl.rsqrt(tl.sum(squares, axis=1) / width + eps)


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
    out = torch.empty_like(rows)
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
    squares_ptr,
    width,
    eps,
    SQUARES: tl.constexpr,  # to leave of a row; 0: the norm is not deferred
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
    squares = tl.sum(x * x)
    out = x * weight
    if SQUARES:
        parts = tl.arange(0, SQUARES)
        tl.store(squares_ptr + row * SQUARES + parts, tl.where(parts == 0, squares, 0.0))
    else:
        out = out * tl.rsqrt(squares / width + eps)
    tl.store(out_ptr + row * width + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def _embed(
    tokens: torch.Tensor,
    embedding: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    squares: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm of the rows, or the part of it that is not deferred, and the rows)."""
    num_tokens, width = tokens.shape[0], embedding.shape[1]
    assert embedding.is_contiguous()
    residual, out = embedding.new_empty(2, num_tokens, width).unbind(0)
    if num_tokens == 0:
        return out, residual
    block = triton.next_power_of_2(width)
    _embed_kernel[(num_tokens,)](
        tokens,
        embedding,
        weight,
        residual,
        out,
        squares,
        width,
        eps,
        SQUARES=0 if squares is None else squares.shape[1],
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        **launch_options(tokens.device),
    )
    return out, residual


def embed_rms_norm(
    tokens: torch.Tensor, embedding: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See norm.embed_rms_norm."""
    return _embed(tokens, embedding, weight, eps, None)


def embed_deferred_norm(
    tokens: torch.Tensor,
    embedding: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    num_squares: int,
) -> tuple[DeferredNorm, torch.Tensor]:
    """See norm.embed_deferred_norm."""
    squares = torch.empty(len(tokens), num_squares, dtype=torch.float32, device=tokens.device)
    rows, residual = _embed(tokens, embedding, weight, eps, squares)
    return DeferredNorm(rows, squares, eps), residual


@jit
def _finish_kernel(  # type: ignore[no-untyped-def]
    rows_ptr,
    squares_ptr,
    out_ptr,
    width,
    eps,
    SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    start_next(PDL)
    inputs_ready(PDL)
    squares = tl.load(squares_ptr + row * SQUARES + tl.arange(0, SQUARES)[None, :])
    rows = tl.load(rows_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    out = rows * norm_scale(squares, width, eps)
    tl.store(out_ptr + row * width + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def finish(norm: DeferredNorm) -> torch.Tensor:
    """See norm.finish."""
    num_tokens, width = norm.rows.shape
    out = torch.empty_like(norm.rows)
    block = min(1024, triton.next_power_of_2(width))
    _finish_kernel[(num_tokens, triton.cdiv(width, block))](
        norm.rows,
        norm.squares,
        out,
        width,
        norm.eps,
        SQUARES=norm.squares.shape[1],
        BLOCK=block,
        num_warps=4,
        **launch_options(out.device),
    )
    return out
