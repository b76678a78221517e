"""The FlashAttention backends, thin wrappers over the installed libraries."""

import importlib
from typing import Any

import torch

from nvserve.kernels.attention import AttentionMetadata


class Flash3Backend:
    """FlashAttention 3 (`flash_attn_interface`): Hopper, 16 bits, any page size."""

    name = "fa3"
    decode_fused = None
    can_be_captured = True

    def __init__(self) -> None:
        self._library: Any = importlib.import_module("flash_attn_interface")

    def plan_decode(
        self,
        meta: AttentionMetadata,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        # The library sizes its splits by the width of the page table, so the plan must too.
        meta.decode_plan = self._library.get_scheduler_metadata(
            meta.seq_lens.shape[0],
            1,
            meta.block_tables.shape[1] * block_size,
            num_heads,
            num_kv_heads,
            head_dim,
            meta.seq_lens,
            qkv_dtype=dtype,
            page_size=block_size,
            causal=True,
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
        mixed: torch.Tensor = self._library.flash_attn_with_kvcache(
            q,
            key_cache,
            value_cache,
            cache_seqlens=meta.seq_lens,
            page_table=meta.block_tables,
            cu_seqlens_q=meta.cu_seqlens_q,
            max_seqlen_q=meta.max_query_len,
            softmax_scale=scale,
            causal=True,
        )
        return mixed if out is None else out.copy_(mixed)

    def decode(
        self,
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        mixed: torch.Tensor = self._library.flash_attn_with_kvcache(
            q.unsqueeze(1),
            key_cache,
            value_cache,
            cache_seqlens=meta.seq_lens,
            page_table=meta.block_tables,
            softmax_scale=scale,
            causal=True,
            scheduler_metadata=meta.decode_plan,
        )
        return mixed.squeeze(1) if out is None else out.copy_(mixed.squeeze(1))


class MixedBackend:
    """Prefill by FlashAttention 3, decode by our kernels: the faster of the two for each."""

    name = "fa3+triton"
    can_be_captured = True

    def __init__(self) -> None:
        # Triton is an import of its own, which fa3 alone does not need.
        from nvserve.kernels.attention_triton import TritonBackend

        self.prefill = Flash3Backend().prefill
        decoder = TritonBackend()
        self.plan_decode, self.decode = decoder.plan_decode, decoder.decode
        self.decode_fused = decoder.decode_fused


class Flash2Backend:
    """FlashAttention 2 (`flash_attn`): Ampere and later, 16 bits, pages of a multiple of 256."""

    name = "fa2"
    decode_fused = None
    can_be_captured = True

    def __init__(self) -> None:
        self._library: Any = importlib.import_module("flash_attn")

    def plan_decode(
        self,
        meta: AttentionMetadata,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        pass

    def prefill(
        self,
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # This library takes key lengths as a cumulative sum, which with pages it uses as lengths.
        cu_seqlens_k = torch.nn.functional.pad(meta.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        mixed: torch.Tensor = self._library.flash_attn_varlen_func(
            q,
            key_cache,
            value_cache,
            meta.cu_seqlens_q,
            cu_seqlens_k,
            meta.max_query_len,
            meta.max_seq_len,
            softmax_scale=scale,
            causal=True,
            block_table=meta.block_tables,
        )
        return mixed if out is None else out.copy_(mixed)

    def decode(
        self,
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        mixed: torch.Tensor = self._library.flash_attn_with_kvcache(
            q.unsqueeze(1),
            key_cache,
            value_cache,
            cache_seqlens=meta.seq_lens,
            block_table=meta.block_tables,
            softmax_scale=scale,
            causal=True,
        )
        return mixed.squeeze(1) if out is None else out.copy_(mixed.squeeze(1))
