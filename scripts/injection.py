"""Faults ordered by `nvserve fault`: given to the process they are meant for, in every life of it.

Knows children and orders; whether a launch allows faults at all is told at the start.
"""

import signal
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from nvserve.protocol.control import FaultKind, Inject
from nvserve.scripts.children import Child
from nvserve.scripts.control_socket import Reply

IMMEDIATE: Final = {FaultKind.KILL: signal.SIGKILL, FaultKind.STOP: signal.SIGSTOP}


class Injection:
    """The faults of one launch; those that a request brings about stay armed."""

    def __init__(self, *, is_allowed: bool) -> None:
        self._is_allowed: Final = is_allowed
        self._poisons: Final[dict[str, Inject]] = {}  # by process name
        self._poisoned: Final[set[int]] = set()  # pids that have theirs

    def arm(self, child: Child) -> None:
        """Arm a new life with the fault that a request brings upon its kind."""
        poison = self._poisons.get(child.name)
        if poison is not None and child.pid not in self._poisoned:
            self._poisoned.add(child.pid)
            child.send(poison)

    def forget(self, child: Child) -> None:
        """It is gone, and its pid may come again."""
        self._poisoned.discard(child.pid)

    def inject(self, children: Iterable[Child], name: str, fault: list[Any]) -> Reply:
        """Have a child misbehave: a kill or stop without a point at once, else as it is armed."""
        if not self._is_allowed:
            return {"error": "launch with --enable-faults to allow faults"}
        child = next((one for one in children if one.name == name), None)
        if child is None:
            return {"error": f"there is no process {name!r}"}
        try:
            order = msgspec.convert(fault, Inject)
        except msgspec.ValidationError as error:
            return {"error": f"no such fault: {error}"}
        if order.token >= 0:  # a poisonous request stays so, whatever life of the process runs it
            self._poisons[name] = order
            self._poisoned.add(child.pid)
        number = IMMEDIATE.get(order.kind)
        if number is not None and not order.phase:
            child.signal(number)
        elif not child.send(order):
            return {"error": f"{name} does not read its orders"}
        return {"pid": child.pid}
