"""One kernel between the QKV projection and attention: QK-norm, rotary embedding, KV write."""

import torch

from nvserve.kernels import reference
from nvserve.kernels.dispatch import uses_triton


def qk_norm_rope_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """Normalize (optionally) and rotate Q and K, write K and V to the cache; returns Q [T, H, D].

    qkv            [T, (H + 2 K) * D], rows contiguous: all of Q, then K, then V
    positions      [T] int32 or int64
    cos_sin        [max_position, D] float32: D/2 cosines, then D/2 sines; element i of a head
                   rotates with element i + D/2
    q_weight, k_weight  [D] or None: RMS norm of each head before the rotation
    key_cache, value_cache  [num_blocks, block_size, K, D] contiguous
    slot_mapping   [T] int32 or int64: block * block_size + offset; distinct, except in scratch

    Math is in float32 with one rounding at the end. The result is a new tensor of qkv's dtype.
    """
    arguments = (qkv, positions, cos_sin, q_weight, k_weight, eps, key_cache, value_cache)
    if not uses_triton(qkv):
        return reference.qk_norm_rope_cache(*arguments, slot_mapping, num_heads, num_kv_heads)
    # Triton is absent from CPU-only installs, so its kernels load with their first use.
    from nvserve.kernels import rope_triton

    return rope_triton.qk_norm_rope_cache(*arguments, slot_mapping, num_heads, num_kv_heads)
