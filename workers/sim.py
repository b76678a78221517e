"""The simulated device: no weights, no torch; a formula for the time of a step and for its tokens.

A token follows from the request's seed (0 when it is greedy) and its position, never from its slot
or its neighbours, so that a replay continues with the same ids and a lost or doubled token shows.
End-of-sequence ids never come, so requests run to max_tokens. Penalties, masks and logprobs are
accepted and ignored; steps take sim_step_ms plus sim_token_ms for every token they compute.
"""

import time
from collections.abc import Sequence
from itertools import compress
from typing import Final

import numpy as np
import numpy.typing as npt

from nvserve.protocol.config import Config
from nvserve.protocol.control import EpochReady, StartEpoch
from nvserve.protocol.messages import NewRows, SchedulerOutput
from nvserve.protocol.progress import Phase, ProgressPage
from nvserve.workers.pool_size import num_wanted_blocks, with_scratch
from nvserve.workers.step_result import Report, StepResult, Wait

Words = npt.NDArray[np.uint64]

_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)


def mix(seeds: Words, positions: Words) -> Words:
    """64 well-mixed bits of each (seed, position), by splitmix64's finalizer."""
    words = (seeds ^ positions * _ODD) + _ODD
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))


class SimPending:
    """A step that is over at a given time."""

    def __init__(self, result: StepResult, due_s: float) -> None:
        self._result = result
        self._due_s = due_s  # of the monotonic clock

    def is_done(self) -> bool:
        return time.monotonic() >= self._due_s

    def poll_ms(self) -> int:
        return max(0, int((self._due_s - time.monotonic()) * 1000))

    def result(self) -> StepResult:
        assert self.is_done(), "the step is still running"
        return self._result


class SimEngine:
    """One simulated rank; see step_result.Engine for the contract."""

    def __init__(self, config: Config, page: ProgressPage) -> None:
        self._config = config
        self._page = page
        num_slots = config.max_num_seqs
        self._seeds = np.zeros(num_slots, dtype=np.uint64)
        self._lengths = np.zeros(num_slots, dtype=np.uint64)
        self._decoding = np.zeros(0, dtype=np.int64)
        # Sampled ids are indices of this table, which skips the ids that would end a request.
        ids = np.arange(config.facts.vocab_size, dtype=np.int32)
        usable = np.setdiff1d(ids, np.array(config.facts.eos_token_ids, dtype=np.int32))
        self._usable_ids = usable if len(usable) else ids
        self._free_at_s = 0.0  # when the device is done with all launched steps

    def begin(self, start: StartEpoch, launch_dir: str, wait: Wait, report: Report) -> EpochReady:
        self._page.beat(Phase.REBUILDING)
        self._decoding = self._decoding[:0]
        self._lengths[:] = 0
        wanted = num_wanted_blocks(self._config)
        num_blocks = start.num_kv_blocks or with_scratch(self._config, wanted)
        return EpochReady(start.epoch, num_blocks, {}, "sim")

    def launch(self, step: SchedulerOutput) -> SimPending:
        self._apply(step)
        slots, num_tokens = self._decoding, len(self._decoding)
        self._lengths[slots] += np.uint64(1)
        if step.chunks is not None:
            chunks = step.chunks
            self._lengths[chunks.slots] = np.add(chunks.starts, chunks.counts)
            num_tokens += sum(chunks.counts)
            sampling = list(compress(chunks.slots, chunks.samples))
            slots = np.concatenate((slots, np.array(sampling, dtype=np.int64)))
        words = mix(self._seeds[slots], self._lengths[slots])
        tokens = self._usable_ids[words % np.uint64(len(self._usable_ids))]
        return self._pending(tokens.tobytes(), num_tokens)

    def prepare_ahead(self) -> bool:
        return False

    def abort(self) -> None:
        pass

    @property
    def is_aborted(self) -> bool:
        return False

    def end(self) -> None:
        pass

    def _apply(self, step: SchedulerOutput) -> None:
        if step.freed or step.leaves or step.joins:
            gone = {*(step.freed or ()), *(step.leaves or ())}
            stay = [slot for slot in self._decoding.tolist() if slot not in gone]
            self._decoding = np.array(stay + (step.joins or []), dtype=np.int64)
        if step.new is not None:
            self._seeds[step.new.slots] = _seeds(step.new)

    def _pending(self, tokens: bytes, num_tokens: int) -> SimPending:
        """The device runs steps one after another."""
        config = self._config
        busy_ms = config.sim_step_ms + config.sim_token_ms * num_tokens
        self._free_at_s = max(self._free_at_s, time.monotonic()) + busy_ms / 1000
        return SimPending(StepResult(tokens, forward_ms=busy_ms), self._free_at_s)


def _seeds(new: NewRows) -> Sequence[int]:
    pairs = zip(new.seeds, new.sampling, strict=True)
    return [0 if params.is_greedy else seed for seed, params in pairs]
