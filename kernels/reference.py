"""Plain torch twins of the layer kernels: what the tests compare with, and what the CPU runs.

They say what each kernel computes, in the fewest lines, accumulating in float32. None of them is
meant to be fast on a GPU. The twins of the samplers are in reference_sampling.py.

T tokens in the step, R requests in it, H query heads and K KV heads on this rank, D head size.
"""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize the last dimension by its root mean square and scale it by weight."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to residual in place, then normalize the sum (the rounded one, as stored)."""
    residual.copy_(residual.float() + x.float())
    return rms_norm(residual, weight, eps), residual


def embed_rms_norm(
    tokens: torch.Tensor, embedding: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Look up rows of the embedding; (normalized, as they are)."""
    rows = F.embedding(tokens, embedding)
    return rms_norm(rows, weight, eps), rows


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where gate_up holds gate in its first half and up in its second."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of float32 [T, heads, D] by angles given as [T, D/2]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


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
    """Normalize (optionally) and rotate Q and K, write K and V to their slots, return Q."""
    num_tokens, head_dim = qkv.shape[0], key_cache.shape[-1]
    heads = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    q, k = q.float(), k.float()
    if q_weight is not None:
        q = rms_norm(q, q_weight, eps)
    if k_weight is not None:
        k = rms_norm(k, k_weight, eps)
    cos, sin = cos_sin[positions.long()].float().chunk(2, dim=-1)
    block_size = key_cache.shape[1]
    slots = slot_mapping.long()
    where = (slots // block_size, slots % block_size)
    key_cache[where] = rotate(k, cos, sin).to(key_cache.dtype)
    value_cache[where] = v.to(value_cache.dtype)
    return rotate(q, cos, sin).to(qkv.dtype)


def paged_kv(cache: torch.Tensor, block_table: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The first num_tokens rows of one request, [num_tokens, K, D], gathered from its blocks."""
    block_size = cache.shape[1]
    num_blocks = -(-num_tokens // block_size)
    return cache[block_table[:num_blocks].long()].flatten(0, 1)[:num_tokens]


def paged_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Causal attention of each request's last tokens, q [T, H, D], over its paged KV.

    Query i of n in a request of length s sees the keys up to s - n + i (bottom-right alignment).
    A request of length 0 (a padded row) yields zeros.
    """
    out = torch.zeros_like(q)
    group = q.shape[1] // key_cache.shape[2]
    starts = cu_seqlens_q.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        first, last = starts[row], starts[row + 1]
        if first == last or length == 0:
            continue
        keys = paged_kv(key_cache, block_tables[row], length).float()
        values = paged_kv(value_cache, block_tables[row], length).float()
        queries = q[first:last].float().unflatten(1, (-1, group))  # [n, K, group, D]
        scores = torch.einsum("nkgd,skd->kgns", queries, keys) * scale
        ages = torch.arange(length, device=q.device)[None, :] - (length - (last - first))
        hidden = ages > torch.arange(last - first, device=q.device)[:, None]
        probs = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        mixed = torch.einsum("kgns,skd->nkgd", probs, values)
        out[first:last] = mixed.flatten(1, 2).to(q.dtype)
    return out


def decode_fused(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Write each request's last token to the cache, rotated, and attend with it: [R, H, D]."""
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    positions = seq_lens.long() - 1
    blocks = block_tables.long().gather(1, positions[:, None] // block_size)[:, 0]
    slots = blocks * block_size + positions % block_size
    heads = (qkv.shape[1] // head_dim - 2 * num_kv_heads, num_kv_heads)
    norms, caches = (cos_sin, q_weight, k_weight, eps), (key_cache, value_cache)
    q = qk_norm_rope_cache(qkv, positions, *norms, *caches, slots, *heads)
    starts = torch.arange(len(qkv) + 1)
    return paged_attention(q, *caches, starts, seq_lens, block_tables, scale)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, accumulated in float32."""
    out = x.float() @ weight.float().T
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)
