"""One child process as the launcher holds it: pid, control channel, progress page, output.

Spawns, signals and reads; decides nothing.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nvserve.protocol.channel import ControlChannel
from nvserve.protocol.codec import BadFrame, decode_from_child, encode
from nvserve.protocol.control import FromChild, FromLauncher, Role, Setup
from nvserve.protocol.progress import Snapshot, page_path, read_page
from nvserve.scripts.hangs import ChildId

Programs = Mapping[Role, tuple[str, ...]]  # arguments of the interpreter
PROGRAMS: Final[Programs] = {
    Role.FRONTEND: ("-m", "nvserve.frontend.main"),
    Role.CORE: ("-m", "nvserve.core.main"),
    Role.WORKER: ("-m", "nvserve.workers.main"),
}
API_KEY_VARIABLE: Final = "NVSERVE_API_KEY"
MAX_TAIL: Final = 50  # lines kept for a crash report
MAX_LINE_BYTES: Final = 16384  # a longer line is cut
READ_BYTES: Final = 65536
STACKS_S: Final = 0.1  # from the request for stacks to SIGKILL
FROM_OUTSIDE: Final = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
)
KERNEL_FLAGS: Final = 6  # column of /proc/PID/stat, counted from the state
PF_EXITING: Final = 0x4  # of these flags; see <linux/sched.h>
REAP_LIMIT_S: Final = 1.0  # a readable pidfd means that it is over already


@dataclass(frozen=True, slots=True)
class Death:
    """How a child ended."""

    text: str  # to be read after its name
    signal: int = 0  # 0 = it exited by itself

    def is_crash(self, *, has_oom_struck: bool) -> bool:
        """It was its own doing: not a signal that people and managers send."""
        if self.signal == signal.SIGKILL:
            return has_oom_struck
        return self.signal not in FROM_OUTSIDE


def working_folder() -> str | None:
    """For a child: ours, or "/" when ours has been deleted, since oneMKL would not load in it.

    It is not "/" always: variables such as PYTHONPATH and TRITON_CACHE_DIR may hold relative paths.
    """
    try:
        os.getcwd()
    except OSError:
        return "/"
    return None


class Child:
    """A started process. `pidfd`, `control` and `output` are there to be polled."""

    def __init__(self, child: ChildId, name: str, setup: Setup, programs: Programs) -> None:
        self.id: Final = child
        self.name = name  # changes when the spare gets a rank
        self.control, theirs = ControlChannel.pair()
        self.output, output_end = os.pipe()
        os.set_blocking(self.output, False)
        inherited = [theirs.fileno()] + ([setup.listen_fd] if setup.listen_fd >= 0 else [])
        # -P: a checkout's root must not come first on sys.path
        command = [sys.executable, "-P", "-u", *programs[child.role]]
        try:
            self._process: Final = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output_end,
                stderr=output_end,
                pass_fds=inherited,
                process_group=0,  # a terminal's Ctrl-C is for the launcher only
                env={k: v for k, v in os.environ.items() if k != API_KEY_VARIABLE},
                cwd=working_folder(),
            )
        finally:
            theirs.close()
            os.close(output_end)
        self.pid: Final = self._process.pid
        self.pidfd: Final = os.pidfd_open(self.pid)
        self.tail: Final[deque[str]] = deque(maxlen=MAX_TAIL)
        self.has_hung_up = False  # its end of the control channel is closed
        self.has_closed_output = False
        self._partial = b""
        self._page_path: Final = page_path(setup.launch_dir, child.role.value, child.life)
        self._page: Snapshot | None = None  # last read
        self.send(setup)

    def send(self, message: FromLauncher) -> bool:
        """False, with nothing sent, when it is gone or has not read for long."""
        return self.control.send(encode(message))

    def receive(self) -> FromChild | BadFrame | None:
        """The next control message; None when there is none, also when the child is gone."""
        try:
            frame = self.control.receive()
        except (EOFError, OSError):
            self.has_hung_up = True
            return None
        if frame is None:
            return None
        try:
            return decode_from_child(frame)
        except BadFrame as error:
            return error

    def read_lines(self) -> list[str]:
        """Whole new lines of its output; the last ones stay in `tail`."""
        try:
            chunk = os.read(self.output, READ_BYTES)
        except BlockingIOError:
            return []
        if not chunk:
            self.has_closed_output = True
            chunk = b"\n" if self._partial else b""  # what is left is a line too
        *whole, self._partial = (self._partial + chunk).split(b"\n")
        if len(self._partial) > MAX_LINE_BYTES:
            whole.append(self._partial)
            self._partial = b""
        lines = [line[:MAX_LINE_BYTES].decode(errors="replace").rstrip("\r") for line in whole]
        self.tail.extend(lines)
        return lines

    def page(self) -> Snapshot | None:
        """Its progress; what was read last when the page changes too fast to be read."""
        self._page = read_page(self._page_path) or self._page
        return self._page

    def is_stopped(self) -> bool:
        """State T in /proc: SIGSTOP, or a debugger."""
        return self._stat()[0] in (b"T", b"t")

    def is_exiting(self) -> bool:
        """It gives back what it held; what ended it is known only once it can be reaped."""
        state, *_, flags = self._stat()[: KERNEL_FLAGS + 1]
        return state in (b"Z", b"X") or bool(int(flags) & PF_EXITING)

    def _stat(self) -> list[bytes]:
        """The columns of /proc/PID/stat from its state on; as of a zombie when it is gone."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        except OSError:
            return [b"X"] + [b"0"] * KERNEL_FLAGS
        return stat.rpartition(b") ")[2].split()

    def kill(self, *, wants_stacks: bool = False) -> None:
        """SIGKILL; with `wants_stacks` its Python stacks go to its output first, if it can run."""
        if wants_stacks and not self.is_stopped():
            self.signal(signal.SIGUSR1)
            self.wait(STACKS_S)
        self.signal(signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """It has ended, or ended in time."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    def reap(self) -> "Death":
        """What ended it. Call once `pidfd` is readable."""
        status = self._process.wait(timeout=REAP_LIMIT_S)
        if status >= 0:
            return Death(f"exited with status {status}")
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return Death(f"was killed by {name}", -status)

    def close(self) -> None:
        """Release everything but the process itself."""
        self.control.close()
        os.close(self.output)
        os.close(self.pidfd)

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it is gone and not yet reaped
            signal.pidfd_send_signal(self.pidfd, number)
