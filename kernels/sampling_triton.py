"""Triton kernels of sampling.py: one scan of the logits, then a small kernel a row.

The scan gives each tile's largest perturbed logit, which is all that greedy and temperature rows
need. For truncated rows it also leaves the largest scaled logit of every GROUP tokens and the
tiles' exponential sums. The row kernel (sampling_select.py) then looks only into groups that can
matter, so that no row is sorted or, mostly, read again.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from nvserve.kernels.launch import inputs_ready, jit, launch_options, start_next
from nvserve.kernels.noise import gumbel_from_bits, token_bits
from nvserve.kernels.reference_sampling import GREEDY_BELOW
from nvserve.kernels.sampling_select import GROUP, select_rows

# Triton reads module constants only as constexpr.
_GREEDY_BELOW: Final = tl.constexpr(GREEDY_BELOW)


@jit
def _first_largest(values, ids):  # type: ignore[no-untyped-def]
    """The largest value and the lowest id that has it; NaN and -1 where there is a NaN.

    Two plain reductions cost less than one over (value, index) pairs, and no more where the second
    one also looks for NaN, which the first leaves out.
    """
    best = tl.max(values)
    found = tl.min(tl.where(values == best, ids, tl.where(values == values, 2147483647, -1)))
    return tl.where(found < 0, float("nan"), best), found


@jit
def _scan_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    seeds_ptr,
    positions_ptr,
    best_values_ptr,  # [R, tiles] float32
    best_ids_ptr,  # [R, tiles] int32, global
    tile_max_ptr,  # [R, tiles] float32, of scaled logits
    tile_sum_ptr,  # [R, tiles] float32, of exp(scaled - tile_max)
    group_max_ptr,  # [R, tiles * TILE / GROUP] float32
    num_tokens,
    row_stride,
    first_token_id,
    BY_SLOT: tl.constexpr,  # temperature and seed stand at the row's slot
    TRUNCATES: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    num_tiles = tl.num_programs(1)
    start_next(PDL)
    inputs_ready(PDL)
    slot = row
    if BY_SLOT:
        slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    greedy = temperature < _GREEDY_BELOW
    inverse = tl.div_rn(1.0, tl.maximum(temperature, _GREEDY_BELOW))
    # Tiles start at a multiple of 4 global ids, where a Philox counter starts.
    base = first_token_id // 4 * 4 + tile * TILE
    ids = base + tl.arange(0, TILE)
    local = ids - first_token_id
    inside = (local >= 0) & (local < num_tokens)
    logits = tl.load(logits_ptr + row * row_stride + local, mask=inside, other=float("-inf")).to(
        tl.float32
    )
    values = logits
    if not greedy:
        scaled = logits * inverse
        values = scaled
        noisy = True
        if TRUNCATES:
            noisy = tl.load(top_k_ptr + row) <= 0  # else the row kernel draws for the survivors
            top = tl.max(scaled)
            safe = tl.where(top == float("-inf"), 0.0, top)
            tl.store(tile_max_ptr + row * num_tiles + tile, top)
            tl.store(tile_sum_ptr + row * num_tiles + tile, tl.sum(tl.exp(scaled - safe)))
            groups: tl.constexpr = TILE // GROUP
            group_max = tl.max(tl.reshape(scaled, (groups, GROUP)), axis=1)
            at = (row * num_tiles + tile) * groups + tl.arange(0, groups)
            tl.store(group_max_ptr + at, group_max)
        if noisy:
            counters = base // 4 + tl.arange(0, TILE // 4)
            bits = token_bits(tl.load(seeds_ptr + slot), tl.load(positions_ptr + row), counters)
            values = scaled + gumbel_from_bits(bits)
    best, best_id = _first_largest(values, ids)
    tl.store(best_values_ptr + row * num_tiles + tile, best)
    tl.store(best_ids_ptr + row * num_tiles + tile, best_id)


@jit
def _reduce_kernel(  # type: ignore[no-untyped-def]
    best_values_ptr,
    best_ids_ptr,
    values_ptr,
    ids_ptr,
    num_tiles,
    num_tokens,
    first_token_id,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    start_next(PDL)
    inputs_ready(PDL)
    at = row * num_tiles + tiles
    values = tl.load(best_values_ptr + at, mask=tiles < num_tiles, other=float("-inf"))
    ids = tl.load(best_ids_ptr + at, mask=tiles < num_tiles, other=2147483647)
    best, best_id = _first_largest(values, ids)
    # A row of -inf or with NaN still gives an id of this shard.
    best_id = tl.minimum(tl.maximum(best_id, first_token_id), first_token_id + num_tokens - 1)
    tl.store(values_ptr + row, best)
    tl.store(ids_ptr + row, best_id.to(tl.int64))


def scan_tile(num_rows: int) -> int:
    """Tokens of one scan program: few rows are spread over more programs."""
    return 1024 if num_rows <= 8 else 4096


def _scan(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first_token_id: int,
    slots: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Best values and ids, then (used only with top_k) tile maxima, tile sums, group maxima."""
    num_rows, num_tokens = logits.shape
    assert logits.stride(1) == 1
    tile = scan_tile(num_rows)
    num_tiles = triton.cdiv(first_token_id % 4 + num_tokens, tile)
    # Each starts at a multiple of 16 bytes: kernels are compiled for that, or once more without.
    size = num_rows * num_tiles
    floats = logits.new_empty(3, -(-size // 4) * 4, dtype=torch.float32)[:, :size]
    best_values, tile_max, tile_sum = floats.unflatten(1, (num_rows, num_tiles)).unbind(0)
    best_ids = logits.new_empty(num_rows, num_tiles, dtype=torch.int32)
    num_groups = num_tiles * (tile // GROUP) if top_k is not None else 0
    group_max = logits.new_empty(num_rows, num_groups, dtype=torch.float32)
    _scan_kernel[(num_rows, num_tiles)](
        logits,
        positions if slots is None else slots,
        temperature,
        seeds if top_k is None else top_k,
        seeds,
        positions,
        best_values,
        best_ids,
        tile_max,
        tile_sum,
        group_max,
        num_tokens,
        logits.stride(0),
        first_token_id,
        BY_SLOT=slots is not None,
        TRUNCATES=top_k is not None,
        GROUP=GROUP,
        TILE=tile,
        num_warps=4 if tile <= 1024 else 8,
        **launch_options(logits.device),
    )
    return best_values, best_ids, tile_max, tile_sum, group_max


def gumbel_argmax(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first_token_id: int,
    slots: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See sampling.gumbel_argmax."""
    num_rows, num_tokens = logits.shape
    values = logits.new_empty(num_rows, dtype=torch.float32)
    ids = logits.new_empty(num_rows, dtype=torch.int64)
    if num_rows == 0:
        return values, ids
    arguments = (logits, temperature, None, seeds, positions, first_token_id, slots)
    best_values, best_ids, *_ = _scan(*arguments)
    num_tiles = best_values.shape[1]
    _reduce_kernel[(num_rows,)](
        best_values,
        best_ids,
        values,
        ids,
        num_tiles,
        num_tokens,
        first_token_id,
        TILES=max(16, triton.next_power_of_2(num_tiles)),
        num_warps=1,
        **launch_options(logits.device),
    )
    return values, ids


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    first_token_id: int,
) -> torch.Tensor:
    """See sampling.sample."""
    if logits.shape[0] == 0:
        return seeds.new_empty(0)
    scanned = _scan(logits, temperature, top_k, seeds, positions, first_token_id)
    parameters = (temperature, top_k, top_p, min_p, seeds, positions)
    return select_rows(logits, parameters, scanned, first_token_id)
