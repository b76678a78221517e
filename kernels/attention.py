"""Attention over the paged KV cache: the step's metadata and the choice of a backend.

T tokens in the step, R requests in it, H query heads and K KV heads on this rank, D head size.
Caches are [num_blocks, block_size, K, D]; block 0 is scratch.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

import torch

from nvserve.kernels.dispatch import HAS_TRITON, INTERPRETED


@dataclass
class AttentionMetadata:
    """Where each request's queries and keys are; made once a step, shared by all layers.

    The maxima are host numbers and upper bounds: in a decode graph max_seq_len is the block tables'
    width in tokens. A padded row has length 1 and a table of zeros.
    """

    cu_seqlens_q: torch.Tensor  # [R + 1] int32, first query row of each request, then T
    seq_lens: torch.Tensor  # [R] int32, KV tokens of each request, this step's included
    block_tables: torch.Tensor  # [R, max_blocks] int32, padded with 0
    max_query_len: int
    max_seq_len: int
    # What AttentionBackend.plan_decode left for its own decode calls; None before it ran.
    decode_plan: object = None


class NewTokens(NamedTuple):
    """One token of each request before its heads are normed and rotated.

    The arguments of rope.qk_norm_rope_cache, whose positions and slots follow from the lengths and
    the tables: a new token is the last of its request.
    """

    qkv: torch.Tensor  # [R, (H + 2 K) * D], rows contiguous
    cos_sin: torch.Tensor  # [max_position, D] float32
    q_weight: torch.Tensor | None  # [D]
    k_weight: torch.Tensor | None
    eps: float


FusedDecode: TypeAlias = Callable[
    [NewTokens, torch.Tensor, torch.Tensor, AttentionMetadata, float], torch.Tensor
]
# Up to how many rows a decode step takes the fused way where there is one; 0: never. On H200, with
# 1, 8, 48, 64 and 128 rows, a step of a 0.6B gained 7.5, 10.5, 2.2, -2.0 and -2.8 % by it, of an 8B
# 1.2, 2.8, 0.2, -0.9 and -1.0 %: keys and values are on their way before the projection has ended.
FUSED_ROWS: Final = 48


class AttentionBackend(Protocol):
    """One implementation of paged attention.

    K and V of the step's tokens are already written, but for those that decode_fused writes.
    """

    name: str
    can_be_captured: bool  # by a CUDA graph: it asks the device for nothing

    def plan_decode(
        self,
        meta: AttentionMetadata,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        """Divide a decode step's work from meta.seq_lens, on the device, into meta.decode_plan.

        Call once a step before the first decode, inside the CUDA graph when there is one. Without
        it decode plans for itself in every layer.
        """

    def prefill(
        self,
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of chunks of any lengths, q [T, H, D] -> [T, H, D].

        Query i of n in a request of length s sees the keys up to s - n + i. Written to `out` where
        that is given, which is contiguous.
        """

    def decode(
        self,
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one query a request, q [R, H, D] -> [R, H, D]; may be captured.

        Written to `out` as by prefill.
        """

    @property
    def decode_fused(self) -> FusedDecode | None:
        """qk_norm_rope_cache of new tokens and decode, (new, key_cache, value_cache, meta, scale)
        -> [R, H, D], in one kernel; None where the backend has none. Every length is at least 1.
        """


def fused_decode(backend: AttentionBackend, num_rows: int) -> FusedDecode | None:
    """The one place that chooses whether a decode step of this many rows is fused, or None."""
    return backend.decode_fused if num_rows <= FUSED_ROWS else None


def _no_fa3(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str:
    """Why FlashAttention 3 cannot serve this, or nothing."""
    if device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "needs a Hopper GPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"needs 16-bit values, not {dtype}"
    if head_dim > 256 or head_dim % 8:
        return f"needs a head size that is a multiple of 8 up to 256, not {head_dim}"
    if importlib.util.find_spec("flash_attn_interface") is None:
        return "needs the package flash_attn_interface (FlashAttention 3)"
    return ""


def _no_fa2(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str:
    """Why FlashAttention 2 cannot serve this, or nothing."""
    if device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"needs 16-bit values, not {dtype}"
    if block_size % 256:
        return f"needs a block size that is a multiple of 256, not {block_size}"
    if head_dim > 256 or head_dim % 8:
        return f"needs a head size that is a multiple of 8 up to 256, not {head_dim}"
    if importlib.util.find_spec("flash_attn") is None:
        return "needs the package flash_attn (FlashAttention 2)"
    return ""


def _no_triton(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str:
    """Why our Triton kernels cannot serve this, or nothing."""
    if not HAS_TRITON:
        return "needs the package triton"
    if device.type != "cuda" and not INTERPRETED:
        return f"needs a CUDA device, not {device.type}"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"needs float16, bfloat16 or float32, not {dtype}"
    if head_dim > 256:
        return f"needs a head size up to 256, not {head_dim}"
    return ""


def _no_fa3_and_triton(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> str:
    """Why FlashAttention 3 for prefill with our decode cannot serve this, or nothing."""
    arguments = (device, dtype, head_dim, block_size)
    return _no_fa3(*arguments) or _no_triton(*arguments)


def _no_torch(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str:
    return ""


# Best first: without an override the first that can serve is taken. Behind torch, which always
# can, stand those that are only ever taken by name: fa3 alone, and fa2, which needs a block size
# that nobody has by accident.
_REFUSALS: Final[dict[str, Callable[[torch.device, torch.dtype, int, int], str]]] = {
    "fa3+triton": _no_fa3_and_triton,
    "triton": _no_triton,
    "torch": _no_torch,
    "fa3": _no_fa3,
    "fa2": _no_fa2,
}


def select_backend(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    override: str | None = None,
) -> AttentionBackend:
    """The best backend for these, or the one named; ValueError says why that one cannot serve."""
    if override is not None:
        if override not in _REFUSALS:
            raise ValueError(f"no attention backend {override!r}; there are {sorted(_REFUSALS)}")
        refusal = _REFUSALS[override](device, dtype, head_dim, block_size)
        if refusal:
            raise ValueError(f"attention backend {override!r} {refusal}")
        return _make(override)
    usable = (n for n, why in _REFUSALS.items() if not why(device, dtype, head_dim, block_size))
    return _make(next(usable))


def _make(name: str) -> AttentionBackend:
    # They import this module; and the GPU's need libraries that a CPU-only install does not have.
    if name == "torch":
        from nvserve.kernels.attention_torch import TorchBackend

        return TorchBackend()
    if name == "triton":
        from nvserve.kernels.attention_triton import TritonBackend

        return TritonBackend()
    from nvserve.kernels.attention_flash import Flash2Backend, Flash3Backend, MixedBackend

    if name == "fa2":
        return Flash2Backend()
    return Flash3Backend() if name == "fa3" else MixedBackend()
