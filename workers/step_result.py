"""What main.py sees of a device: the engine that runs steps, and the results they leave.

Free of torch, so that the simulated device starts without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from nvserve.protocol.control import EpochReady, StartEpoch
from nvserve.protocol.messages import Logprobs, SchedulerOutput

if TYPE_CHECKING:
    import torch

Wait = Callable[[float], None]  # waits at most that many seconds, or raises to give up
Report = Callable[[str, float], None]  # a phase of starting, and the part of it that is done


class StepFault(RuntimeError):
    """The step ran, but its results cannot be used."""


class PeerLost(RuntimeError):
    """A collective failed: some rank is gone, and with it the group."""


class ModelRefused(ValueError):
    """The model cannot be served as configured, in one line that a user understands."""


@dataclass(frozen=True)
class StepResult:
    """What a step yields: one id a row, in the order that SchedulerOutput defines."""

    tokens: bytes  # int32
    logprobs: Logprobs | None = None
    prompt_logprobs: list[Logprobs | None] | None = None  # by chunk
    forward_ms: float = 0.0
    launch_ms: float = 0.0  # of the host; 0 where the host computes the step itself


class Pending(Protocol):
    """A launched step."""

    def is_done(self) -> bool:
        """True once `result` may be called; never waits."""
        ...

    def poll_ms(self) -> int:
        """How long one may sleep before it is worth asking again."""
        ...

    def result(self) -> StepResult:
        """The results, once done; StepFault when they cannot be used."""
        ...


class Engine(Protocol):
    """One rank's device. A failed step leaves it unusable until the next `begin`."""

    def begin(self, start: StartEpoch, launch_dir: str, wait: Wait, report: Report) -> EpochReady:
        """Join an epoch with empty slots; weights already loaded stay.

        ModelRefused is final; PeerLost ends this epoch only; what `wait` raises passes through.
        """
        ...

    def launch(self, step: SchedulerOutput) -> Pending:
        """Start a step; steps finish in the order of their launch."""
        ...

    def prepare_ahead(self) -> bool:
        """Use an idle moment to get ready for later steps; True when there may be more to do."""
        ...

    def abort(self) -> None:
        """Free the device from waiting for peers: the epoch is over. Any thread may call this."""
        ...

    @property
    def is_aborted(self) -> bool:
        """What fails from `abort` to `end` fails for want of peers."""
        ...

    def end(self) -> None:
        """Leave the group, which frees peers that wait for this rank."""
        ...


@runtime_checkable
class NormOwner(Protocol):
    """An engine with real weights: the last norm's, through which every logit goes."""

    @property
    def final_norm(self) -> "torch.Tensor": ...
