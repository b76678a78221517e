"""The Triton attention backend: split decode and variable-length prefill over the paged cache."""

import torch

from nvserve.kernels import attention_decode, attention_prefill
from nvserve.kernels.attention import AttentionMetadata, NewTokens


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
        shape = attention_decode.decode_shape(dtype, head_dim, meta.seq_lens.shape[0])
        meta.decode_plan = attention_decode.plan_decode(meta.seq_lens, num_kv_heads, shape)

    def prefill(
        self,
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        return attention_prefill.prefill(
            q,
            key_cache,
            value_cache,
            meta.block_tables,
            meta.seq_lens,
            meta.cu_seqlens_q,
            meta.max_query_len,
            scale,
        )

    def decode(
        self,
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        assert q.shape[0] == meta.seq_lens.shape[0], "a decode step has one query a request"
        shape = attention_decode.decode_shape(q.dtype, q.shape[2], q.shape[0])
        plan = _plan_of(meta, key_cache, shape)
        return attention_decode.decode(
            q, key_cache, value_cache, meta.block_tables, meta.seq_lens, plan, scale, shape
        )

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
        shape = attention_decode.decode_shape(new.qkv.dtype, key_cache.shape[3], num_rows)
        plan = _plan_of(meta, key_cache, shape)
        return attention_decode.decode_fused(
            new, key_cache, value_cache, meta.block_tables, meta.seq_lens, plan, scale, shape
        )


def _plan_of(
    meta: AttentionMetadata, key_cache: torch.Tensor, shape: attention_decode.DecodeShape
) -> torch.Tensor:
    """The step's plan, or one of this layer's own."""
    if isinstance(meta.decode_plan, torch.Tensor):
        return meta.decode_plan
    return attention_decode.plan_decode(meta.seq_lens, key_cache.shape[2], shape)
