"""The counter-based Gumbel noise of the sampling kernels, as Triton functions."""

from typing import Final

import triton.language as tl

from nvserve.kernels.dispatch import INTERPRETED
from nvserve.kernels.launch import jit

_HAS_PTX: Final = tl.constexpr(not INTERPRETED)


@jit
def token_bits(seed, position, groups):  # type: ignore[no-untyped-def]
    """32 random bits for the tokens 4 * groups .. 4 * groups + 3: [N] int64 -> [4 * N] uint32.

    Philox-4x32-10 with key seed and counter (group, position low, position high, 0).
    """
    c0 = groups.to(tl.uint32)
    zero = c0 * 0
    c1 = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    lane0, lane1, lane2, lane3 = tl.philox(seed, c0, c1, c2, zero)
    pairs = tl.join(tl.join(lane0, lane2), tl.join(lane1, lane3))  # last axes: (l0 l1), (l2 l3)
    return tl.reshape(pairs, (4 * groups.shape[0],))


@jit
def _log(values):  # type: ignore[no-untyped-def]
    """Natural logarithm to about 2e-7 absolute near 1: one instruction, where tl.log takes 20."""
    if _HAS_PTX:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
        )
        return log2 * 0.6931471805599453
    return tl.log(values)


@jit
def gumbel_from_bits(bits):  # type: ignore[no-untyped-def]
    """-log(-log1p(-u)) for u = (bits + 1/2) / 2**32, to about 1e-5."""
    uniform = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    uniform = tl.minimum(uniform, 1.0 - 5.960464477539063e-08)
    # The winners are small u, where 1 - u would lose their digits: a series there.
    series = uniform * (1.0 + uniform * (0.5 + uniform * (0.33333333 + uniform * 0.25)))
    exponential = tl.where(uniform < 0.03125, series, -_log(1.0 - uniform))
    return -_log(exponential)
