"""A step that was launched: its results on their way from the device."""

import time
from typing import Final

import torch

from nvserve.kernels.decode_step import BAD_TOKEN
from nvserve.protocol.messages import Logprobs
from nvserve.workers.sampler import DeviceLogprobs
from nvserve.workers.staging import Staging
from nvserve.workers.step_result import StepFault, StepResult


class PendingStep:
    """Copies of a step's results to the host, complete once `is_done`.

    Made on the stream of the step right after its last kernel, between Staging's begin and end; on
    a CPU all is done by then.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        slots: list[int],
        logprobs: DeviceLogprobs | None,
        prompt_logprobs: list[DeviceLogprobs | None] | None,
        started: "Stopwatch",
        staging: Staging,
    ) -> None:
        """`ids` [R] int32 are those of `slots`, which the host knows."""
        self._slots = slots
        self._ids = staging.download(ids)
        self._logprobs = None if logprobs is None else _HostLogprobs(logprobs, staging)
        self._prompt_logprobs = None
        if prompt_logprobs is not None:
            self._prompt_logprobs = [
                None if score is None else _HostLogprobs(score, staging)
                for score in prompt_logprobs
            ]
        self._stopwatch = started
        started.stop()

    def is_done(self) -> bool:
        return self._stopwatch.is_stopped()

    def poll_ms(self) -> int:
        return 0  # a GPU step is over in less than a poll can sleep

    def result(self) -> StepResult:
        """The results of a step that is done; StepFault names a row of NaN or infinite logits."""
        assert self.is_done(), "the step is still running"
        ids = self._ids.numpy()
        if (ids == BAD_TOKEN).any():
            row = int((ids == BAD_TOKEN).argmax())
            raise StepFault(f"row {row} (slot {self._slots[row]}): logits are not finite")
        scores = self._prompt_logprobs
        return StepResult(
            ids.tobytes(),
            None if self._logprobs is None else self._logprobs.message(),
            None if scores is None else [None if s is None else s.message() for s in scores],
            self._stopwatch.elapsed_ms(),
            self._stopwatch.launch_ms(),
        )


class Stopwatch:
    """The time of a step on its device, from creation, or the end of the step before, to `stop`.

    Each event costs the device a moment, so the end of a step is the beginning of the next where
    they follow each other closely.
    """

    def __init__(self, device: torch.device, before: "Stopwatch | None" = None) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            if before is not None and before._events is not None and not before.is_stopped():
                begin = before._events[1]
            else:
                begin = torch.cuda.Event(enable_timing=True)
                begin.record()
            self._events = (begin, torch.cuda.Event(enable_timing=True))
        self._began_s: Final = time.perf_counter()
        self._ended_s = 0.0

    def stop(self) -> None:
        if self._events is not None:
            self._events[1].record()
        self._ended_s = time.perf_counter()

    def is_stopped(self) -> bool:
        return self._events is None or bool(self._events[1].query())

    def elapsed_ms(self) -> float:
        if self._events is not None:
            return float(self._events[0].elapsed_time(self._events[1]))
        return self._host_ms()

    def launch_ms(self) -> float:
        """What the host did for it: delta, replay of a graph; 0 on a CPU, where all is host."""
        return self._host_ms() if self._events is not None else 0.0

    def _host_ms(self) -> float:
        return (self._ended_s - self._began_s) * 1000


class _HostLogprobs:
    """DeviceLogprobs after their copy to the host."""

    def __init__(self, source: DeviceLogprobs, staging: Staging) -> None:
        self._rows = source.rows
        self._num_tops = source.num_tops
        self._chosen = staging.download(source.chosen)
        self._top_ids = staging.download(source.top_ids.int())
        self._top_values = staging.download(source.top_values)

    def message(self) -> Logprobs:
        width = self._top_ids.shape[1]
        num_tops = [min(count, width) for count in self._num_tops]
        is_kept = torch.arange(width)[None, :] < torch.tensor(num_tops)[:, None]
        return Logprobs(
            rows=self._rows,
            chosen=self._chosen.numpy().tobytes(),
            num_tops=num_tops,
            top_ids=self._top_ids[is_kept].numpy().tobytes(),
            top_values=self._top_values[is_kept].numpy().tobytes(),
        )
