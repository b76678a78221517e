"""The progress page: a small memory-mapped file by which one process shows that it gets on.

Written by a process's own main loop, read by the launcher: a stopped process can be read, and
nothing queues. The time is CLOCK_MONOTONIC, which all processes of one machine share.
"""

import enum
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Final, NamedTuple

_LAYOUT: Final = struct.Struct("<qqqqqd")
BEAT_S: Final = 0.5  # the longest a healthy main loop goes without a beat


class Phase(enum.IntEnum):
    """Where a main loop is; WAITING means it waits for messages with nothing to do."""

    STARTING = 0
    LOADING = 1  # weights, tokenizer, warm-up, capture: slow by nature
    WAITING = 2
    PREPARING = 3  # applying a step's delta
    FORWARD = 4
    SAMPLING = 5
    SENDING = 6
    REBUILDING = 7
    SERVING = 8  # frontend and core: between waits


class Snapshot(NamedTuple):
    """One reading of a page."""

    epoch: int
    step: int
    phase: Phase
    collectives_entered: int
    collectives_left: int
    time_s: float  # CLOCK_MONOTONIC


class ProgressPage:
    """The writer's side. Fields are set freely; `beat` publishes them with the time."""

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _LAYOUT.size)
            self._map: Final = mmap.mmap(fd, _LAYOUT.size)
        finally:
            os.close(fd)
        self.epoch = -1
        self.step = -1
        self.phase = Phase.STARTING
        self.collectives_entered = 0
        self.collectives_left = 0
        self.beat()

    def beat(self, phase: Phase | None = None) -> None:
        """Publish now; optionally move to another phase first."""
        if phase is not None:
            self.phase = phase
        _LAYOUT.pack_into(
            self._map,
            0,
            self.epoch,
            self.step,
            self.phase,
            self.collectives_entered,
            self.collectives_left,
            time.monotonic(),
        )


def page_path(launch_dir: str, role: str, life: int) -> str:
    """Where the process of this role and life keeps its page."""
    return str(Path(launch_dir) / f"{role}{life}.page")


def read_page(path: str) -> Snapshot | None:
    """The last published state, or None before the first one (or of a torn write)."""
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        return None
    if len(raw) != _LAYOUT.size:
        return None
    epoch, step, phase, entered, left, time_s = _LAYOUT.unpack(raw)
    try:
        return Snapshot(epoch, step, Phase(phase), entered, left, time_s)
    except ValueError:  # a torn write
        return None
