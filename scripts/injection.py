"""Faults ordered by `nvserve fault`: given to the process they are meant for, in every life of it.

Knows children and orders; whether a launch allows faults at all is told at the start.
"""

import signal
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from nvserve.protocol.control import FaultKind, Inject, Role
from nvserve.protocol.faults import BEGIN, LAUNCH, MESSAGE_KINDS, SEND
from nvserve.scripts.children import Child
from nvserve.scripts.control_socket import Reply

IMMEDIATE: Final = {FaultKind.KILL: signal.SIGKILL, FaultKind.STOP: signal.SIGSTOP}
STEP_KINDS: Final = frozenset({FaultKind.NAN, FaultKind.SHAPE})  # of a step's result
ANYWHERE: Final = frozenset(FaultKind) - STEP_KINDS - MESSAGE_KINDS
AT_A_MESSAGE: Final = {SEND: ANYWHERE | MESSAGE_KINDS}
POSSIBLE: Final = {  # kinds by point
    Role.FRONTEND: AT_A_MESSAGE,
    Role.CORE: AT_A_MESSAGE,
    Role.WORKER: {LAUNCH: ANYWHERE | STEP_KINDS, BEGIN: ANYWHERE} | AT_A_MESSAGE,
}


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
        complaint = complain(child.id.role, name, order)
        if complaint is not None:
            return {"error": complaint}
        if order.token >= 0:  # a poisonous request stays so, whatever life of the process runs it
            self._poisons[name] = order
            self._poisoned.add(child.pid)
        number = IMMEDIATE.get(order.kind)
        if number is not None and not order.phase:
            child.signal(number)
        elif not child.send(order):
            return {"error": f"{name} does not read its orders"}
        return {"pid": child.pid}


def complain(role: Role, name: str, order: Inject) -> str | None:
    """Why a process of this role cannot do that, with all that it can; None when it can."""
    if order.kind in IMMEDIATE and not order.phase:
        return None
    point = SEND if order.kind in MESSAGE_KINDS else order.phase
    possible = POSSIBLE[role]
    if order.kind in possible.get(point, ()):
        return None
    listed = "; ".join(
        f"at {place} " + ", ".join(kind.value for kind in FaultKind if kind in kinds)
        for place, kinds in possible.items()
    )
    return f"{name} cannot do {order.kind.value} at {point or 'no point'}; it can do: {listed}"
