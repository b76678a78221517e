"""The counter-based Gumbel noise of the sampling kernels, as Triton functions."""

from typing import Final

import triton.language as tl

from nvserve.kernels.launch import HAS_PTX, jit

_ROUNDS: Final = tl.constexpr(10)


@jit
def _philox(seed, c0, c1, c2, c3):  # type: ignore[no-untyped-def]
    """tl.philox's words of uint32 counters, by multiplications that give both halves at once.

    It asks for the high and the low half apart, which takes the instructions of two.
    """
    key0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        first = c0.to(tl.uint64) * 0xD2511F53
        second = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (second >> 32).to(tl.uint32) ^ c1 ^ key0
        c2 = (first >> 32).to(tl.uint32) ^ c3 ^ key1
        c1 = second.to(tl.uint32)
        c3 = first.to(tl.uint32)
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    return c0, c1, c2, c3


@jit
def token_bits(seed, position, groups):  # type: ignore[no-untyped-def]
    """32 random bits for the tokens 4 * groups .. 4 * groups + 3: [N] int64 -> [4 * N] uint32.

    Philox-4x32-10 with key seed and counter (group, position low, position high, 0).
    """
    c0 = groups.to(tl.uint32)
    zero = c0 * 0
    c1 = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    lane0, lane1, lane2, lane3 = _philox(seed, c0, c1, c2, zero)
    pairs = tl.join(tl.join(lane0, lane2), tl.join(lane1, lane3))  # last axes: (l0 l1), (l2 l3)
    return tl.reshape(pairs, (4 * groups.shape[0],))


@jit
def _log2(values):  # type: ignore[no-untyped-def]
    """Binary logarithm to about 2e-7 absolute near 1: one instruction, where tl.log2 takes 20."""
    if HAS_PTX:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(values)


@jit
def gumbel_from_bits(bits):  # type: ignore[no-untyped-def]
    """-log(-log1p(-u)) for u = (bits + 1/2) / 2**32, to about 1e-5."""
    uniform = bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    uniform = tl.minimum(uniform, 1.0 - 5.960464477539063e-08)
    # -log2(1 - u). The winners are small u, where 1 - u would lose their digits: a series there.
    series = uniform * 0.36067376 + 0.48089835
    series = uniform * (uniform * (uniform * series + 0.72134752) + 1.4426950)
    exponential = tl.where(uniform < 0.03125, series, -_log2(1.0 - uniform))
    return 0.36651292 - 0.69314718 * _log2(exponential)  # log(log(2)) for the first logarithm's 2
