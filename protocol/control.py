"""Messages on the control channel: one SEQPACKET socketpair between the launcher and each child.

| direction           | messages                                                        |
|---------------------|-----------------------------------------------------------------|
| launcher -> child   | Setup first; StartEpoch, Peers, Condition, Hold, Drain, Exit; Inject |
| child -> launcher   | Progress, Ready, EpochReady, EpochBroken, Searching, Held, Drained, Failed |

Who gets what: StartEpoch goes to workers (join the group of that epoch under that rank, then answer
EpochReady) and, once every rank is ready, to core (connect to the workers of that epoch and serve;
core then answers EpochReady too). Peers goes to frontend and core, and names the sockets between
them. Condition and Drain go to the frontend, Hold to core. Inject goes to the process that shall
misbehave, in a launch that allows it.
"""

import enum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from nvserve.protocol.config import Config
from nvserve.protocol.messages import Message

MAX_INT: Final = 2**63 - 1  # what an order may name; any larger one might not fit a message
MAX_FAULT_S: Final = 86400.0
MAX_REASON_BYTES: Final = 2000  # of an error's text: any socket buffer has room for it


class Role(enum.StrEnum):
    """The kinds of process the launcher starts."""

    FRONTEND = "frontend"
    CORE = "core"
    WORKER = "worker"


class Setup(Message, frozen=True):
    """First message to every child: what it is and where it lives."""

    config: Config
    role: Role
    life: int  # 0, 1, ... by role (for workers: a number unique among all workers of the launch)
    launch_dir: str  # private 0700 directory of the launch
    api_key: str = ""  # never part of Config, which is printed
    listen_fd: int = -1  # frontend only: the listening HTTP socket it inherits
    name: str = ""  # for title and logs; empty = the role


class StartEpoch(Message, frozen=True):
    """Begin a worker-group epoch; ends the one before it.

    For a worker `rank` is its place in the group (a spare has none until now). `num_kv_blocks` is 0
    when the worker shall measure, else the pool size (scratch block included) to use.
    """

    epoch: int
    tp_size: int
    rank: int = -1
    num_kv_blocks: int = 0
    is_blamed: bool = False  # core: requests in flight may have killed a worker of the last epoch


class Peers(Message, frozen=True):
    """The lives of frontend and core that shall talk to each other now."""

    frontend_life: int
    core_life: int
    is_blamed: bool = False  # frontend: requests that core's last life held may have killed it


class State(enum.StrEnum):
    """What /health and /ready report."""

    LOADING = "loading"
    READY = "ready"
    RECOVERING = "recovering"
    DRAINING = "draining"
    FAILED = "failed"


class Condition(Message, frozen=True):
    """The state of the whole server as the launcher sees it."""

    state: State
    reason: str = ""
    worker_restarts_total: int = 0
    core_restarts_total: int = 0
    frontend_restarts_total: int = 0
    recovery_seconds: dict[str, float] = msgspec.field(default_factory=dict)  # last one, by phase


class Hold(Message, frozen=True):
    """Core: plan no further step, finish those in flight, then answer Held. A new epoch ends it."""


class Drain(Message, frozen=True):
    """Refuse new requests, let running ones finish for at most this long, then answer Drained.

    A later one replaces it. For a restart, requests over ZMQ are taken and go on all the while,
    since their clients submit them again to the next frontend.
    """

    timeout_s: float
    is_restart: bool = False  # another frontend takes over: the server itself goes on


class Exit(Message, frozen=True):
    """Leave now, cleanly."""


class Progress(Message, frozen=True):
    """A child is doing something worth showing: phase name and the done part of it, 0 to 1."""

    phase: str
    done: float = 0.0


class Ready(Message, frozen=True):
    """Frontend: serving on this port. Core: imported and waiting for Peers. Worker: imported."""

    port: int = 0
    zmq_endpoint: str = ""


class EpochReady(Message, frozen=True):
    """The sender has joined this epoch; a worker says how many KV blocks fit (scratch included)."""

    epoch: int
    num_kv_blocks: int = 0
    phases: dict[str, float] = msgspec.field(default_factory=dict)  # seconds by phase
    attention_backend: str = ""


class EpochBroken(Message, frozen=True):
    """Core or a worker saw the epoch fail: gap, differing checksums, a failed step, a lost peer."""

    epoch: int
    rank: int  # the rank at fault, -1 when unknown
    step: int
    reason: str
    suspects: list[int] = msgspec.field(default_factory=list)  # request ids of the steps in flight


class Searching(Message, frozen=True):
    """How many requests the sender suspects of a crash; sent when that begins or ends.

    Deaths during such a search are part of it.
    """

    num_suspects: int


class Held(Message, frozen=True):
    """Core has no step in flight and plans none."""


class Drained(Message, frozen=True):
    """Every stream of the frontend has ended."""


class Failed(Message, frozen=True):
    """The child cannot start, and says why in one line a user understands; it then exits."""

    message: str


def shorten(reason: str) -> str:
    """The beginning of an error's text, and nothing in it that is no UTF-8: it can always be sent.

    Libraries put whole traces into their errors, and file names may hold any bytes.
    """
    return reason.encode(errors="replace")[:MAX_REASON_BYTES].decode(errors="ignore")


class FaultKind(enum.StrEnum):
    """What a process can be told to do wrong; see faults.py."""

    KILL = "kill"  # SIGKILL to itself, as from outside
    CRASH = "crash"  # abort(), as a bug would
    STOP = "stop"  # SIGSTOP to itself
    SLOW = "slow"  # sleep, without a beat
    EXCEPTION = "exception"
    OOM = "oom"
    NAN = "nan"  # not-a-number among the logits
    SHAPE = "shape"  # one id too few in the result
    DROP = "drop"  # the rest are done to messages sent
    DELAY = "delay"
    DUPLICATE = "duplicate"
    CORRUPT = "corrupt"


class Inject(Message, frozen=True):
    """Misbehave at a point to come; ignored, with an error logged, without --enable-faults."""

    kind: FaultKind
    # a worker's step of this number or a later one; -1 = the next
    step: Annotated[int, Meta(ge=-1, le=MAX_INT)] = -1
    phase: str = ""  # launch (a step), begin (an epoch) or send; not needed by message faults
    message: str = ""  # message faults: the name of the message, empty = any
    seconds: Annotated[float, Meta(ge=0.0, le=MAX_FAULT_S)] = 0.0  # slow, delay
    count: Annotated[int, Meta(ge=1, le=MAX_INT)] = 1  # how often
    seed: Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)] = 0  # which bytes are corrupted
    # only where this token id is in the prompt: makes a request poisonous
    token: Annotated[int, Meta(ge=-1, le=MAX_INT)] = -1


ToChild = Setup | StartEpoch | Peers | Condition | Hold | Drain | Exit
FromLauncher = ToChild | Inject
FromChild = Progress | Ready | EpochReady | EpochBroken | Searching | Held | Drained | Failed
