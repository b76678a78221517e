"""Ctrl-C as a KeyboardInterrupt: raised where it may be, kept until then, and noticed in time."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from nvserve.scripts import entry
from nvserve.scripts.cli import LazyGroup, put_away_at_interrupts
from nvserve.scripts.exit_codes import ExitCode
from nvserve.scripts.interrupts import Interrupts, raised_once, watched

LIMIT_S = 30.0


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    before = signal.getsignal(signal.SIGINT)
    with watched() as interrupts:
        yield interrupts
    assert signal.getsignal(signal.SIGINT) is before


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_it_is_raised_inside_and_once(interrupts: Interrupts) -> None:
    steps = []
    try:
        with interrupts.raised():
            try:
                interrupt()
                steps.append("not raised")
            finally:
                interrupt()  # does not disturb this
                steps.append("put away")
    except KeyboardInterrupt:
        steps.append("raised")
    assert steps == ["put away", "raised"]


def test_one_that_comes_between_waits_for_the_next_time(interrupts: Interrupts) -> None:
    interrupt()
    with pytest.raises(KeyboardInterrupt), interrupts.raised():
        pytest.fail("it was not raised at the beginning")
    with interrupts.raised():
        pass  # it was one only


def test_later_ones_change_nothing_where_it_is_raised_once() -> None:
    steps = []
    try:
        with raised_once():
            try:
                interrupt()
                steps.append("not raised")
            finally:
                for _ in range(2):
                    interrupt()
                    steps.append("put away")
    except KeyboardInterrupt:
        steps.append("raised")
    assert steps == ["put away", "put away", "raised"]


def test_one_that_the_parent_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with watched() as interrupts, interrupts.raised():
            interrupt()
    finally:
        signal.signal(signal.SIGINT, before)


def test_one_that_interrupts_no_call_is_noticed_all_the_same(interrupts: Interrupts) -> None:
    """Another thread takes it, as if it had come right before this one's call."""
    reading, writing = os.pipe()
    begins, gives_up = threading.Event(), threading.Event()

    def hit() -> None:
        assert begins.wait(LIMIT_S)
        time.sleep(0.3)  # should the call not have begun, this proves nothing, but does not fail
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    def give_up() -> None:
        if not gives_up.wait(LIMIT_S):
            gives_up.set()
            os.write(writing, b"x")

    def read() -> None:
        begins.set()
        os.read(reading, 1)

    threads = [threading.Thread(target=target) for target in (hit, give_up)]
    for thread in threads:
        thread.start()
    try:
        with pytest.raises(KeyboardInterrupt), interrupts.raised():
            read()
        assert not gives_up.is_set(), "the call had to end by itself"
    finally:
        gives_up.set()
        for thread in threads:
            thread.join(LIMIT_S)
        os.close(reading)
        os.close(writing)


def test_an_interrupted_benchmark_puts_its_things_away_first() -> None:
    steps = []

    @click.command()
    def measure() -> None:
        try:
            interrupt()
        finally:
            steps.append("put away")

    bench = LazyGroup("bench", {}, "", put_away_at_interrupts)
    bench.add_command(measure)
    before = signal.signal(signal.SIGINT, lambda *_: steps.append("left at once"))
    try:
        result = CliRunner().invoke(bench, ["measure"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert steps == ["put away"]
    assert result.exit_code == ExitCode.INTERRUPTED
    assert result.stderr == entry.FAREWELL


def test_the_exit_status_is_the_launchers() -> None:
    assert entry.INTERRUPTED == ExitCode.INTERRUPTED
