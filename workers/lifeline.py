"""Frees a main loop that waits on its device while the launcher has something to say.

Captures and the like wait for the device, and so for peers. When one of these is dead the launcher
begins another epoch, of which a main loop that waits never hears: this thread hears it instead.
"""

import select
from collections.abc import Callable
from threading import Thread
from typing import Final

from nvserve.protocol.child import Child
from nvserve.protocol.codec import BadFrame, decode_to_child
from nvserve.protocol.control import Exit, StartEpoch

GRACE_S: Final = 0.5  # for the main loop to look; it does so twice as often


def hold_lifeline(child: Child, abort: Callable[[], None]) -> Thread:
    """Until the launcher is gone, call abort() while its word that the epoch is over stays unread.

    Returns the thread that does so, which takes no message away.
    """
    thread = Thread(target=_watch, args=(child, abort), name="lifeline", daemon=True)
    thread.start()
    return thread


def _watch(child: Child, abort: Callable[[], None]) -> None:
    poller = select.poll()
    poller.register(child.control.fileno(), select.POLLIN)
    while not any(events & select.POLLHUP for _, events in poller.poll()):
        child.looked.clear()
        if not child.looked.wait(GRACE_S) and _ends_epoch(child.control.peek()):
            abort()


def _ends_epoch(frame: bytes | None) -> bool:
    if frame is None:
        return False
    try:
        return isinstance(decode_to_child(frame), StartEpoch | Exit)
    except BadFrame:
        return False
