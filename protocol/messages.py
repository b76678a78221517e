"""Every message between the processes of one launch, and the direction each travels.

| direction        | messages                                      | PULL bound by (channel.py) |
|------------------|-----------------------------------------------|----------------------------|
| frontend -> core | Hello, Submit, Abort, Finish                  | core                       |
| core -> frontend | Hello, Accepted, Refused, Emits, CoreStats,   | frontend                   |
|                  | Strikes                                       |                            |
| core -> worker   | Hello, SchedulerOutput                        | the worker                 |
| worker -> core   | Hello, ModelOutput, StepDone, StepFailed, Gap | core                       |

The launcher's control messages are in control.py, the client's door in client_messages.py.

Units and conventions: token, block and slot ids are non-negative; columns of ids are packed as
little-endian int32 `bytes` (`pack_ids`, `unpack_ids`); logprobs as float32 `bytes`; times are
UNIX seconds; durations carry `_s` or `_ms`. A *life* numbers the starts of one process role, an
*epoch* the lives of the worker group, a *step* the forward passes of one epoch from 0.

Messages are immutable and positional on the wire: append fields with defaults, never reorder.
Knows shapes of messages only; never touches a socket.
"""

import enum
import sys
from array import array
from collections.abc import Iterable

import msgspec

from nvserve.protocol.sampling import SamplingParams

assert sys.byteorder == "little", "id columns travel in native order, which must be little-endian"


def pack_ids(ids: Iterable[int]) -> bytes:
    """Ids as little-endian int32 bytes; OverflowError when one does not fit."""
    return array("i", ids).tobytes()


def unpack_ids(column: bytes) -> list[int]:
    """The inverse of `pack_ids`; ValueError unless the length is a multiple of 4."""
    ids = array("i")
    ids.frombytes(column)
    return ids.tolist()


class FinishReason(enum.IntEnum):
    """Why a request's final emit was sent; NONE marks an emit that is not final."""

    NONE = 0
    STOP = 1  # end-of-sequence or stop token, or a stop string seen by the frontend
    LENGTH = 2  # max_tokens or the model's context is used up
    ABORT = 3  # the client left or asked for it
    DEADLINE = 4  # the request's own deadline passed
    ENGINE_FAULT = 5  # this request alone crashes a step
    GRAMMAR = 6  # its output cannot go on within its grammar, or only beyond the grammar's limits


class RefusalKind(enum.IntEnum):
    """What the frontend answers: INVALID 400, BUSY 429, DRAINING 503."""

    INVALID = 0
    BUSY = 1
    DRAINING = 2


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all messages: immutable, positional on the wire, tagged with the class name."""


def _require_ids(name: str, column: bytes, count: int | None = None) -> None:
    """ValueError (a ValidationError while decoding) when an int32 column has the wrong length."""
    if len(column) % 4:
        raise ValueError(f"{name}: {len(column)} bytes are not whole int32 values")
    if count is not None and len(column) != 4 * count:
        raise ValueError(f"{name}: {len(column) // 4} ids where {count} were announced")


def _require_lengths(expected: int, **columns: int) -> None:
    for name, length in columns.items():
        if length != expected:
            raise ValueError(f"{name}: {length} entries where {expected} were announced")


def _require_counts(name: str, counts: list[int]) -> int:
    """Their sum; ValueError when one is negative, which a sum that fits would hide."""
    if counts and min(counts) < 0:
        raise ValueError(f"{name}: {min(counts)} where a count was announced")
    return sum(counts)


class Hello(Message, frozen=True):
    """First on every socket: the sender's life (for a worker: its epoch) and, for a worker, rank.

    A peer counts as connected once its Hello has arrived.
    """

    life: int
    rank: int = -1


# -- frontend -> core ----------------------------------------------------------------------------


class Submit(Message, frozen=True):
    """One request, or its replay after a death of core; its client already has `emitted`."""

    frontend_life: int
    core_life: int
    request_id: int  # make_request_id(frontend life, counter)
    prompt: bytes  # int32
    emitted: bytes  # int32, kept apart from the prompt so that a replay is an ordinary request
    sampling: SamplingParams
    seed: int  # drawn by the frontend when the client gave none; 0 <= seed < 2**63
    arrival: float  # UNIX seconds; kept by a replay
    deadline: float = 0.0  # UNIX seconds, 0 = none
    priority: int = 0  # lower runs first
    strikes: int = 0  # crashes while this request was in flight, as core told in Strikes
    is_replay: bool = False  # a replay is never refused for load
    salt: str = ""  # extra key of the prefix cache

    def __post_init__(self) -> None:
        _require_ids("prompt", self.prompt)
        _require_ids("emitted", self.emitted)


class Abort(Message, frozen=True):
    """The clients of these requests left: free them; unknown ids are ignored and counted."""

    frontend_life: int
    core_life: int
    request_ids: list[int]


class Finish(Message, frozen=True):
    """A stop string was seen in the text of these requests: end them as STOP."""

    frontend_life: int
    core_life: int
    request_ids: list[int]


# -- core -> frontend ----------------------------------------------------------------------------


class Accepted(Message, frozen=True):
    """These submits were taken and will each get exactly one final emit."""

    core_life: int
    frontend_life: int
    request_ids: list[int]


class Refused(Message, frozen=True):
    """A submit that was not taken; nothing else follows for it."""

    core_life: int
    frontend_life: int
    request_id: int
    kind: RefusalKind
    message: str
    param: str = ""  # the request field at fault
    retry_after_s: float = 0.0


class Logprobs(Message, frozen=True):
    """Log-probabilities of some rows of a step: the chosen id's and the `num_tops` best per row."""

    rows: list[int]  # indices into the carrying message's rows (one token each)
    chosen: bytes  # float32 [len(rows)]
    num_tops: list[int]  # [len(rows)]
    top_ids: bytes  # int32 [sum(num_tops)], best first
    top_values: bytes  # float32 [sum(num_tops)]

    def __post_init__(self) -> None:
        _require_lengths(len(self.rows), num_tops=len(self.num_tops))
        _require_ids("chosen", self.chosen, len(self.rows))
        num_tops = _require_counts("num_tops", self.num_tops)
        _require_ids("top_ids", self.top_ids, num_tops)
        _require_ids("top_values", self.top_values, num_tops)


