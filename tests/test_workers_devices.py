"""Which GPU each rank takes, what joins the ranks and how they part: found out without a GPU."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from step_driver import make_engine, save_model

from nvserve.protocol.control import StartEpoch
from nvserve.workers.devices import Place, choose_gpu
from nvserve.workers.parallel import TensorParallel
from nvserve.workers.step_result import ModelRefused, PeerLost


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


# -- parting ---------------------------------------------------------------------------------------


class Nccl:
    """A group whose abort lasts until no graph is left, as NCCL's does; `told` is what happened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        self.graphs_gone = threading.Event()
        self.is_up = False
        monkeypatch.setattr(dist, "is_initialized", lambda: self.is_up)
        monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", self.abort)

    def abort(self) -> None:
        self.told.append("abort")
        if self.graphs_gone.wait(30.0):
            self.is_up = False

    def group(self) -> TensorParallel:
        parallel = TensorParallel(0, 2)
        parallel._is_nccl = self.is_up = True  # as after join() on GPUs
        return parallel


class Graphs:
    """A runner that has some."""

    def __init__(self, nccl: Nccl) -> None:
        self.nccl = nccl

    def drop_graphs(self) -> None:
        self.nccl.told.append("drop")
        self.nccl.graphs_gone.set()


def test_graphs_go_before_the_end_of_an_abort_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "model", "LlamaForCausalLM")
    engine = make_engine(tmp_path / "model", tmp_path)
    nccl = Nccl(monkeypatch)
    monkeypatch.setattr(engine, "_parallel", nccl.group())
    monkeypatch.setattr(engine, "_runner", Graphs(nccl))
    engine.end()
    assert sorted(nccl.told) == ["abort", "drop"]
    assert not nccl.is_up
    engine.end()  # has nothing left to abort
    assert sorted(nccl.told) == ["abort", "drop", "drop"]


def test_what_fails_after_an_abort_is_a_lost_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "model", "LlamaForCausalLM")
    engine = make_engine(tmp_path / "model", tmp_path)
    nccl = Nccl(monkeypatch)
    nccl.graphs_gone.set()

    def begin(error: Exception, *, is_aborted: bool) -> None:
        def fail(*_: object) -> None:
            engine._parallel = nccl.group()  # that of a rank which is new to this process
            if is_aborted:
                engine.abort()
                engine.abort()  # by the lifeline as well as by the main loop
            raise error

        monkeypatch.setattr(engine, "_begin", fail)
        engine.begin(StartEpoch(1, 2, 0), "", time.sleep, lambda *_: None)

    with pytest.raises(ValueError, match="a bad model"):
        begin(ValueError("a bad model"), is_aborted=False)
    with pytest.raises(PeerLost, match="no such group"):
        begin(ValueError("no such group"), is_aborted=True)
    assert engine.is_aborted
    engine.end()
    assert not engine.is_aborted
    with pytest.raises(KeyError):  # a newer epoch begins
        begin(KeyError(), is_aborted=True)
    engine.end()  # with the thread that aborts


def test_nobody_enters_a_collective_of_an_aborted_group(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = Nccl(monkeypatch)
    entered: list[object] = []
    monkeypatch.setattr(dist, "all_reduce", entered.append)
    parallel = nccl.group()
    parallel.all_reduce(torch.zeros(1))
    assert len(entered) == 1
    parallel.abort()
    with pytest.raises(PeerLost, match="aborted"):
        parallel.all_reduce(torch.zeros(1))
    assert len(entered) == 1
    nccl.graphs_gone.set()
    parallel.leave()
    assert nccl.told == ["abort"]


@pytest.mark.parametrize("size", [1, 2])
def test_an_abort_that_comes_late_spoils_no_later_epoch(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lifeline may have seen the message just before the main loop took it."""
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    dist.FileStore(str(tmp_path / "e1.group"), 2).set("here1", "")  # type: ignore[attr-defined]
    parallel = TensorParallel(0, size)
    parallel.leave()
    release = parallel.release

    def abort_and_release() -> None:
        parallel.abort()
        release()

    monkeypatch.setattr(parallel, "release", abort_and_release)
    parallel.join(str(tmp_path), 1, torch.device("cpu"), _never)
    assert not parallel.is_aborted


def test_an_abort_without_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvserve.workers.parallel.ABORT_LIMIT_S", 0.05)
    nccl = Nccl(monkeypatch)
    parallel = nccl.group()
    with pytest.raises(PeerLost, match="did not abort in"):
        parallel.leave()
    nccl.graphs_gone.set()
    monkeypatch.setattr("nvserve.workers.parallel.ABORT_LIMIT_S", 30.0)
    parallel.leave()  # also ends the thread before the next test


def test_an_abort_that_fails_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = Nccl(monkeypatch)

    def refuse() -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", refuse)
    with pytest.raises(PeerLost, match="did not abort"):
        nccl.group().leave()
