"""Runs a benchmark's load on uvloop, and ends it cleanly at Ctrl-C."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

Result = TypeVar("Result")


def run_on_uvloop(load: Coroutine[Any, Any, Result]) -> Result:
    """Its result; Ctrl-C cancels it and is a KeyboardInterrupt afterwards.

    One that is raised inside a callback is, to uvloop, a connection that failed.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the runner replaces no other
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(load)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, before)
        signal.raise_signal(signal.SIGINT)  # whoever counts them learns of this one
        raise
    finally:
        signal.signal(signal.SIGINT, before)
