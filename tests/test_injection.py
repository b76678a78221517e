"""Which faults the launcher accepts for which process, and that a refused one arms nothing."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from process.fake_launch import FACTS
from process.server import wait_for

from nvserve.protocol.codec import decode_to_child, encode
from nvserve.protocol.config import Config
from nvserve.protocol.control import FaultKind, Inject, Role, Setup
from nvserve.protocol.faults import BEGIN, LAUNCH, MESSAGE_KINDS, SEND
from nvserve.scripts.children import Child
from nvserve.scripts.fault import fault
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
    point = SEND if kind in MESSAGE_KINDS else LAUNCH
    assert complain(Role.WORKER, "worker 0", Inject(kind, phase=point)) is None


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


TOKEN_PLACES = "worker at launch, frontend at send of Submit, core at send of SchedulerOutput"


@pytest.mark.parametrize(
    ("name", "order", "option"),
    [
        (
            "worker 0",
            Inject(FaultKind.CRASH, phase=BEGIN, token=5),
            "--token says nothing at begin",
        ),
        ("worker 0", Inject(FaultKind.CRASH, phase=SEND, token=5), "--token says nothing at send"),
        ("worker 1", Inject(FaultKind.DROP, token=5), "--token says nothing at send"),
        ("worker 1", Inject(FaultKind.KILL, token=5), "--token says nothing at once"),
        (
            "core",
            Inject(FaultKind.CRASH, phase=SEND, message="Emits", token=5),
            "--token says nothing at send of Emits",
        ),
        (
            "frontend",
            Inject(FaultKind.DROP, message="Abort", token=5),
            "--token says nothing at send of Abort",
        ),
    ],
)
def test_a_token_where_no_prompt_passes_is_refused(name: str, order: Inject, option: str) -> None:
    complaint = complain(Role(name.split()[0]), name, order)
    assert complaint == f"{option}: it is for {TOKEN_PLACES}"


@pytest.mark.parametrize(
    ("name", "order", "complaint"),
    [
        (
            "frontend",
            Inject(FaultKind.DROP, message="Emits"),
            "--message Emits: frontend never sends it; it sends: Hello, Submit, Abort, Finish",
        ),
        (
            "core",
            Inject(FaultKind.CRASH, phase=SEND, message="Submit"),
            "--message Submit: core never sends it; it sends: Hello, Accepted, Refused, Emits, "
            "CoreStats, Strikes, SchedulerOutput",
        ),
        (
            "worker 1",
            Inject(FaultKind.DELAY, message="ModelOutput"),
            "--message ModelOutput: worker 1 never sends it; it sends: Hello, StepDone, "
            "StepFailed, Gap",
        ),
        (
            "worker 0",
            Inject(FaultKind.CRASH, phase=LAUNCH, message="ModelOutput"),
            "--message says nothing at launch: it is for faults at send",
        ),
        (
            "worker 0",
            Inject(FaultKind.STOP, message="ModelOutput"),
            "--message says nothing at once: it is for faults at send",
        ),
        (
            "worker 0",
            Inject(FaultKind.CRASH, phase=BEGIN, step=3),
            "--step says nothing at begin: it is for a worker's faults at launch",
        ),
        (
            "core",
            Inject(FaultKind.DROP, step=3),
            "--step says nothing at send: it is for a worker's faults at launch",
        ),
        (
            "core",
            Inject(FaultKind.KILL, step=3),
            "--step says nothing at once: it is for a worker's faults at launch",
        ),
    ],
)
def test_an_option_that_could_never_match_is_refused(
    name: str, order: Inject, complaint: str
) -> None:
    assert complain(Role(name.split()[0]), name, order) == complaint


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("worker 0", Inject(FaultKind.CRASH, phase=LAUNCH, token=5, step=3)),
        ("worker 0", Inject(FaultKind.KILL, phase=SEND, message="ModelOutput")),
        ("worker 1", Inject(FaultKind.DROP, message="StepDone")),
        ("spare", Inject(FaultKind.DROP, message="ModelOutput")),
        ("spare", Inject(FaultKind.DROP, message="StepDone")),
        ("core", Inject(FaultKind.CRASH, phase=SEND, token=5)),
        ("core", Inject(FaultKind.CRASH, phase=SEND, message="SchedulerOutput", token=5)),
        ("frontend", Inject(FaultKind.STOP, phase=SEND, message="Submit", token=5)),
        ("frontend", Inject(FaultKind.DROP, message="Finish")),
    ],
)
def test_an_option_that_can_match_is_taken(name: str, order: Inject) -> None:
    role = Role.WORKER if name == "spare" else Role(name.split()[0])
    assert complain(role, name, order) is None


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["drop", "core", "--phase", "launch"], "--phase launch: drop strikes at send alone"),
        (["delay", "worker", "0", "--seconds", "-1"], "Invalid value for '--seconds'"),
        (["slow", "worker", "0", "--seconds", "nan"], "Invalid value for '--seconds'"),
        (["slow", "worker", "0", "--seconds", "inf"], "Invalid value for '--seconds'"),
        (["slow", "worker", "0", "--seconds", "86401"], "Invalid value for '--seconds'"),
        (["crash", "core", "--count", "0"], "Invalid value for '--count'"),
    ],
)
def test_a_wrong_option_is_refused_before_a_server_is_asked(
    arguments: list[str], complaint: str
) -> None:
    result = CliRunner().invoke(fault, arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr


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


@pytest.mark.parametrize(
    ("column", "value", "complaint"),
    [
        ("step", 10**30, "Expected `int` <= 9223372036854775807 as --step"),
        ("step", -2, "Expected `int` >= -1 as --step"),
        ("token", 2**63, "Expected `int` <= 9223372036854775807 as --token"),
        ("count", 0, "Expected `int` >= 1 as --count"),
        ("count", 10**30, "Expected `int` <= 9223372036854775807 as --count"),
        ("seed", -(10**30), "Expected `int` >= -9223372036854775807 as --seed"),
        ("seconds", float("inf"), "Expected `float` <= 86400.0 as --seconds"),
        ("seconds", float("nan"), "Expected `float` >= 0.0 as --seconds"),
        ("message", 5, "Expected `str`, got `int` as --message"),
    ],
)
def test_a_value_that_no_order_can_carry_is_refused_by_name(
    core: Child, column: str, value: object, complaint: str
) -> None:
    fault = msgspec.to_builtins(Inject(FaultKind.DELAY, seconds=0.1))
    fault[1 + Inject.__struct_fields__.index(column)] = value
    reply = Injection(is_allowed=True).inject([core], "core", fault)
    assert reply == {"error": f"no such fault: {complaint}"}


@pytest.mark.parametrize(
    ("number", "seed"),
    [(2**63 - 1, 2**63 - 1), (-1, 1 - 2**63)],
)
def test_the_largest_and_smallest_values_fit_a_message(number: int, seed: int) -> None:
    order = Inject(FaultKind.CRASH, step=number, token=number, count=max(1, number), seed=seed)
    assert msgspec.convert(msgspec.to_builtins(order), Inject) == order
    assert decode_to_child(encode(order)) == order


@pytest.mark.parametrize("phase", [LAUNCH, "lunch", "\ud800"])
def test_a_message_fault_strikes_at_no_other_point(core: Child, phase: str) -> None:
    fault = msgspec.to_builtins(Inject(FaultKind.DROP, phase=phase))
    reply = Injection(is_allowed=True).inject([core], "core", fault)
    assert reply["error"].startswith(f"core cannot do drop at {phase}; it can do: ")


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
