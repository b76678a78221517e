"""The progress page: a small memory-mapped file by which one process shows that it gets on.

Written by a process's own main loop, read by the launcher: a stopped process can be read, and
nothing queues. The time is CLOCK_MONOTONIC, which all processes of one machine share.

A page has two halves, written in turn, each with a count and a checksum. A process may be stopped,
or lose its core, in the midst of a beat: the half before it is then still whole.
"""

import enum
import mmap
import os
import struct
import time
import zlib
from pathlib import Path
from typing import Final, NamedTuple

_FIELDS: Final = struct.Struct("<qqqqqqd")  # the count of beats, then a Snapshot
_CHECKSUM: Final = struct.Struct("<I")
_HALF_BYTES: Final = _FIELDS.size + _CHECKSUM.size
_MAX_READINGS: Final = 8  # of a page that changes under the reader
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
    PREPARING_AHEAD = 9  # a worker that waits, with graphs left to capture in calm moments


IDLE: Final = frozenset({Phase.WAITING, Phase.PREPARING_AHEAD})  # of a worker without a step


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
            os.posix_fallocate(fd, 0, 2 * _HALF_BYTES)  # a full disk is an error here, not later
            self._map: Final = mmap.mmap(fd, 2 * _HALF_BYTES)
        finally:
            os.close(fd)
        self._num_beats = 0
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
        self._num_beats += 1
        fields = _FIELDS.pack(
            self._num_beats,
            self.epoch,
            self.step,
            self.phase,
            self.collectives_entered,
            self.collectives_left,
            time.monotonic(),
        )
        half = self._num_beats % 2 * _HALF_BYTES
        self._map[half : half + _HALF_BYTES] = fields + _CHECKSUM.pack(zlib.crc32(fields))


def page_path(launch_dir: str, role: str, life: int) -> str:
    """Where the process of this role and life keeps its page."""
    return str(Path(launch_dir) / f"{role}{life}.page")


def read_page(path: str) -> Snapshot | None:
    """The last state published in whole, or None before the first one."""
    for _ in range(_MAX_READINGS):
        try:
            raw = Path(path).read_bytes()
        except FileNotFoundError:
            return None
        halves = [_read_half(raw[at : at + _HALF_BYTES]) for at in (0, _HALF_BYTES)]
        whole = [half for half in halves if half is not None]
        if whole:
            return max(whole)[1]
    return None


def _read_half(raw: bytes) -> tuple[int, Snapshot] | None:
    """A half's count of beats and its state; None when it is torn or was never written."""
    if len(raw) != _HALF_BYTES:
        return None
    fields, checksum = raw[: _FIELDS.size], raw[_FIELDS.size :]
    if _CHECKSUM.unpack(checksum) != (zlib.crc32(fields),):
        return None
    num_beats, epoch, step, phase, entered, left, time_s = _FIELDS.unpack(fields)
    return num_beats, Snapshot(epoch, step, Phase(phase), entered, left, time_s)
