"""Whether a launch may open the files it needs: found out before anything is started."""

import resource
from typing import Final

from nvserve.protocol.config import Config
from nvserve.protocol.descriptors import RESERVED, raise_limit

CLIENTS: Final = 32  # a server for fewer is none
# Of itself, and for each child: sockets, a pipe, and more while it starts.
LAUNCHER: Final = (48, 4)
CORE: Final = (48, 8)  # of itself, and for each worker: sockets of two epochs
CPU_WORKER: Final = (64, 8)  # of itself, and for each rank: files of torch, sockets of gloo
GPU_WORKER: Final = (256, 64)  # the driver's files, and NCCL's channels


class TooFewDescriptors(RuntimeError):
    """The limit is too low; the message is for the user."""


def check_limit(config: Config) -> None:
    """Raise the limit of open files, also for the children, or say that it is too low."""
    allowed, needed = raise_limit(), num_needed(config)
    if allowed < needed:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise TooFewDescriptors(
            f"a process may have {allowed} files open (hard limit {hard}), --tp {config.tp_size} "
            f"needs {needed}: raise the limit with `ulimit -n {needed}` or that of your container"
        )


def num_needed(config: Config) -> int:
    """Files that the hungriest process of such a launch has open, with some to spare."""
    num_children = config.tp_size + config.num_spares + 2
    worker = GPU_WORKER if config.device == "cuda" else CPU_WORKER
    return max(
        RESERVED + CLIENTS,
        LAUNCHER[0] + LAUNCHER[1] * num_children,
        CORE[0] + CORE[1] * config.tp_size,
        worker[0] + worker[1] * config.tp_size,
    )
