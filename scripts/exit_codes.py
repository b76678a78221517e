"""How `nvserve launch` ends: one number for each cause, so that a service manager can tell them."""

import enum

from nvserve.protocol.control import Role


class ExitCode(enum.IntEnum):
    """Exit statuses of the launcher; 128 + a signal's number means it was killed by that signal."""

    OK = 0  # drained and stopped on SIGINT or SIGTERM
    ERROR = 1  # nothing was started: the port is taken, no launch directory could be made
    USAGE = 2  # a flag or the model folder is wrong
    START_FAILED = 3  # a process failed, or died, before the server was ready for the first time
    FRONTEND_LOST = 4  # more restarts than --max-restarts allows, the last one of the frontend
    CORE_LOST = 5  # the same, the last one of core
    WORKER_LOST = 6  # the same, the last one of a worker
    RECOVERY_FAILED = 7  # every rung of the recovery ladder was tried
    UNKILLABLE = 8  # a fenced process did not die: it is stuck in the kernel, its GPU is not ours
    INTERRUPTED = 130  # stopped at once by a second SIGINT or SIGTERM


LOST: dict[Role, ExitCode] = {
    Role.FRONTEND: ExitCode.FRONTEND_LOST,
    Role.CORE: ExitCode.CORE_LOST,
    Role.WORKER: ExitCode.WORKER_LOST,
}
