"""One request inside core: its tokens, its place in the batch, and its phase table.

Knows ids and counts; never sees text. What steps in flight will have done (*planned*) is kept apart
from what committed steps have done (*returned*).
"""

import enum
from array import array
from dataclasses import dataclass, field
from typing import Final

from nvserve.core.constraint import Constraint
from nvserve.protocol.messages import FinishReason
from nvserve.protocol.sampling import SamplingParams


class Phase(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


# The whole state machine. RUNNING -> WAITING is a preemption, or the end of an epoch.
ALLOWED: Final[dict[Phase, frozenset[Phase]]] = {
    Phase.WAITING: frozenset({Phase.RUNNING, Phase.FINISHED}),
    Phase.RUNNING: frozenset({Phase.WAITING, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request from its acceptance to its final emit.

    A *stay* is the time from an admission to the next preemption; the fields after `phase` belong
    to the stay and are reset by `leave`. Invariants while RUNNING:
    num_prefilled <= num_planned <= len(blocks) * block_size, and once its prompt is planned
    len(tokens) - 1 <= num_planned <= max_total - 1.
    """

    request_id: int
    tokens: "array[int]"  # prompt and returned output
    num_prompt: int
    max_total: int  # len(tokens) at which it ends as LENGTH
    sampling: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    priority: int
    arrival: float
    deadline: float = 0.0
    salt: str = ""
    strikes: int = 0
    is_replay: bool = False
    constraint: Constraint | None = None
    order: tuple[int, float, int] = field(init=False)  # smaller goes first, larger yields first
    must_wait: bool = field(init=False)  # its next step needs its last token on the host
    needs_full_tail: bool = field(init=False)  # of the two captured sampling tails
    phase: Phase = Phase.WAITING

    num_cached: int = -1  # prompt tokens found in the prefix cache at its first admission
    num_scored: int = 0  # leading prompt positions whose logprobs were emitted
    num_bypassed: int = 0  # younger requests admitted while this one waited for blocks
    clear_at: int = 0  # len(tokens) at which a suspect is innocent
    hashes: list[bytes] = field(default_factory=list)  # of its leading full blocks
    ready_step: int = 0  # steps that must be committed before it may be admitted again

    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    is_decoding: bool = False  # in the decode list of the workers
    prefill_end: int = 0  # len(tokens) when it was admitted
    num_planned: int = 0  # planned: leading tokens whose KV is computed or in flight
    decode_until: int = 0  # planned: may decode unasked while num_planned is smaller
    num_prefilled: int = 0  # returned: leading tokens whose KV a committed chunk or hit covers
    num_findable: int = 0  # leading blocks that were offered to the prefix cache

    def __post_init__(self) -> None:
        self.order = (self.priority, self.arrival, self.request_id)
        self.needs_full_tail = self.sampling.needs_full_tail
        self.must_wait = self.constraint is not None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_committed(self) -> int:
        """Leading tokens whose KV is in the blocks for sure (returned, not planned)."""
        if self.num_prefilled < self.prefill_end:
            return self.num_prefilled
        return len(self.tokens) - 1  # the last token's KV is written by the step that follows it

    @property
    def is_waiting_for_token(self) -> bool:
        """The host must have its last token before the next step of it, and has not."""
        return self.must_wait and self.num_planned >= len(self.tokens)

    @property
    def is_planned_to_its_end(self) -> bool:
        """Its last token is planned; the commit finishes it."""
        return self.num_planned >= self.max_total - 1

    @property
    def can_decode(self) -> bool:
        """It has a token left to plan, and the host knows what that takes."""
        return not (self.is_planned_to_its_end or self.is_waiting_for_token)

    @property
    def is_finished(self) -> bool:
        return self.phase is Phase.FINISHED

    @property
    def needs_history(self) -> bool:
        """Sampling looks at the ids before it: workers get prompt and output with the slot."""
        sampling = self.sampling
        return sampling.has_penalties or sampling.min_tokens > 0

    def finish_reason(self) -> FinishReason:
        """What the tokens returned so far amount to; NONE while it goes on."""
        num_output = self.num_output
        if (
            num_output
            and num_output >= self.sampling.min_tokens
            and self.tokens[-1] in self.stop_ids
        ):
            return FinishReason.STOP
        matcher = self.constraint.matcher if self.constraint is not None else None
        if matcher is not None and matcher.is_over:
            return FinishReason.GRAMMAR if matcher.error else FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.max_total else FinishReason.NONE

    def move_to(self, phase: Phase) -> None:
        assert phase in ALLOWED[self.phase], f"{self.request_id}: {self.phase} -> {phase}"
        self.phase = phase

    def leave(self) -> None:
        """Forget the stay; the tokens remain. The caller has released slot and blocks."""
        self.slot = -1
        self.blocks = []
        self.is_decoding = False
        self.prefill_end = self.num_planned = self.decode_until = 0
        self.num_prefilled = self.num_findable = 0
