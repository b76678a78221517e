"""Faults ordered by `nvserve fault`: given to the process they are meant for, in every life of it.

Knows children and orders; whether a launch allows faults at all is told at the start.
"""

import re
import signal
from collections.abc import Iterable
from typing import Any, Final, get_args

import msgspec

from nvserve.protocol.control import FaultKind, Inject, Role
from nvserve.protocol.faults import BEGIN, LAUNCH, MESSAGE_KINDS, PROMPT_MESSAGES, SEND
from nvserve.protocol.messages import (
    FromWorker,
    ModelOutput,
    StepDone,
    ToCore,
    ToFrontend,
    ToWorker,
)
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
AT_ONCE: Final = "at once"  # a kill or stop without a point
SENT: Final[dict[Role, list[type]]] = {
    Role.FRONTEND: [*get_args(ToCore)],
    Role.CORE: list(dict.fromkeys(get_args(ToFrontend) + get_args(ToWorker))),
    Role.WORKER: [*get_args(FromWorker)],
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
            return {"error": f"no such fault: {_name_field(str(error))}"}
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
        return _complain_of_options(role, name, order, AT_ONCE)
    point = order.phase or (SEND if order.kind in MESSAGE_KINDS else "")
    possible = POSSIBLE[role]
    if order.kind in possible.get(point, ()):
        return _complain_of_options(role, name, order, point)
    listed = "; ".join(
        f"at {place} " + ", ".join(kind.value for kind in FaultKind if kind in kinds)
        for place, kinds in possible.items()
    )
    return f"{name} cannot do {order.kind.value} at {point or 'no point'}; it can do: {listed}"


def _name_field(complaint: str) -> str:
    """msgspec's words, with the option in place of the column that it speaks of."""
    columns = ("fault", *Inject.__struct_fields__)
    return re.sub(
        r" - at `\$\[(\d+)\]`$", lambda found: f" as --{columns[int(found[1])]}", complaint
    )


def _complain_of_options(role: Role, name: str, order: Inject, point: str) -> str | None:
    """Why the fault could never strike, or would strike as if an option had not been given."""
    sent = _sent_by(role, name)
    if order.message and point != SEND:
        place = point if point == AT_ONCE else f"at {point}"
        return f"--message says nothing {place}: it is for faults at {SEND}"
    if order.message and order.message not in sent:
        return f"--message {order.message}: {name} never sends it; it sends: {', '.join(sent)}"
    if order.token >= 0 and not _sees_tokens(sent, order, point):
        return f"--token says nothing {_place(order, point)}: it is for {_token_places()}"
    if order.step >= 0 and point != LAUNCH:
        return f"--step says nothing {_place(order, point)}: it is for a worker's faults at launch"
    return None


def _sent_by(role: Role, name: str) -> list[str]:
    """The names of the messages that this process sends."""
    sent = [message.__name__ for message in SENT[role]]
    if role is Role.WORKER and not name.startswith("spare"):  # which may get any rank
        sent.remove((StepDone if name == "worker 0" else ModelOutput).__name__)
    return sent


def _sees_tokens(sent: list[str], order: Inject, point: str) -> bool:
    """Prompts pass here: in a worker's steps, and in some messages."""
    if point != SEND:
        return point == LAUNCH
    return any(name in sent and order.message in ("", name) for name in PROMPT_MESSAGES)


def _place(order: Inject, point: str) -> str:
    of = f" of {order.message}" if order.message else ""
    return point if point == AT_ONCE else f"at {point}{of}"


def _token_places() -> str:
    places = [f"{role.value} at {LAUNCH}" for role, points in POSSIBLE.items() if LAUNCH in points]
    places += [
        f"{role.value} at {SEND} of {message.__name__}"
        for role, messages in SENT.items()
        for message in messages
        if message.__name__ in PROMPT_MESSAGES
    ]
    return ", ".join(places)
