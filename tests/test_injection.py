"""Which faults the launcher accepts for which process, and that a refused one arms nothing."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from process.fake_launch import FACTS
from process.server import wait_for

from nvserve.protocol.config import Config
from nvserve.protocol.control import FaultKind, Inject, Role, Setup
from nvserve.protocol.faults import BEGIN, LAUNCH, SEND
from nvserve.scripts.children import Child
from nvserve.scripts.hangs import ChildId
from nvserve.scripts.injection import Injection, complain

COUNT_FRAMES = """
import socket, sys
channel = socket.socket(fileno=int(sys.argv[1]))
print(sum(1 for _ in iter(lambda: channel.recv(65536), b"")))
"""


@pytest.mark.parametrize("role", [Role.CORE, Role.FRONTEND])
@pytest.mark.parametrize("kind", [FaultKind.NAN, FaultKind.SHAPE])
def test_what_is_wrong_with_a_step_is_refused_where_there_are_none(
    role: Role, kind: FaultKind
) -> None:
    complaint = complain(role, role.value, Inject(kind, phase=SEND))
    assert complaint == (
        f"{role.value} cannot do {kind.value} at send; it can do: at send kill, crash, stop, slow, "
        "exception, oom, drop, delay, duplicate, corrupt"
    )


@pytest.mark.parametrize("kind", FaultKind)
def test_a_worker_can_do_every_kind_at_its_usual_point(kind: FaultKind) -> None:
    assert complain(Role.WORKER, "worker 0", Inject(kind, phase=LAUNCH)) is None


@pytest.mark.parametrize(
    ("role", "order"),
    [
        (Role.WORKER, Inject(FaultKind.NAN, phase=BEGIN)),
        (Role.WORKER, Inject(FaultKind.SHAPE, phase=SEND)),
        (Role.WORKER, Inject(FaultKind.CRASH, phase="lunch")),
        (Role.CORE, Inject(FaultKind.CRASH, phase=LAUNCH)),
        (Role.FRONTEND, Inject(FaultKind.KILL, phase=BEGIN)),
        (Role.CORE, Inject(FaultKind.SLOW)),
    ],
)
def test_a_point_that_would_never_strike_is_refused(role: Role, order: Inject) -> None:
    complaint = complain(role, "it", order)
    assert complaint is not None
    assert f"it cannot do {order.kind.value} at {order.phase or 'no point'}; it can do: at " in (
        complaint
    )


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Child]:
    """A process that counts the frames it is sent, and says how many at their end."""
    config = Config(model="fake", facts=FACTS, served_model_names=["fake"])
    setup = Setup(config, Role.CORE, 0, str(tmp_path))
    programs = {Role.CORE: ("-c", COUNT_FRAMES)}
    child = Child(ChildId(Role.CORE, 0), "core", setup, programs)
    yield child
    child.kill()
    child.reap()
    child.close()


def test_a_refused_fault_arms_neither_this_life_nor_the_next(core: Child) -> None:
    injection = Injection(is_allowed=True)
    poison = Inject(FaultKind.NAN, phase=SEND, token=7)
    reply = injection.inject([core], "core", msgspec.to_builtins(poison))
    assert reply["error"].startswith("core cannot do nan")
    injection.forget(core)
    injection.arm(core)  # as a next life
    delay = Inject(FaultKind.DELAY, seconds=0.1)
    assert injection.inject([core], "core", msgspec.to_builtins(delay)) == {"pid": core.pid}
    core.control.close()
    assert wait_for("its count", core.read_lines) == ["2"]  # Setup and the delay
