"""What the launcher's policy can order, and what it knows of each child."""

from dataclasses import dataclass

from nvserve.protocol.control import Role, ToChild
from nvserve.scripts.exit_codes import ExitCode
from nvserve.scripts.hangs import ChildId


@dataclass(frozen=True, slots=True)
class Start:
    """Start this process and send it Setup."""

    child: ChildId
    name: str  # for title and log lines


@dataclass(frozen=True, slots=True)
class Send:
    """Send a control message."""

    child: ChildId
    message: ToChild


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL it; its death is reported like any other. With stacks: have it dump them first."""

    child: ChildId
    wants_stacks: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """Tell the person at the terminal; an accident goes into the crash report as well."""

    text: str
    accident: ChildId | None = None  # whose last log lines belong to it


@dataclass(frozen=True, slots=True)
class End:
    """All children are gone: leave with this status."""

    code: ExitCode
    reason: str


Action = Start | Send | Kill | Note | End


@dataclass(slots=True, eq=False)
class Member:
    """One child that has been started and not yet been reaped."""

    child: ChildId
    started_s: float
    rank: int = -1  # workers: -1 = the spare
    is_ready: bool = False  # its Ready has come
    is_fenced: bool = False  # SIGKILL was ordered, ...
    fenced_s: float = 0.0  # ... at this time
    answered_epoch: int = -1  # it knows of this epoch
    joined_epoch: int = -1  # its EpochReady has come
    num_kv_blocks: int = 0  # of that EpochReady

    @property
    def is_spare(self) -> bool:
        return self.child.role is Role.WORKER and self.rank < 0

    @property
    def is_worker(self) -> bool:
        return self.child.role is Role.WORKER and self.rank >= 0

    @property
    def is_in_epoch(self) -> bool:
        """Its death ends the epoch."""
        return self.is_worker or self.child.role is Role.CORE

    @property
    def name(self) -> str:
        if self.is_spare:
            return "spare"
        return f"worker {self.rank}" if self.is_worker else self.child.role.value
