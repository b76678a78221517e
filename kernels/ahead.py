"""Which weights come into the L2 cache while small kernels leave the memory idle.

The next matmul's weights depend on nothing, so a kernel ahead of it can ask for the first of them,
on Hopper, where one instruction asks for a whole row.
"""

from typing import Final, NamedTuple

import torch

_AFTER_NORM: Final = 8 << 20  # bytes that a norm asks for
_AFTER_ROPE: Final = 32 << 20  # attention runs in between as well,
_MANY_TOKENS: Final = 64  # and uses the memory itself from here on


class Ahead(NamedTuple):
    """The first num_bytes of every row of a weight [N, K]."""

    weight: torch.Tensor
    num_bytes: int


def after_norm(weight: torch.Tensor, num_tokens: int) -> Ahead | None:
    """What a norm of num_tokens asks for ahead of a matmul."""
    return _cut(weight, _AFTER_NORM)


def after_rope(weight: torch.Tensor, num_tokens: int) -> Ahead | None:
    """What the kernel before attention asks for ahead of the output projection."""
    return _cut(weight, _AFTER_ROPE if num_tokens < _MANY_TOKENS else _AFTER_NORM)


def _cut(weight: torch.Tensor, budget: int) -> Ahead | None:
    """Bulk prefetches are multiples of 16 bytes; under 128 they are not worth their instruction."""
    row_bytes = weight.shape[1] * weight.element_size()
    num_bytes = min(row_bytes, budget // weight.shape[0]) // 16 * 16
    if not weight.is_cuda or num_bytes < 128 or row_bytes % 16:
        return None
    return Ahead(weight, num_bytes)
