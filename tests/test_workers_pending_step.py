"""What a step tells of its own time: on a device with a clock of its own, and on the host."""

import itertools
import time

import pytest
import torch

from nvserve.protocol.messages import ModelOutput, StepDone, pack_ids
from nvserve.workers.main import answer
from nvserve.workers.pending_step import PendingStep, Stopwatch
from nvserve.workers.staging import Staging
from nvserve.workers.step_result import StepResult

CPU = torch.device("cpu")


class DeviceEvent:
    """An event of a device that is always 7 ms behind, and never done while it is asked."""

    num_recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        DeviceEvent.num_recorded += 1

    def query(self) -> bool:
        return False

    def elapsed_time(self, end: "DeviceEvent") -> float:
        return 7.0


@pytest.fixture
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events without a GPU, and a host clock that goes on by 0.25 s whenever it is read."""
    clock = itertools.count(100.0, 0.25)
    monkeypatch.setattr(torch.cuda, "Event", DeviceEvent)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    DeviceEvent.num_recorded = 0


@pytest.mark.usefixtures("_device")
def test_on_a_gpu_the_launch_is_the_hosts_time_and_the_step_the_devices() -> None:
    watch = Stopwatch(torch.device("cuda"))
    watch.stop()
    assert watch.launch_ms() == 250.0
    assert watch.elapsed_ms() == 7.0


@pytest.mark.usefixtures("_device")
def test_a_step_behind_a_running_one_has_a_launch_of_its_own_and_one_event_less() -> None:
    first = Stopwatch(torch.device("cuda"))
    first.stop()
    second = Stopwatch(torch.device("cuda"), first)
    second.stop()
    assert second.launch_ms() == 250.0
    assert DeviceEvent.num_recorded == 3


def test_on_a_cpu_the_hosts_time_is_the_step_and_there_is_no_launch() -> None:
    watch = Stopwatch(CPU)
    torch.ones(1000).sum()
    pending = PendingStep(
        torch.tensor([5], dtype=torch.int32), [0], None, None, watch, Staging(CPU)
    )
    result = pending.result()
    assert result.forward_ms > 0.0
    assert result.launch_ms == 0.0


def test_core_hears_of_both_times_from_rank_0_only() -> None:
    result = StepResult(pack_ids([5]), forward_ms=4.0, launch_ms=0.5)
    told = answer(result, epoch=2, step=9, rank=0)
    assert isinstance(told, ModelOutput)
    assert (told.epoch, told.step, told.forward_ms, told.launch_ms) == (2, 9, 4.0, 0.5)
    other = answer(result, epoch=2, step=9, rank=1)
    assert other == StepDone(2, 9, 1, told.checksum)
