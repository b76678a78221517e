"""What the row kernel of sampling does with the groups of one row: list, count, weigh, choose.

A group is GROUP consecutive tokens, whose largest scaled logit the scan left. A pass goes only over
the groups that were listed because they reach a value; TILE tokens of them at a time.
"""

import triton.language as tl

from nvserve.kernels.launch import jit
from nvserve.kernels.noise import gumbel_from_bits, token_bits


@jit
def order(values):  # type: ignore[no-untyped-def]
    """Float32 bits as int32 that compare like the floats (-0.0 under 0.0)."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def value(order):  # type: ignore[no-untyped-def]
    """The inverse of _order, of a scalar."""
    bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@jit
def list_groups(  # type: ignore[no-untyped-def]
    group_max, num_groups, threshold, list_ptr, GROUPS: tl.constexpr
):
    """Write the indices of groups that reach threshold to list_ptr; their number."""
    each = tl.arange(0, GROUPS)
    reaches = ((group_max >= threshold) & (each < num_groups)).to(tl.int32)
    places = tl.cumsum(reaches, axis=0) - 1
    tl.debug_barrier()  # earlier readers of the list are done
    tl.store(list_ptr + places, each, mask=reaches != 0)
    tl.debug_barrier()  # and later ones see it
    return tl.sum(reaches)


@jit
def load_listed(  # type: ignore[no-untyped-def]
    row_ptr,
    list_ptr,
    first,
    count,
    offset,
    num_tokens,
    inverse,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Scaled logits of the listed groups first .. first + TILE / GROUP, -inf outside the row."""
    each = tl.arange(0, TILE)
    place = first + each // GROUP
    group = tl.load(list_ptr + place, mask=place < count, other=0)
    local = group * GROUP + each % GROUP - offset
    inside = (place < count) & (local >= 0) & (local < num_tokens)
    logits = tl.load(row_ptr + local, mask=inside, other=float("-inf"))
    return logits.to(tl.float32) * inverse


@jit
def bound_of_groups(group_max, k):  # type: ignore[no-untyped-def]
    """An order that at least k groups' maxima reach, and not many more; k <= number of groups."""
    keys = order(group_max)
    low = tl.min(keys).to(tl.int64)
    high = tl.max(keys).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) // 2
        reached = tl.sum((keys >= middle).to(tl.int32))
        if reached >= k:
            low = middle
        else:
            high = middle
        if (reached >= k) & (reached <= k + k // 4):
            high = low + 1
    return low


@jit
def kth_largest(  # type: ignore[no-untyped-def]
    row_ptr,
    list_ptr,
    count,
    low,
    high,
    k,
    offset,
    num_tokens,
    inverse,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """A value that exactly the k largest (and ties of the k-th) reach; orders low .. high."""
    per_tile: tl.constexpr = TILE // GROUP
    while high - low > 1:
        middle = (low + high) // 2
        reached = 0
        for first in range(0, count, per_tile):
            scaled = load_listed(
                row_ptr, list_ptr, first, count, offset, num_tokens, inverse, GROUP, TILE
            )
            reached += tl.sum((order(scaled) >= middle).to(tl.int32))
        if reached >= k:
            low = middle
        else:
            high = middle
        if reached == k:
            high = low + 1
    return value(low.to(tl.int32))


@jit
def mass_above(  # type: ignore[no-untyped-def]
    row_ptr,
    list_ptr,
    count,
    pivot,
    strict,
    top,
    offset,
    num_tokens,
    inverse,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sum of exp(value - top) over the listed values above pivot; without strict, pivot counts."""
    masses = tl.zeros([TILE], tl.float32)
    for first in range(0, count, TILE // GROUP):
        scaled = load_listed(
            row_ptr, list_ptr, first, count, offset, num_tokens, inverse, GROUP, TILE
        )
        above = (scaled > pivot) | ((scaled == pivot) & (strict == 0))
        masses += tl.where(above, tl.exp(scaled - top), 0.0)
    return tl.sum(masses)


@jit
def best_above(  # type: ignore[no-untyped-def]
    row_ptr,
    list_ptr,
    count,
    pivot,
    strict,
    seed,
    position,
    base,
    offset,
    num_tokens,
    inverse,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """The best perturbed of the listed values above pivot: its id and scaled logit.

    Without strict the pivot itself counts as above. Without any the id is 2**31 - 1.
    """
    best = float("-inf")
    best_id = 2147483647
    best_scaled = float("-inf")
    for first in range(0, count, TILE // GROUP):
        scaled = load_listed(
            row_ptr, list_ptr, first, count, offset, num_tokens, inverse, GROUP, TILE
        )
        above = (scaled > pivot) | ((scaled == pivot) & (strict == 0))
        fours = tl.arange(0, TILE // 4)
        place = first + fours // (GROUP // 4)
        group = tl.load(list_ptr + place, mask=place < count, other=0)
        counters = base // 4 + group * (GROUP // 4) + fours % (GROUP // 4)
        noise = gumbel_from_bits(token_bits(seed, position, counters))
        values = tl.where(above, scaled + noise, float("-inf"))
        tile_best = tl.max(values)
        # Lists ascend, so a later equal value has the higher id and loses.
        if tile_best > best:
            best = tile_best
            each = tl.arange(0, TILE)
            index = tl.min(tl.where(values == tile_best, each, TILE - 1))
            best_group = tl.load(list_ptr + first + index // GROUP)
            best_id = base + best_group * GROUP + index % GROUP
            best_scaled = tl.max(tl.where(each == index, scaled, float("-inf")))
    return best_id, best_scaled
