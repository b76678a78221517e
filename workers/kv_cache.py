"""The paged keys and values of all layers, and how many blocks of them fit.

Block 0 is scratch: padded rows write there, and nobody reads it. `num_blocks` counts it.
"""

import math
from pathlib import Path
from typing import Final

import numpy as np
import torch

from nvserve.protocol.config import Config
from nvserve.workers.models.config import Shard
from nvserve.workers.pool_size import num_wanted_blocks, with_scratch

CPU_MEMORY_SHARE: Final = 0.25  # of the memory that is free at start, by all ranks together


class KvCache:
    """The pool of one rank; `layers[i]` is (keys, values), [num_blocks, block_size, K, D] each."""

    def __init__(
        self,
        shard: Shard,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        config = shard.config
        shape = (num_blocks, block_size, shard.num_kv_heads, config.head_dim)
        # Zeros, since what a kernel masks out it may still multiply by 0, and 0 * NaN is NaN.
        pool = _zeros((config.num_layers, 2, *shape), device, dtype)
        self.num_blocks: Final = num_blocks
        self.block_size: Final = block_size
        self.layers: Final = [(layer[0], layer[1]) for layer in pool]


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    # numpy leaves zeroing to the kernel, page by page at the first touch: the pool costs no time
    # at start and no memory before it is used. torch writes all of it.
    raw = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8))
    return raw.view(dtype).view(shape)


def block_bytes(shard: Shard, block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block over all layers of one rank."""
    values_per_token = 2 * shard.config.num_layers * shard.num_kv_heads * shard.config.head_dim
    return block_size * values_per_token * dtype.itemsize


def num_cpu_blocks(config: Config, bytes_per_block: int, available_bytes: int) -> int:
    """Blocks of a CPU rank, scratch included: what the limits of the launch ask for, if it fits.

    ModelRefused when not even one request of max_model_len fits.
    """
    affordable = int(available_bytes * CPU_MEMORY_SHARE) // (bytes_per_block * config.tp_size)
    return with_scratch(config, min(num_wanted_blocks(config), affordable))


def num_cuda_blocks(
    config: Config, bytes_per_block: int, device: torch.device, peak_bytes: int
) -> int:
    """Blocks that fit beside weights and activations of `peak_bytes`, scratch included.

    Everything now in use on the card counts, other processes included. ModelRefused as above.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    room = int(total * config.gpu_memory_utilization) - (total - free) - peak_bytes
    return with_scratch(config, max(0, room) // bytes_per_block)


def available_memory_bytes() -> int:
    """Main memory that can be had without swapping, the control group's limit respected."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except FileNotFoundError:  # no control group of version 2
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used))
