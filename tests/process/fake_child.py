"""A child of any role that speaks the control protocol and does nothing else.

`FAKE_<ROLE>` in the environment changes one role's behaviour, in its first life (workers: in lives
below tp_size) unless `FAKE_ALWAYS` is set:
`fail` says why it cannot
start, `die` exits in its first epoch, `silent` never joins one, `mute` does not answer later ones,
`busy` (frontend) does not drain. A worker reports a broken epoch once when a file named by
`FAKE_BREAK` appears.
"""

import contextlib
import logging
import os
import sys

from nvserve.protocol.child import Child, bootstrap
from nvserve.protocol.control import (
    Condition,
    Drain,
    Drained,
    EpochBroken,
    EpochReady,
    Exit,
    Failed,
    Peers,
    Progress,
    Ready,
    Role,
    StartEpoch,
)
from nvserve.protocol.progress import Phase

logger = logging.getLogger("fake")
BLOCKS = 100


def behaviour(child: Child) -> str:
    setup = child.setup
    num_first = setup.config.tp_size if setup.role is Role.WORKER else 1
    if setup.life >= num_first and not os.environ.get("FAKE_ALWAYS"):
        return ""
    return os.environ.get(f"FAKE_{setup.role.value.upper()}", "")


def start_epoch(child: Child, message: StartEpoch) -> None:
    how = behaviour(child)
    if how == "mute" and message.epoch > 0:
        return
    child.page.epoch = message.epoch
    child.page.beat(Phase.REBUILDING)
    match how:
        case "die":
            logger.error("these are my last words")
            os._exit(3)
        case "silent":
            return
        case _:
            pass
    child.send(Progress("weights", 0.5))
    child.page.beat(Phase.WAITING)
    child.send(EpochReady(message.epoch, message.num_kv_blocks or BLOCKS + max(0, message.rank)))


def is_told_to_break(child: Child) -> bool:
    path = os.environ.get("FAKE_BREAK")
    if path is None or child.setup.role is not Role.WORKER:
        return False
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
        return True
    return False


def main() -> None:
    child = bootstrap(sys.argv)
    logger.info("role %s life %d", child.setup.role, child.setup.life)
    if behaviour(child) == "fail":
        child.send(Failed("the model is upside down"))
        sys.exit(1)
    child.send(Ready())
    while True:
        message = child.receive(timeout_s=0.1)
        child.page.beat(Phase.WAITING)
        if is_told_to_break(child):
            child.send(EpochBroken(child.page.epoch, -1, 7, "a gap"))
        if message is None:
            continue
        if isinstance(message, Condition | Peers):
            logger.info("%s", message)
        match message:
            case StartEpoch():
                start_epoch(child, message)
            case Drain() if behaviour(child) != "busy":
                child.send(Drained())
            case Exit():
                return
            case _:
                pass


if __name__ == "__main__":
    main()
