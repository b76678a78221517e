"""The launcher's loop by itself: what may wake it, and what it makes of time."""

import time
from collections.abc import Iterator

import pytest
from process.fake_launch import FACTS

from nvserve.protocol.config import Config
from nvserve.protocol.control import Role
from nvserve.scripts import listener
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

    def start(self) -> None:
        self._execute(self.policy.start(time.monotonic()))

    def turn(self) -> None:
        self._wait()

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
