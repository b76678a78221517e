"""Plain torch twins of the sampling kernels: noise, selection, truncation, penalties.

The noise is Philox-4x32-10 in int64 arithmetic, bit for bit what the GPU computes. R rows, V tokens
of this vocabulary shard, S slots.
"""

from typing import Final

import torch

GREEDY_BELOW: Final = 1e-5  # temperatures under this are greedy

_LOW32: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10


def _multiply(factor: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of factor * word, both under 2**32, without leaving int64."""
    high, low = factor * (word >> 16), factor * (word & 0xFFFF)
    return (high + (low >> 16)) >> 16, ((high << 16) + low) & _LOW32


def philox(
    seeds: torch.Tensor, counters: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Philox-4x32-10 words, [..., 4] int64 in 0 .. 2**32 - 1, for int64 seeds as 64-bit keys.

    The counters are the three low words (the fourth is 0); everything broadcasts.
    """
    key0, key1 = seeds & _LOW32, (seeds >> 32) & _LOW32
    zero = torch.zeros_like(seeds)
    c0, c1, c2, c3 = torch.broadcast_tensors(*counters, zero)
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + _KEY_STEPS[0]) & _LOW32, (key1 + _KEY_STEPS[1]) & _LOW32
    return torch.stack((c0, c1, c2, c3), dim=-1)


def token_bits(
    seeds: torch.Tensor, positions: torch.Tensor, num_tokens: int, first_token_id: int
) -> torch.Tensor:
    """The 32 random bits of each token, [R, num_tokens] int64.

    The counter is (id // 4, position low word, position high word, 0), the lane is id % 4.
    """
    first = first_token_id // 4
    last = (first_token_id + num_tokens + 3) // 4
    groups = torch.arange(first, last, device=seeds.device)[None, :]
    low, high = positions[:, None] & _LOW32, (positions[:, None] >> 32) & _LOW32
    bits = philox(seeds[:, None], (groups, low, high)).flatten(1)
    offset = first_token_id - 4 * first
    return bits[:, offset : offset + num_tokens]


def gumbel_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise from 32 uniform bits: -log(-log1p(-u)), u = (bits + 1/2) / 2**32.

    Small u are the winners, and float32 keeps all their digits; u never rounds up to 1.
    """
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def scale_logits(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Float32 logits times 1 / temperature: one rounded product, the same on every device."""
    return logits.float() * temperature.clamp(min=GREEDY_BELOW).reciprocal()[:, None]


def perturb(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first_token_id: int,
) -> torch.Tensor:
    """Scaled logits + noise in float32; the logits themselves in greedy rows."""
    greedy = (temperature < GREEDY_BELOW)[:, None]
    bits = token_bits(seeds, positions, logits.shape[1], first_token_id)
    noisy = scale_logits(logits, temperature) + gumbel_from_bits(bits)
    return torch.where(greedy, logits.float(), noisy)


def first_argmax(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row maxima and the lowest index that has each (torch.max promises no particular one)."""
    best = values.amax(dim=-1)
    return best, (values == best[:, None]).to(torch.uint8).argmax(dim=-1)


def gumbel_argmax(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first_token_id: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest perturbed logit of each row and its global token id."""
    best, index = first_argmax(perturb(logits, temperature, seeds, positions, first_token_id))
    return best, index + first_token_id


def kept(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Which tokens survive truncation, [R, V] bool; sampling.sample defines it."""
    num_tokens = logits.shape[1]
    scaled = scale_logits(logits, temperature)
    ordered = scaled.sort(dim=-1, descending=True).values
    limit = torch.where((top_k <= 0) | (top_k > num_tokens), num_tokens, top_k)
    kth = ordered.gather(1, limit.long()[:, None] - 1)
    masses = (ordered - ordered[:, :1]).double().exp().masked_fill(ordered < kth, 0.0)
    above = (masses.cumsum(dim=-1) - masses) / masses.sum(dim=-1, keepdim=True)
    inside = (above < top_p[:, None]) & (ordered >= kth)
    num_inside = inside.sum(dim=-1, keepdim=True).clamp(min=1)
    nucleus = torch.where(top_p[:, None] >= 1.0, kth, ordered.gather(1, num_inside - 1))
    floor = ordered[:, :1] + min_p[:, None].clamp(min=0.0).log()
    return (scaled >= kth) & (scaled >= nucleus) & (scaled >= floor)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    first_token_id: int = 0,
) -> torch.Tensor:
    """The largest perturbed logit among the tokens that survive truncation."""
    keep = kept(logits, temperature, top_k, top_p, min_p) | (temperature < GREEDY_BELOW)[:, None]
    values = perturb(logits, temperature, seeds, positions, first_token_id)
    _, index = first_argmax(values.masked_fill(~keep, float("-inf")))
    return index + first_token_id


def apply_penalties(
    logits: torch.Tensor,
    slots: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_mask: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """Penalize tokens already seen, in place."""
    counts = output_counts[slots.long()].float()
    seen = (counts > 0) | (prompt_mask[slots.long()] != 0)
    wide = logits.float()
    strength = repetition[:, None]
    repeated = torch.where(wide > 0, wide / strength, wide * strength)
    wide = torch.where(seen, repeated, wide)
    wide = wide - frequency[:, None] * counts - presence[:, None] * (counts > 0)
    return logits.copy_(wide)


def apply_token_mask(logits: torch.Tensor, token_mask: torch.Tensor) -> torch.Tensor:
    """Set every token whose bit is 0 to -inf, in place."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    allowed = (token_mask[:, ids // 32] >> (ids % 32)) & 1
    return logits.masked_fill_(allowed == 0, float("-inf"))


def count_tokens(output_counts: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Add one to output_counts[slot, id] for each row whose id lies in the table."""
    rows, ids = slots.long(), token_ids.long()
    inside = (ids >= 0) & (ids < output_counts.shape[1])
    ones = inside.to(output_counts.dtype)
    output_counts.index_put_((rows, torch.where(inside, ids, 0)), ones, accumulate=True)
