"""The first thing every child process does: arm its death, learn who it is, show that it lives.

`bootstrap` is called once, at the top of a child's main(). It needs nothing heavy, so a child whose
launcher is gone never gets as far as importing its engine. Knows the launcher only through the
control channel; never decides anything.
"""

import ctypes
import faulthandler
import gc
import logging
import os
import select
import signal
import sys
import threading
from typing import Final, NoReturn

import msgspec
import setproctitle

from nvserve.protocol.channel import ControlChannel
from nvserve.protocol.codec import BadFrame, decode_to_child, encode
from nvserve.protocol.control import Inject, Setup, StartEpoch, ToChild
from nvserve.protocol.faults import Faults, install
from nvserve.protocol.progress import ProgressPage, page_path

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG: Final = 1
SETUP_LIMIT_S: Final = 30.0  # the launcher sends Setup right after the start
LAUNCHER_GONE: Final = 1  # exit status


class Child:
    """A child's side of its launcher: what it is, the control channel and the progress page."""

    def __init__(self, setup: Setup, control: ControlChannel, page: ProgressPage) -> None:
        self.setup: Final = setup
        self.control: Final = control
        self.page: Final = page
        self.looked = threading.Event()  # set whenever `receive` is called
        self.faults: Final[Faults | None] = install() if setup.config.enable_faults else None

    def send(self, message: msgspec.Struct) -> bool:
        """Tell the launcher; False, with nothing sent, when it does not read or is gone."""
        return self.control.send(encode(message))

    def receive(self, timeout_s: float = 0.0) -> ToChild | None:
        """The launcher's next message, or None when none came in time; 0 does not wait.

        Ends the process at once when the launcher is gone. A StartEpoch that gives a rank also
        renames the process. A malformed message is logged and skipped.
        """
        self.looked.set()
        if timeout_s > 0.0 and not is_readable(self.control.fileno(), timeout_s):
            return None
        try:
            frame = self.control.receive()
        except (EOFError, OSError):
            leave_with_launcher()
        if frame is None:
            return None
        try:
            message = decode_to_child(frame)
        except BadFrame as error:
            logger.error("skipped a malformed control message: %s", error)
            return None
        if isinstance(message, Inject):
            self._arm(message)
            return None
        if isinstance(message, StartEpoch) and message.rank >= 0:
            set_title(f"worker {message.rank}")
        return message

    def _arm(self, fault: Inject) -> None:
        if self.faults is None:
            logger.error("refused %s: launched without --enable-faults", fault)
        else:
            self.faults.arm(fault)


def bootstrap(argv: list[str]) -> Child:
    """Become a child: `argv` is [program, control fd, launcher's pid].

    Does not return when the launcher is already gone or does not send Setup in time. There are no
    garbage collections until `freeze_start`: of what a start creates nearly all stays.
    """
    gc.disable()
    fd, launcher_pid = int(argv[1]), int(argv[2])
    die_with_parent(launcher_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the launcher asks a hung child
    os.set_inheritable(fd, False)
    control = ControlChannel.from_fd(fd)
    setup = _receive_setup(control)
    set_title(setup.name or setup.role.value)
    configure_logging(setup.config.log_level)
    page = ProgressPage(page_path(setup.launch_dir, setup.role.value, setup.life))
    return Child(setup, control, page)


def freeze_start() -> None:
    """Called once what a process keeps for its whole life is there: garbage collections begin.

    None ever looks at what is there by now. With torch alone it would take some 100 ms, and that is
    a pause of every stream.
    """
    gc.freeze()
    gc.enable()
    logger.debug("the %d objects of the start are in no collection", gc.get_freeze_count())


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent thread ends; leave now if it has.

    SIGKILL, because a handler cannot run while C code holds the interpreter. fork clears it: each
    process arms itself.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it ended before the line above
        leave_with_launcher()


def leave_with_launcher() -> NoReturn:
    """End this process now, without clean-up: its launcher is gone."""
    os._exit(LAUNCHER_GONE)


def set_title(name: str) -> None:
    """The process title people find and kill it by: `nvserve: <name>`."""
    setproctitle.setproctitle(f"nvserve: {name}")


def configure_logging(level: str) -> None:
    """Lines to stderr; the launcher puts time and process name before each."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(levelname)s %(message)s",
        force=True,
    )


def _receive_setup(control: ControlChannel) -> Setup:
    if not is_readable(control.fileno(), SETUP_LIMIT_S):
        sys.exit(f"nvserve: no Setup from the launcher within {SETUP_LIMIT_S:g} s")
    try:
        frame = control.receive()
    except (EOFError, OSError):
        leave_with_launcher()
    assert frame is not None, "poll said that the control channel is readable"
    message = decode_to_child(frame)
    assert isinstance(message, Setup), f"the first control message is {type(message).__name__}"
    return message


def is_readable(descriptor: int, timeout_s: float) -> bool:
    """Wait until it is, or its other end is closed; False when that takes too long."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))
