"""The row kernel of sampling.sample: the best token that survives truncation, without a sort.

The k-th largest value is at least the k-th largest of the groups' maxima, so the groups that reach
that hold it; bisection on the bits of floats finds it exactly among them.

Top-p needs no threshold: the set it keeps is closed upward, so the best perturbed token of all is
the answer if it is in the set, which one sum over the values strictly above it tells. If it is not,
nothing at or below its value is, and the best of what lies above is the next to try. With nucleus p
the first try succeeds with probability p.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from nvserve.kernels.launch import inputs_ready, jit, launch_options, start_next
from nvserve.kernels.reference_sampling import GREEDY_BELOW
from nvserve.kernels.sampling_groups import (
    best_above,
    bound_of_groups,
    kth_largest,
    list_groups,
    mass_above,
    order,
    value,
)

GROUP: Final = 128  # tokens whose maximum the scan leaves
TILE: Final = 8192  # tokens of the listed groups in one pass of a loop

_GREEDY_BELOW: Final = tl.constexpr(GREEDY_BELOW)


@jit
def _of_shard(token_id, first_token_id, num_tokens):  # type: ignore[no-untyped-def]
    """The id, or one of this shard where a row of -inf or NaN has led to none."""
    return tl.minimum(tl.maximum(token_id, first_token_id), first_token_id + num_tokens - 1)


@jit
def _select_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    best_values_ptr,
    best_ids_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    group_max_ptr,
    list_ptr,  # [R, groups] int32 scratch
    ids_ptr,
    num_tokens,
    row_stride,
    first_token_id,
    num_tiles,
    num_groups,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    in_tiles = tiles < num_tiles
    start_next(PDL)
    inputs_ready(PDL)
    values = tl.load(best_values_ptr + row * num_tiles + tiles, mask=in_tiles, other=float("-inf"))
    ids = tl.load(best_ids_ptr + row * num_tiles + tiles, mask=in_tiles, other=2147483647)
    chosen = tl.min(tl.where(values == tl.max(values), ids, 2147483647))
    chosen = _of_shard(chosen, first_token_id, num_tokens)
    temperature = tl.load(temperature_ptr + row)
    k = tl.load(top_k_ptr + row)
    p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    has_k = k > 0
    if (temperature >= _GREEDY_BELOW) & (has_k | (p < 1.0) | (min_p > 0.0)):
        inverse = tl.div_rn(1.0, temperature)
        row_ptr = logits_ptr + row * row_stride
        list_ptr += row * num_groups
        base = first_token_id // 4 * 4
        offset = first_token_id - base
        seed = tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + row)
        tops = tl.load(tile_max_ptr + row * num_tiles + tiles, mask=in_tiles, other=float("-inf"))
        sums = tl.load(tile_sum_ptr + row * num_tiles + tiles, mask=in_tiles, other=0.0)
        top = tl.max(tops)
        mass = tl.sum(sums * tl.exp(tops - top))
        groups = tl.arange(0, GROUPS)
        group_max = tl.load(
            group_max_ptr + row * num_groups + groups,
            mask=groups < num_groups,
            other=float("-inf"),
        )
        floor = float("-inf")
        if min_p > 0.0:
            floor = top + tl.log(min_p)
        kth = float("-inf")
        if has_k & (k < num_tokens):
            low = tl.full([], -2139095041, tl.int64)  # order of -inf
            if k <= num_groups:
                low = bound_of_groups(group_max, k)
            count = list_groups(group_max, num_groups, value(low.to(tl.int32)), list_ptr, GROUPS)
            high = order(top).to(tl.int64) + 1
            kth = kth_largest(
                row_ptr, list_ptr, count, low, high, k, offset, num_tokens, inverse, GROUP, TILE
            )
            if p < 1.0:
                mass = mass_above(
                    row_ptr, list_ptr, count, kth, 0, top, offset, num_tokens, inverse, GROUP, TILE
                )

        lowest = tl.maximum(kth, floor)
        candidate = tl.load(row_ptr + chosen - first_token_id).to(tl.float32) * inverse
        if has_k | (candidate < lowest):
            # The scan drew no noise for this row, or its best is out: start from what is in.
            count = list_groups(group_max, num_groups, lowest, list_ptr, GROUPS)
            chosen, candidate = best_above(
                row_ptr,
                list_ptr,
                count,
                lowest,
                0,
                seed,
                position,
                base,
                offset,
                num_tokens,
                inverse,
                GROUP,
                TILE,
            )
        searching = p < 1.0
        while searching:
            count = list_groups(group_max, num_groups, candidate, list_ptr, GROUPS)
            above_mass = mass_above(
                row_ptr,
                list_ptr,
                count,
                candidate,
                1,
                top,
                offset,
                num_tokens,
                inverse,
                GROUP,
                TILE,
            )
            searching = above_mass >= p * mass
            if searching:
                above_id, above_scaled = best_above(
                    row_ptr,
                    list_ptr,
                    count,
                    candidate,
                    1,
                    seed,
                    position,
                    base,
                    offset,
                    num_tokens,
                    inverse,
                    GROUP,
                    TILE,
                )
                # Nothing above: the largest value, which always stays.
                searching = above_id != 2147483647
                chosen = tl.where(searching, above_id, chosen)
                candidate = tl.where(searching, above_scaled, candidate)
    tl.store(ids_ptr + row, _of_shard(chosen, first_token_id, num_tokens).to(tl.int64))


def select_rows(
    logits: torch.Tensor,
    parameters: tuple[torch.Tensor, ...],
    scanned: tuple[torch.Tensor, ...],
    first_token_id: int,
) -> torch.Tensor:
    """The sampled id of each row; parameters and scanned in the kernel's order."""
    num_rows, num_tokens = logits.shape
    num_tiles, num_groups = scanned[0].shape[1], scanned[4].shape[1]
    ids = logits.new_empty(num_rows, dtype=torch.int64)
    lists = logits.new_empty(num_rows, num_groups, dtype=torch.int32)
    _select_kernel[(num_rows,)](
        logits,
        *parameters,
        *scanned,
        lists,
        ids,
        num_tokens,
        logits.stride(0),
        first_token_id,
        num_tiles,
        num_groups,
        TILES=max(16, triton.next_power_of_2(num_tiles)),
        GROUPS=max(16, triton.next_power_of_2(num_groups)),
        GROUP=GROUP,
        TILE=TILE,
        num_warps=16,
        **launch_options(logits.device),
    )
    return ids
