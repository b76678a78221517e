"""The launcher's loop by itself: what may wake it, and what it makes of time."""

import time
from collections.abc import Iterator

import pytest
from process.fake_launch import FACTS

from nvserve.protocol.config import Config
from nvserve.protocol.control import Role, State
from nvserve.scripts import listener
from nvserve.scripts.awake_clock import AwakeClock
from nvserve.scripts.display import Display
from nvserve.scripts.launch_dir import LaunchDir
from nvserve.scripts.outlet import Outlet
from nvserve.scripts.supervisor import Supervisor

LIMIT_S = 60.0
NUM_TURNS = 3
HANG_UP = """
import socket, sys, time
control = socket.socket(fileno=int(sys.argv[1]))
control.recv(65536)
control.close()
time.sleep(600)
"""


class Told(Supervisor):
    """Says which children have hung up, and how often their channels woke it."""

    def __init__(self, config: Config) -> None:
        super().__init__(
            config,
            http=listener.listen("127.0.0.1", 0),
            directory=LaunchDir(),
            display=Display(Outlet(), is_quiet=True),
            programs=dict.fromkeys(Role, ("-c", HANG_UP)),
        )
        self.num_heard = 0
        self.gap_s = 0.0  # that CLOCK_MONOTONIC is ahead of all processes by
        self._clock = AwakeClock(0.25, lambda: time.monotonic() + self.gap_s)  # type: ignore[misc]

    def start(self) -> None:
        self._execute(self.policy.start(self._clock.now()))

    def turn(self) -> None:
        self._wait()
        self._tick()

    def close(self) -> None:
        for child in self._children.values():
            child.kill()
            assert child.wait(LIMIT_S)
            child.reap()
        self._clean_up()

    def num_hung_up(self) -> int:
        return sum(child.has_hung_up for child in self._children.values())

    def _hear(self, child: object) -> None:
        self.num_heard += 1
        super()._hear(child)  # type: ignore[arg-type]  # a Child


@pytest.fixture
def supervisor() -> Iterator[Told]:
    told = Told(Config(model="fake", facts=FACTS, served_model_names=["fake"], num_spares=0))
    yield told
    told.close()


def test_a_child_that_closed_its_channel_and_lives_wakes_the_loop_once(supervisor: Told) -> None:
    supervisor.start()
    deadline = time.monotonic() + LIMIT_S
    while supervisor.num_hung_up() < len(Role):
        assert time.monotonic() < deadline
        supervisor.turn()
    assert supervisor.num_heard == len(Role)
    for _ in range(NUM_TURNS):
        supervisor.turn()
    assert supervisor.num_heard == len(Role)


def test_no_limit_passes_while_everything_is_frozen(supervisor: Told) -> None:
    supervisor.start()
    supervisor.turn()
    supervisor.gap_s = 3600.0  # longer than any limit
    for _ in range(NUM_TURNS):
        supervisor.turn()
    assert supervisor.policy.state is State.LOADING, supervisor.policy.reason


class FakeTime:
    """What a clock reads."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_gap_takes_no_more_time_than_a_turn() -> None:
    read = FakeTime()
    clock = AwakeClock(0.25, read)
    read.now += 60.0
    assert clock.now() == 100.25
    assert clock.awake_since == 100.25
    read.now += 0.25
    assert clock.now() == 100.5
    assert clock.convert(read.now) == 100.5
    assert clock.awake_since == 100.25


def test_slow_turns_are_no_gaps_and_time_goes_on_whatever_happens() -> None:
    read = FakeTime()
    clock = AwakeClock(0.25, read)
    for _ in range(10):
        read.now += 1.25
        clock.now()
    assert clock.now() == read.now
    assert clock.awake_since == 100.0
    begun = clock.now()
    for _ in range(100):
        read.now += 10.0
        clock.now()
    assert clock.now() - begun == 25.0
