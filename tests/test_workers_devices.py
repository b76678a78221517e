"""Which GPU each rank takes, and what joins the ranks: found out without a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nvserve.workers.devices import Place, choose_gpu
from nvserve.workers.parallel import TensorParallel
from nvserve.workers.step_result import ModelRefused


@pytest.mark.parametrize("may_share", [False, True])
def test_with_enough_gpus_every_rank_has_its_own(may_share: bool) -> None:
    for num_gpus in (2, 8):
        places = [
            choose_gpu(rank=rank, tp_size=2, num_gpus=num_gpus, may_share=may_share)
            for rank in range(2)
        ]
        assert places == [Place(0, is_shared=False), Place(1, is_shared=False)]


@pytest.mark.parametrize("rank", [0, 1])
def test_too_few_gpus_are_refused_by_every_rank_with_both_numbers(rank: int) -> None:
    with pytest.raises(ModelRefused, match="--tp 2 needs 2 GPUs, this machine has 1"):
        choose_gpu(rank=rank, tp_size=2, num_gpus=1, may_share=False)


def test_ranks_that_may_share_take_turns() -> None:
    places = [choose_gpu(rank=r, tp_size=5, num_gpus=2, may_share=True) for r in range(5)]
    assert [place.index for place in places] == [0, 1, 0, 1, 0]
    assert all(place.is_shared for place in places)


def test_nothing_to_share_is_refused() -> None:
    with pytest.raises(ModelRefused, match="has 0"):
        choose_gpu(rank=0, tp_size=1, num_gpus=0, may_share=True)


@pytest.mark.parametrize(
    ("device", "wants_gloo", "backend"),
    [("cuda:0", False, "nccl"), ("cuda:0", True, "gloo"), ("cpu", False, "gloo")],
)
def test_nccl_joins_ranks_on_gpus_of_their_own_and_gloo_all_others(
    device: str,
    wants_gloo: bool,
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[tuple[str, Any]] = []

    def join(name: str, **fields: Any) -> None:
        called.append((name, fields["device_id"]))

    monkeypatch.setattr(dist, "init_process_group", join)
    dist.FileStore(str(tmp_path / "e0.group"), 2).set("here1", "1")  # type: ignore[attr-defined]
    parallel = TensorParallel(0, 2, wants_gloo=wants_gloo)
    parallel.join(str(tmp_path), 0, torch.device(device), _never)
    assert called == [(backend, torch.device(device) if backend == "nccl" else None)]


def _never(seconds: float) -> None:
    raise AssertionError("all ranks are there")
