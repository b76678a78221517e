"""The torch attention backend: what a CPU runs, and any device when it is asked for by name.

Decoding, the keys of all rows are one line of tiles. A tile is attended to by itself, many of them
in one matmul, and a row's tiles are then combined in their order. Tiles begin at multiples of their
size and are padded to it, so that what a row gets does not depend on the rows beside it, and a long
row costs the short ones nothing.

R requests, H query heads, K KV heads, G = H / K, D head size, N tiles of TILE tokens.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from nvserve.kernels import reference
from nvserve.kernels.attention import AttentionMetadata

TILE: Final = 128  # tokens
# Values of the keys of a slab, which is as many tiles as are in work at a time. More would leave
# the processor's cache, and their memory would be mapped anew for every layer.
SLAB_VALUES: Final = 1 << 18


@dataclass(frozen=True)
class DecodeTiles:
    """Where the tiles of a decode step are; made once a step, shared by all layers."""

    rows: torch.Tensor  # [N] int64, the request of each; ascending
    places: torch.Tensor  # [N] int64, request * max_tiles + the number of the tile in it
    kv_rows: torch.Tensor  # [N * K * TILE] int64 into [num_blocks * P * K, D]
    is_padding: torch.Tensor  # [N, 1, 1, TILE]; its kv_rows are the first token's
    max_tiles: int  # of a request


def divide(
    seq_lens: torch.Tensor, block_tables: torch.Tensor, num_kv_heads: int, block_size: int
) -> DecodeTiles:
    """The tiles of these requests; one of length 0 has none."""
    # On the host, where small steps cost a fraction of torch's.
    lengths, tables = seq_lens.cpu().numpy(), block_tables.cpu().numpy()
    counts = (lengths + (TILE - 1)) // TILE
    max_tiles = int(counts.max(initial=0))
    rows = np.repeat(np.arange(len(lengths)), counts)
    numbers = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
    tokens = numbers[:, None] * TILE + np.arange(TILE)  # [N, TILE]
    is_padding = tokens >= lengths[rows][:, None]
    tokens[is_padding] = 0
    blocks = tables[rows[:, None], tokens // block_size].astype(np.int64)
    slots = blocks * block_size + tokens % block_size
    kv_rows = slots[:, None] * num_kv_heads + np.arange(num_kv_heads)[:, None]  # [N, K, TILE]
    columns = (rows, rows * max_tiles + numbers, kv_rows.reshape(-1), is_padding[:, None, None])
    moved = [torch.from_numpy(each).to(seq_lens.device) for each in columns]
    return DecodeTiles(moved[0], moved[1], moved[2], moved[3], max_tiles)


class TorchBackend:
    """Any device and dtype, accumulated in float32; synchronizes with the host."""

    name = "torch"
    decode_fused = None
    can_be_captured = False

    def plan_decode(
        self,
        meta: AttentionMetadata,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        meta.decode_plan = divide(meta.seq_lens, meta.block_tables, num_kv_heads, block_size)

    def prefill(
        self,
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tables = (meta.cu_seqlens_q, meta.seq_lens, meta.block_tables)
        mixed = reference.paged_attention(q, key_cache, value_cache, *tables, scale)
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
        block_size, num_kv_heads, head_dim = key_cache.shape[1:]
        tiles = meta.decode_plan
        if not isinstance(tiles, DecodeTiles):
            tiles = divide(meta.seq_lens, meta.block_tables, num_kv_heads, block_size)
        if tiles.max_tiles == 0:
            return torch.zeros_like(q) if out is None else out.zero_()
        queries = (q.float() * scale).unflatten(1, (num_kv_heads, -1))  # [R, K, G, D]
        if tiles.max_tiles != 1 or len(tiles.rows) != len(q):
            queries = queries.index_select(0, tiles.rows)
        caches = (key_cache.view(-1, head_dim), value_cache.view(-1, head_dim))
        mixed, weights = _attend(queries, *caches, tiles)
        combined = _combine(mixed, weights, tiles, len(q)).flatten(1, 2)
        return combined.to(q.dtype) if out is None else out.copy_(combined)


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tiles: DecodeTiles
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention to every tile alone, by queries [N, K, G, D]: [N, K, G, D], and the logarithms of
    the tiles' weights [N, K, G, 1], which nobody needs where no request has two.

    Keys and values are rows [num_blocks * P * K, D].
    """
    num_tiles, num_heads, _, head_dim = queries.shape
    step = min(num_tiles, max(1, SLAB_VALUES // (num_heads * TILE * head_dim)))
    found = keys.new_empty(2, step * num_heads * TILE, head_dim)
    shape = (-1, num_heads, TILE, head_dim)
    mixed, weights = [], []
    for first in range(0, num_tiles, step):
        last = min(first + step, num_tiles)
        where = tiles.kv_rows[first * num_heads * TILE : last * num_heads * TILE]
        key = torch.index_select(keys, 0, where, out=found[0, : len(where)]).float().view(shape)
        scores = _multiply(queries[first:last], key.transpose(2, 3))
        scores.masked_fill_(tiles.is_padding[first:last], float("-inf"))  # [n, K, G, TILE]
        value = torch.index_select(values, 0, where, out=found[1, : len(where)])
        mixed.append(_multiply(scores.softmax(-1), value.float().view(shape)))
        if tiles.max_tiles > 1:
            # The first key of a tile is no padding; logsumexp would take four times as long.
            weights.append(scores[..., :1] - scores.log_softmax(-1)[..., :1])
    joined = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
    return joined, torch.cat(weights) if weights else None


def _multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The matrices [n, K, ...] multiplied, each with the same result as among any others."""
    if left.shape[0] * left.shape[1] > 1:
        return left @ right
    # A single one would be split between the threads, and at other places than one of several.
    return (left.expand(2, -1, -1, -1) @ right.expand(2, -1, -1, -1))[:1]


def _combine(
    mixed: torch.Tensor, weights: torch.Tensor | None, tiles: DecodeTiles, num_requests: int
) -> torch.Tensor:
    """The tiles of each request added up in their order, [R, K, G, D]; zeros where it has none.

    The only tile of a request passes unchanged, so it is the same with and without weights.
    """
    if weights is None and len(mixed) == num_requests:
        return mixed
    sums = mixed.new_zeros(num_requests, *mixed.shape[1:])
    if weights is None:
        return sums.index_copy_(0, tiles.rows, mixed)
    if num_requests == 1:
        shares = (weights - weights.amax(0)).exp_()
    else:
        table = weights.new_full((num_requests * tiles.max_tiles, *weights.shape[1:]), -torch.inf)
        table.index_copy_(0, tiles.places, weights)
        best = table.unflatten(0, (num_requests, -1)).amax(1)
        shares = (weights - best.index_select(0, tiles.rows)).exp_()
    sums.index_add_(0, tiles.rows, mixed.mul_(shares))
    totals = shares.new_zeros(num_requests, *shares.shape[1:]).index_add_(0, tiles.rows, shares)
    return sums / totals.clamp_(min=1.0)  # at least 1, the best tile's, unless there are no keys
