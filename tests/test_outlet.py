"""What the launcher prints never keeps it waiting and never ends it."""

import os
import select
from collections.abc import Iterator

import pytest

from nvserve.scripts import outlet
from nvserve.scripts.outlet import Outlet

LINE = "x" * 999 + "\n"


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for a second is no reader that has gone to sleep."""
    monkeypatch.setattr(outlet, "FAREWELL_S", 60.0)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def read_all(fd: int) -> bytes:
    found = b""
    while select.select([fd], [], [], 0)[0]:
        found += os.read(fd, 65536)
    return found


def test_both_streams_come_in_one_order(pipe: tuple[int, int]) -> None:
    lines = Outlet(stdout_fd=pipe[1], stderr_fd=pipe[1])
    lines.write("before\n")
    lines.announce("ready")
    lines.write("after\n")
    assert lines.close()
    assert read_all(pipe[0]) == b"before\nready\nafter\n"


def test_a_reader_that_does_not_read_keeps_nobody_waiting(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlet, "FAREWELL_S", 0.01)
    lines = Outlet(stderr_fd=pipe[1])
    for _ in range(2 * outlet.MAX_TEXTS):
        lines.write(LINE)
    assert not lines.close()
    num_kept = 0
    while not lines.close():  # it wakes up, and gets what was kept
        num_kept += len(read_all(pipe[0]))
    num_kept += len(read_all(pipe[0]))
    assert outlet.MAX_TEXTS * len(LINE) <= num_kept < 2 * outlet.MAX_TEXTS * len(LINE)


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_full_pipe_loses_nothing_that_was_kept(pipe: tuple[int, int], is_blocking: bool) -> None:
    os.set_blocking(pipe[1], is_blocking)
    lines = Outlet(stderr_fd=pipe[1])
    for _ in range(200):
        lines.write(LINE)
    found = b""
    while len(found) < 200 * len(LINE):
        assert select.select([pipe[0]], [], [], 60)[0]
        found += os.read(pipe[0], 65536)
    assert lines.close()
    assert found == LINE.encode() * 200


def test_a_reader_that_has_left_and_a_full_disk_are_survived(pipe: tuple[int, int]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    full = os.open("/dev/full", os.O_WRONLY)
    for fd in (write_end, full):
        lines = Outlet(stdout_fd=pipe[1], stderr_fd=fd)
        lines.write("lost\n")
        lines.announce("kept")
        assert lines.close()  # nobody writes to this number any more
        os.close(fd)
    assert read_all(pipe[0]) == b"kept\nkept\n"
