"""An engine that fails when it is told to: around the real one in a launch with --enable-faults."""

import dataclasses
from typing import Final

from nvserve.protocol.control import EpochReady, FaultKind, StartEpoch
from nvserve.protocol.faults import BEGIN, LAUNCH, Faults, strike
from nvserve.protocol.messages import SchedulerOutput, unpack_ids
from nvserve.workers.step_result import (
    Engine,
    NormOwner,
    Pending,
    Report,
    StepFault,
    StepResult,
    Wait,
)

NAN: Final = float("nan")


class FaultyEngine:
    """The engine within, and the faults that strike at its steps and epochs."""

    def __init__(self, engine: Engine, faults: Faults) -> None:
        self._engine: Final = engine
        self._faults: Final = faults

    def begin(self, start: StartEpoch, launch_dir: str, wait: Wait, report: Report) -> EpochReady:
        fault = self._faults.find(BEGIN)
        if fault is not None:
            strike(fault)
        return self._engine.begin(start, launch_dir, wait, report)

    def launch(self, step: SchedulerOutput) -> Pending:
        tokens = () if step.chunks is None else unpack_ids(step.chunks.tokens)
        fault = self._faults.find(LAUNCH, step=step.step, tokens=tokens)
        if fault is None:
            return self._engine.launch(step)
        if fault.kind is FaultKind.NAN:
            return self._launch_nan(step)
        if fault.kind is FaultKind.SHAPE:
            return _ShortResult(self._engine.launch(step))
        strike(fault)
        return self._engine.launch(step)

    def prepare_ahead(self) -> bool:
        return self._engine.prepare_ahead()

    def abort(self) -> None:
        self._engine.abort()

    @property
    def is_aborted(self) -> bool:
        return self._engine.is_aborted

    def end(self) -> None:
        self._engine.end()

    def _launch_nan(self, step: SchedulerOutput) -> Pending:
        """Run the step with a weight that is not a number, in the order of the device's stream."""
        if not isinstance(self._engine, NormOwner):
            raise StepFault("injected: logits are not finite")
        norm = self._engine.final_norm
        kept = norm.clone()
        norm.fill_(NAN)
        try:
            return self._engine.launch(step)
        finally:
            norm.copy_(kept)


class _ShortResult:
    """A launched step whose result will lack its last id."""

    def __init__(self, pending: Pending) -> None:
        self._pending: Final = pending

    def is_done(self) -> bool:
        return self._pending.is_done()

    def poll_ms(self) -> int:
        return self._pending.poll_ms()

    def result(self) -> StepResult:
        result = self._pending.result()
        return dataclasses.replace(result, tokens=result.tokens[:-4])
