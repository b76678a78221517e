"""`nvserve fault`: make a process of a running server misbehave, to see that nothing is lost.

Speaks only through the launch directory, and only to a server launched with --enable-faults. What
is drawn at random is drawn from the seed, and the whole command is printed, so it can be replayed.
"""

import random
import shlex
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from nvserve.protocol.control import MAX_FAULT_S, FaultKind, Inject
from nvserve.protocol.faults import BEGIN, LAUNCH, MESSAGE_KINDS, SEND
from nvserve.scripts.finite_float import FiniteFloat
from nvserve.scripts.running import find_server, order, process_name

MAX_STEPS_AHEAD: Final = 20  # of a step drawn at random
IMMEDIATE: Final = frozenset({FaultKind.KILL, FaultKind.STOP})


@click.command()
@click.argument("kind", type=click.Choice([kind.value for kind in FaultKind]))
@click.argument("process", nargs=-1, required=True)
@click.option("--step", type=int, default=None, help="Of a worker's epoch.  [default: drawn]")
@click.option(
    "--phase",
    type=click.Choice([LAUNCH, BEGIN, SEND]),
    default=None,
    help="Where it strikes: at a step or a new epoch (workers), or when a message is sent.",
)
@click.option(
    "--message", default="", help="At send: name of the message, such as Emits; any if empty."
)
@click.option("--seconds", type=FiniteFloat(0, MAX_FAULT_S), default=1.0, help="Of slow and delay.")
@click.option("--count", type=click.IntRange(1), default=1, help="How often.")
@click.option(
    "--token",
    type=int,
    default=-1,
    help="Only with this token id in a prompt: at launch, or at send of Submit or SchedulerOutput.",
)
@click.option("--seed", type=int, default=None, help="Of everything drawn.  [default: drawn]")
@click.option("--port", type=int, default=None, help="Of the server, when several are running.")
def fault(
    kind: str,
    process: tuple[str, ...],
    step: int | None,
    phase: str | None,
    seed: int | None,
    port: int | None,
    **details: Any,
) -> None:
    """Do KIND to PROCESS: `worker N`, `core` or `frontend`.

    kill and stop strike at once unless a phase is given. exception, oom, crash and slow strike a
    worker at a step, core and frontend at a message; nan and shape are for a worker's step alone;
    drop, delay, duplicate and corrupt strike always at a message.
    """
    fault_kind = FaultKind(kind)
    if fault_kind in MESSAGE_KINDS and phase not in (None, SEND):
        raise click.UsageError(f"--phase {phase}: {kind} strikes at {SEND} alone")
    directory = find_server(port)
    name = process_name(process)
    seed = random.SystemRandom().getrandbits(31) if seed is None else seed
    point = phase or _usual_point(fault_kind, name)
    if step is None and point == LAUNCH:
        present = _present_step(directory, name)
        step = present + random.Random(seed).randint(1, MAX_STEPS_AHEAD)
    step = -1 if step is None else step
    wanted = Inject(fault_kind, step=step, phase=point, seed=seed, **details)
    columns = msgspec.to_builtins(wanted)
    reply = order(directory, {"command": "fault", "name": name, "fault": columns})
    click.echo(f"{kind} for {name}, pid {reply['pid']}; the same again:")
    server = "" if port is None else f" --port {port}"
    click.echo(f"  nvserve fault {kind} {name} {_flags(wanted)}{server}")


def _usual_point(kind: FaultKind, name: str) -> str:
    if kind in IMMEDIATE:
        return ""
    has_steps = name.startswith(("worker", "spare"))
    return LAUNCH if has_steps and kind not in MESSAGE_KINDS else SEND


def _present_step(directory: Path, name: str) -> int:
    """The step that the worker is in, -1 when it has not begun one."""
    for process in order(directory, {"command": "status"})["processes"]:
        if process["name"] == name and process["page"] is not None:
            present: int = process["page"]["step"]
            return present
    return -1


def _flags(fault: Inject) -> str:
    fields = {name: getattr(fault, name) for name in fault.__struct_fields__[1:]}
    shown = {name: value for name, value in fields.items() if value != ""}
    return " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in shown.items())
