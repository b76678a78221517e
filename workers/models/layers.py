"""Parts every decoder is made of: sharded weights, the rotary table, the step's attention.

A weight is a plain tensor. What fills it is a list of Parameters, each one checkpoint tensor, the
part of it that this rank holds, and the place it goes to, so that fused weights (Q, K and V in one)
and replicated ones need no special case in the loader.

T tokens in the step, R requests in it, H query heads and K KV heads on this rank, D head size.
"""

import math
from dataclasses import dataclass

import torch

from nvserve.kernels.attention import AttentionBackend, AttentionMetadata
from nvserve.kernels.room import new_rows
from nvserve.workers.models.rope import RopeConfig


@dataclass(frozen=True)
class Parameter:
    """One checkpoint tensor and the slice of it that fills `target`.

    The slice is [start, start + target.shape[axis]) of `axis`; all other axes are whole.
    """

    name: str  # in the checkpoint
    target: torch.Tensor  # a view into this rank's weight
    full_shape: tuple[int, ...]
    axis: int = 0
    start: int = 0


def part(name: str, target: torch.Tensor, axis: int, start: int, full_size: int) -> Parameter:
    """A parameter whose `axis` is cut: full_size values in the checkpoint, from start on here."""
    shape = list(target.shape)
    shape[axis] = full_size
    return Parameter(name, target, tuple(shape), axis, start)


def whole(name: str, target: torch.Tensor) -> Parameter:
    """A parameter that every rank holds completely."""
    return Parameter(name, target, tuple(target.shape))


def rotary_table(
    rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device
) -> torch.Tensor:
    """[num_positions, D] float32: D/2 cosines, then D/2 sines of each position's angles."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = scale_frequencies(1.0 / rope.theta**exponents, rope)
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * frequencies[None, :]
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor
    return table.to(device)


def scale_frequencies(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Rotary frequencies [D/2] for contexts longer than the model was first trained for.

    linear divides all by the factor. llama3 and yarn do so only for wavelengths too long for the
    original context, keep the short ones, and blend between: llama3 along how often a frequency
    turns in that context, yarn along its index.
    """
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_position * frequencies / (2 * math.pi)
        span = rope.high_freq_factor - rope.low_freq_factor
        keep = ((turns - rope.low_freq_factor) / span).clamp(0.0, 1.0)
    else:
        first, last = _yarn_range(2 * len(frequencies), rope)
        keep = 1.0 - ((torch.arange(len(frequencies)) - first) / (last - first)).clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / rope.factor


def _yarn_range(head_dim: int, rope: RopeConfig) -> tuple[float, float]:
    """Indices of the frequencies that turn beta_fast and beta_slow times in the old context."""
    first, last = (
        head_dim
        * math.log(rope.original_max_position / (turns * 2 * math.pi))
        / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    return first, last + 0.001 if first == last else last


@dataclass
class StepInputs:
    """One forward pass: decode rows first, one token each, then the tokens of all chunks."""

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] int64, where each token's K and V go
    num_decodes: int
    decode: AttentionMetadata | None  # of the first num_decodes tokens
    prefill: AttentionMetadata | None  # of the others
    next_positions: torch.Tensor | None = None  # [num_decodes] int64, of what they sample


def attend(
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    inputs: StepInputs,
    backend: AttentionBackend,
    scale: float,
) -> torch.Tensor:
    """Attention of q [T, H, D] over one layer's paged cache, the step's own K and V included."""
    keys, values = cache
    if inputs.prefill is None:
        assert inputs.decode is not None, "a step without tokens runs no model"
        return backend.decode(q, keys, values, inputs.decode, scale)
    if inputs.decode is None:
        return backend.prefill(q, keys, values, inputs.prefill, scale)
    mixed, num_decodes = new_rows(q, *q.shape), inputs.num_decodes
    first, others = q[:num_decodes], q[num_decodes:]
    backend.decode(first, keys, values, inputs.decode, scale, mixed[:num_decodes])
    backend.prefill(others, keys, values, inputs.prefill, scale, mixed[num_decodes:])
    return mixed
