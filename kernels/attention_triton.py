"""The Triton attention backend: split decode and variable-length prefill over the paged cache."""

import torch

from nvserve.kernels.attention import AttentionMetadata, NewTokens
from nvserve.kernels.attention_decode import decode, decode_fused
from nvserve.kernels.attention_plan import DecodeShape, decode_shape, plan_decode
from nvserve.kernels.attention_prefill import prefill


class TritonBackend:
    """Our kernels: any CUDA device, float16, bfloat16 and true float32, any block size."""

    name = "triton"
    can_be_captured = True

    def plan_decode(
        self,
        meta: AttentionMetadata,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        shape = decode_shape(dtype, head_dim, meta.seq_lens.shape[0])
        meta.decode_plan = plan_decode(
            meta.seq_lens, meta.block_tables, block_size, num_kv_heads, shape
        )

    def prefill(
        self,
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return prefill(
            q,
            key_cache,
            value_cache,
            meta.block_tables,
            meta.seq_lens,
            meta.cu_seqlens_q,
            meta.max_query_len,
            scale,
            out,
        )

    def decode(
        self,
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert q.shape[0] == meta.seq_lens.shape[0], "a decode step has one query a request"
        shape = decode_shape(q.dtype, q.shape[2], q.shape[0])
        plan = _plan_of(meta, key_cache, shape)
        return decode(q, key_cache, value_cache, plan, scale, shape, out)

    def decode_fused(
        self,
        new: NewTokens,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        num_rows = new.qkv.shape[0]
        assert num_rows == meta.seq_lens.shape[0], "a decode step has one token a request"
        shape = decode_shape(new.qkv.dtype, key_cache.shape[3], num_rows)
        plan = _plan_of(meta, key_cache, shape)
        return decode_fused(new, key_cache, value_cache, meta.block_tables, plan, scale, shape)


def _plan_of(meta: AttentionMetadata, key_cache: torch.Tensor, shape: DecodeShape) -> torch.Tensor:
    """The step's plan, or one of this layer's own."""
    if isinstance(meta.decode_plan, torch.Tensor):
        return meta.decode_plan
    block_size, num_kv_heads = key_cache.shape[1:3]
    return plan_decode(meta.seq_lens, meta.block_tables, block_size, num_kv_heads, shape)