class Emits(Message, frozen=True):
    """New tokens of one step, in columns; the first index makes delivery exactly-once."""

    core_life: int
    frontend_life: int
    request_ids: list[int]
    firsts: list[int]  # index of the first new token in each request's output
    counts: list[int]
    tokens: bytes  # int32, concatenated
    finishes: list[FinishReason]
    cached: list[int]  # prompt tokens found in the prefix cache, by request
    logprobs: list[Logprobs | None] | None = None  # by request, rows index its new tokens
    prompt_logprobs: list[Logprobs | None] | None = None  # by request, rows are prompt positions

    def __post_init__(self) -> None:
        n = len(self.request_ids)
        _require_lengths(
            n,
            firsts=len(self.firsts),
            counts=len(self.counts),
            finishes=len(self.finishes),
            cached=len(self.cached),
            logprobs=n if self.logprobs is None else len(self.logprobs),
            prompt_logprobs=n if self.prompt_logprobs is None else len(self.prompt_logprobs),
        )
        _require_ids("tokens", self.tokens, _require_counts("counts", self.counts))


class Strikes(Message, frozen=True):
    """How many crashes found these requests in flight, 0 = cleared; follows what they emitted.

    The frontend sends it back with a replay, so that a search outlives the core that began it.
    """

    core_life: int
    frontend_life: int
    request_ids: list[int]
    counts: list[int]

    def __post_init__(self) -> None:
        _require_lengths(len(self.request_ids), counts=len(self.counts))
        _require_counts("counts", self.counts)


class CoreStats(Message, frozen=True):
    """Counters and gauges of core, sent at least once a second; totals count since core's start."""

    core_life: int
    frontend_life: int
    epoch: int
    step: int
    time: float  # UNIX seconds of the snapshot
    last_step_time: float  # UNIX seconds of the last committed step, 0 before the first
    num_running: int
    num_waiting: int
    num_blocks: int  # usable, without the scratch block
    num_free_blocks: int  # owned by no request (cached ones count as free)
    accepted_total: int
    finished_totals: list[int]  # by FinishReason value
    refused_total: int
    preempted_total: int
    prompt_tokens_total: int
    generated_tokens_total: int
    prefix_queries_total: int  # tokens looked up in the prefix cache
    prefix_hits_total: int  # tokens found there
    dropped_total: int  # malformed, stale or unknown messages
    recovered_total: int  # requests replayed after an epoch or a core ended
    request_ids: list[int] | None = None  # accepted, not finished; None = submits are unread
    # Submits here without an answer yet: for want of a compiled grammar or of a first epoch.
    unanswered_ids: list[int] | None = None


# -- core -> workers -----------------------------------------------------------------------------


