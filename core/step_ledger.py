"""The steps in flight of one epoch: who runs in them, who has reported, which are complete.

Believes nothing: a fault, or an answer that no correct worker gives, raises EpochFault.
"""

import zlib
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

from nvserve.core.errors import EpochFault
from nvserve.core.request import Request
from nvserve.protocol.messages import Gap, ModelOutput, StepDone, StepFailed, unpack_ids

MAX_IN_FLIGHT: Final = 2

Report = ModelOutput | StepDone | StepFailed | Gap  # of a rank, about one step


@dataclass(slots=True, eq=False)
class Step:
    """One step in flight; `rows` resolve its ModelOutput, whatever became of them since."""

    number: int
    rows: list[Request]  # the decode list in order, then the chunks that sample
    chunks: list[tuple[Request, int, int]]  # request, start, end
    checksums: dict[int, int] = field(default_factory=dict)  # by rank that has reported
    output: ModelOutput | None = None
    token_ids: list[int] | None = None  # by row, checked


class StepLedger:
    """Numbers the steps of an epoch and matches the reports of its ranks to them."""

    def __init__(self, *, epoch: int, tp_size: int, vocab_size: int) -> None:
        self.epoch: Final = epoch
        self._vocab_size: Final = vocab_size
        self._expected: Final = [0] * tp_size  # the step each rank reports next
        self._steps: Final[deque[Step]] = deque()
        self.num_opened = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._steps)

    @property
    def num_committed(self) -> int:
        return self.num_opened - len(self._steps)

    def open(self, rows: list[Request], chunks: list[tuple[Request, int, int]]) -> Step:
        assert len(self._steps) < MAX_IN_FLIGHT, "too many steps in flight"
        step = Step(self.num_opened, rows, chunks)
        self.num_opened += 1
        self._steps.append(step)
        return step

    def find(self, number: int) -> Step | None:
        """The step in flight of this number."""
        index = number - self.num_committed
        return self._steps[index] if 0 <= index < len(self._steps) else None

    def involved(self) -> list[Request]:
        """Everybody in a step in flight, also who has ended meanwhile.

        A fault is not asked for its step: what one leaves behind on a device may be seen only at
        the next, and who left since may have been its cause.
        """
        requests: dict[Request, None] = {}
        for step in self._steps:
            requests |= dict.fromkeys(step.rows)
            requests |= dict.fromkeys(request for request, _, _ in step.chunks)
        return list(requests)

    def report(self, message: Report) -> bool:
        """Note a rank's answer; False for a repeated one. EpochFault when it is wrong."""
        match message:
            case StepFailed(is_peer_lost=True):  # the launcher knows who died, and of what
                raise EpochFault(-1, message.step, message.message, is_blamed=False)
            case StepFailed():
                raise EpochFault(message.rank, message.step, message.message)
            case Gap():
                reason = f"rank {message.rank} got {message.step}, expected {message.expected}"
                raise EpochFault(message.rank, message.step, reason, is_blamed=False)
        rank = message.rank if isinstance(message, StepDone) else 0
        if not 0 <= rank < len(self._expected) or (rank == 0) != isinstance(message, ModelOutput):
            raise EpochFault(rank, message.step, f"no such rank answers so: {rank}")
        expected = self._expected[rank]
        if message.step < expected:
            return False
        step = self.find(message.step)
        if message.step > expected or step is None:
            raise EpochFault(
                rank,
                message.step,
                f"rank {rank} reports step {message.step} where {expected} is due"
                f" and {self.num_opened} were sent",
                is_blamed=False,  # a report was lost
            )
        self._expected[rank] += 1
        if isinstance(message, ModelOutput):
            self._take_output(step, message)
        step.checksums[rank] = message.checksum
        if len(step.checksums) == len(self._expected):
            _compare(step)
        return True

    def pop_complete(self) -> Step | None:
        """The oldest step, once all ranks have reported it."""
        if not self._steps or len(self._steps[0].checksums) < len(self._expected):
            return None
        return self._steps.popleft()

    def _take_output(self, step: Step, output: ModelOutput) -> None:
        token_ids = unpack_ids(output.tokens)
        if output.counts is not None and any(count != 1 for count in _counts(step, output.counts)):
            raise EpochFault(0, step.number, "a row has more or less than one token")
        if len(token_ids) != len(step.rows):
            raise EpochFault(0, step.number, f"{len(token_ids)} ids for {len(step.rows)} rows")
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            raise EpochFault(
                0, step.number, f"ids {min(token_ids)}..{max(token_ids)} of {self._vocab_size}"
            )
        if zlib.crc32(output.tokens) != output.checksum:
            raise EpochFault(0, step.number, "the ids do not match their checksum")
        if output.logprobs is not None and not _are_rows(output.logprobs.rows, len(step.rows)):
            raise EpochFault(0, step.number, "logprobs of rows that are not in the step")
        scores = output.prompt_logprobs
        if scores is not None and len(scores) != len(step.chunks):
            raise EpochFault(
                0, step.number, f"prompt logprobs of {len(scores)} chunks, not {len(step.chunks)}"
            )
        step.output = output
        step.token_ids = token_ids


def _compare(step: Step) -> None:
    """EpochFault for a rank that sampled other ids than most; of two, the later one."""
    if len(set(step.checksums.values())) == 1:
        return
    [(usual, _)] = Counter(step.checksums.values()).most_common(1)
    rank, checksum = next((r, c) for r, c in step.checksums.items() if c != usual)
    raise EpochFault(
        rank,
        step.number,
        f"rank {rank} sampled other ids in step {step.number}:"
        f" checksum {checksum:#x}, others {usual:#x}",
    )


def _are_rows(rows: list[int], num_rows: int) -> bool:
    return len(set(rows)) == len(rows) and all(0 <= row < num_rows for row in rows)


def _counts(step: Step, counts: bytes) -> list[int]:
    if len(counts) != 4 * len(step.rows):
        raise EpochFault(0, step.number, f"{len(counts)} bytes of counts for {len(step.rows)} rows")
    return unpack_ids(counts)
