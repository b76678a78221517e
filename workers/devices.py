"""Which GPU a rank takes. Pure: counts in, a choice or a refusal out."""

from dataclasses import dataclass

from nvserve.workers.step_result import ModelRefused


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's GPU. Ranks that share one are joined by gloo, since NCCL refuses such a group."""

    index: int
    is_shared: bool


def choose_gpu(*, rank: int, tp_size: int, num_gpus: int, may_share: bool) -> Place:
    """A GPU of its own for every rank; with `may_share` they take turns when there are too few."""
    if num_gpus >= tp_size:
        return Place(rank, is_shared=False)
    if not may_share or num_gpus == 0:
        raise ModelRefused(f"--tp {tp_size} needs {tp_size} GPUs, this machine has {num_gpus}")
    return Place(rank % num_gpus, is_shared=True)