class NewRows(Message, frozen=True):
    """Requests that take slots in this step, in columns."""

    slots: list[int]
    sampling: list[SamplingParams]
    seeds: list[int]
    prompts: list[bytes]  # int32 prompt ids where penalties need them, else empty
    outputs: list[bytes]  # int32 emitted ids likewise

    def __post_init__(self) -> None:
        _require_lengths(
            len(self.slots),
            sampling=len(self.sampling),
            seeds=len(self.seeds),
            prompts=len(self.prompts),
            outputs=len(self.outputs),
        )


class TableChanges(Message, frozen=True):
    """Entries to write: in the table of `slots[i]`, from `starts[i]` on, `counts[i]` block ids."""

    slots: list[int]
    starts: list[int]
    counts: list[int]
    blocks: bytes  # int32, concatenated

    def __post_init__(self) -> None:
        _require_lengths(len(self.slots), starts=len(self.starts), counts=len(self.counts))
        _require_ids("blocks", self.blocks, _require_counts("counts", self.counts))


class Chunks(Message, frozen=True):
    """Prefill chunks of this step, in columns.

    A chunk with `samples` ends at the request's last known token and yields one new token.
    """

    slots: list[int]
    starts: list[int]  # position of the chunk's first token
    counts: list[int]
    tokens: bytes  # int32, concatenated
    samples: list[bool]

    def __post_init__(self) -> None:
        _require_lengths(
            len(self.slots),
            starts=len(self.starts),
            counts=len(self.counts),
            samples=len(self.samples),
        )
        _require_ids("tokens", self.tokens, _require_counts("counts", self.counts))


class Masks(Message, frozen=True):
    """Allowed-token bit masks of this step's grammar rows, 32 tokens an int32, least bit first."""

    slots: list[int]
    masks: bytes  # int32 [len(slots), ceil(vocab / 32)]


class SchedulerOutput(Message, frozen=True):
    """One step as a delta against the step before; a steady decode step carries only None.

    A worker keeps the ordered list of decoding slots, one row each. It applies, in this order:
    1. `freed`: forget these slots (they leave the decode list too);
    2. `leaves`: take slots out of the decode list, the order of the others kept;
    3. `new` rows;  4. `tables`;  5. `joins`: append slots to the decode list.
    Then it runs every decoding slot by one token (its last sampled one, which is on the device, at
    the position behind its last) and every chunk. The rows of the answer are the decode list in
    order, then the chunks that sample in order.
    """

    epoch: int
    step: int
    is_full_tail: bool = False  # some row needs truncation, penalties, bias, masks or logprobs
    freed: list[int] | None = None
    leaves: list[int] | None = None
    new: NewRows | None = None
    tables: TableChanges | None = None
    joins: list[int] | None = None
    chunks: Chunks | None = None
    masks: Masks | None = None


# -- workers -> core -----------------------------------------------------------------------------


class ModelOutput(Message, frozen=True):
    """Rank 0's answer to one step: the sampled ids by row, in the order SchedulerOutput defines."""

    epoch: int
    step: int
    tokens: bytes  # int32, concatenated over rows
    counts: bytes | None = None  # int32 by row; None = one token a row
    checksum: int = 0  # crc32 of `tokens`
    logprobs: Logprobs | None = None
    prompt_logprobs: list[Logprobs | None] | None = None  # by chunk
    forward_ms: float = 0.0
    launch_ms: float = 0.0  # of the host; 0 where the host computes the step itself

    def __post_init__(self) -> None:
        _require_ids("tokens", self.tokens)


class StepDone(Message, frozen=True):
    """Another rank's answer to one step: it ran, and sampled ids with this checksum."""

    epoch: int
    step: int
    rank: int
    checksum: int


class StepFailed(Message, frozen=True):
    """A rank could not finish a step (exception, NaN, out of memory); the epoch is over."""

    epoch: int
    step: int
    rank: int
    message: str
    is_peer_lost: bool = False  # another rank is gone: the requests of this step are not the cause


class Gap(Message, frozen=True):
    """A rank received a step that does not follow its last one; it changed nothing."""

    epoch: int
    step: int  # received
    expected: int
    rank: int


ToCore = Hello | Submit | Abort | Finish
ToFrontend = Hello | Accepted | Refused | Emits | CoreStats | Strikes
ToWorker = Hello | SchedulerOutput
FromWorker = Hello | ModelOutput | StepDone | StepFailed | Gap


def make_request_id(frontend_life: int, counter: int) -> int:
    """A request id no other life of the frontend can produce; `counter` < 2**40."""
    return frontend_life << 40 | counter
