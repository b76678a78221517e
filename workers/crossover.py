"""Which way of summing over the ranks is the fastest for how many rows: measured at the start.

Every rank measures, the slowest rank counts, and all ranks choose from the same figures. Later
epochs keep the choice, so that a recovery changes no bit of a sum. Sums that do not end, or are not
NCCL's, are left to NCCL from then on: every epoch maps memory anew, and looks.
"""

import itertools
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec
import torch

from nvserve.kernels.all_reduce import NUM_INBOXES
from nvserve.workers.graphs import GraphPool, Pace
from nvserve.workers.peer_memory import MAX_ROWS, Crossover, PeerMemory
from nvserve.workers.roll_call import RollCall
from nvserve.workers.step_result import PeerLost, Wait

logger = logging.getLogger(__name__)

SIZES: Final = (1, 8, 32, 64, 128, 256, MAX_ROWS)
CHECKED_ROWS: Final = (3, MAX_ROWS)
CALLS: Final = 20  # in a graph
REPLAYS: Final = 4  # the fastest counts
POLL_S: Final = 0.001
LIMIT_S: Final = 10.0  # of a graph, which takes milliseconds, and of NCCL's first sum
CHECK_LIMIT_S: Final = 2.0  # of sums for which all ranks are ready: a recovery waits for them

ONE_SHOT: Final = Crossover(MAX_ROWS, MAX_ROWS)
TWO_SHOT: Final = Crossover(0, MAX_ROWS)
NCCL_ALONE: Final = Crossover(0, 0)

Times = dict[int, tuple[float, float, float]]  # rows -> ms of one-shot, two-shot and NCCL

_ENCODER: Final = msgspec.json.Encoder()
_CROSSOVER: Final = msgspec.json.Decoder(Crossover | None)
_TIMES: Final = msgspec.json.Decoder(Times)


class SumsFail(PeerLost):
    """A sum through peer memory went wrong on this rank."""


def choose(times: Times) -> Crossover:
    """Each way is used up to the last size before another one is faster."""
    one_shot_rows = two_shot_rows = 0
    is_one_shot = True
    for rows, (one, two, nccl) in sorted(times.items()):
        if min(one, two) >= nccl:
            break
        two_shot_rows = rows
        is_one_shot = is_one_shot and one <= two
        if is_one_shot:
            one_shot_rows = rows
    return Crossover(one_shot_rows, two_shot_rows)


def agree_on_crossover(
    memory: PeerMemory,
    roll: RollCall,
    all_reduce: Callable[[torch.Tensor], object],
    wait: Wait,
    known: Crossover | None,
) -> Crossover:
    """Set memory's crossover to what all ranks do: the lowest rank's that knows one, or measure.

    all_reduce(x) sums in place through NCCL. `wait` may raise, which ends this.
    """
    told = roll.hear_all("crossover", _ENCODER.encode(known).decode())
    found = next((c for c in map(_CROSSOVER.decode, told) if c is not None), None)
    if found != NCCL_ALONE and not _all_are_right(memory, roll, all_reduce, wait):
        found = NCCL_ALONE
    if found is None:
        mine = _ENCODER.encode(measure(memory, all_reduce, wait)).decode()
        found = choose(slowest(list(map(_TIMES.decode, roll.hear_all("times", mine)))))
        found = found._replace(one_shot_rows=min(found.one_shot_rows, memory.inbox_rows))
        logger.info(
            "sums of up to %d rows in one shot, up to %d in two, NCCL above (ms: %s)", *found, mine
        )
    memory.crossover = found
    return found


def _all_are_right(
    memory: PeerMemory, roll: RollCall, all_reduce: Callable[[torch.Tensor], object], wait: Wait
) -> bool:
    """Do sums through this memory end, and end well, on all ranks?"""
    compile_sums(memory)
    roll.hear_all("compiled", "")  # nobody waits in a kernel for one that is being compiled
    if roll.all_agree("sums", _are_right(memory, all_reduce, wait)):
        return True
    memory.abort()  # whoever still waits for a peer
    logger.warning("sums through peer memory fail: NCCL does all of them")
    return False


def _are_right(
    memory: PeerMemory, all_reduce: Callable[[torch.Tensor], object], wait: Wait
) -> bool:
    try:
        check(memory, all_reduce, wait)
    except SumsFail as error:
        logger.warning("rank %d: sums through peer memory: %s", memory.rank, error)
        return False
    return True


def compile_sums(memory: PeerMemory) -> None:
    """Compile the kernels of both ways, and run none."""
    # Triton is absent from CPU-only installs.
    from nvserve.kernels.compilation import compiling_only

    with compiling_only():
        for memory.crossover in (ONE_SHOT, TWO_SHOT):
            memory.sum(_addend(memory, 0, 1))


def check(memory: PeerMemory, all_reduce: Callable[[torch.Tensor], object], wait: Wait) -> None:
    """SumsFail where a sum does not end, or differs from NCCL's of numbers that are exact.

    Of few rows, and of so many that all programs must be there at a time; in one shot so often that
    inboxes are used again. Every rank asks NCCL for the same sums, whatever it finds: one more on
    one rank would meet another's next one.
    """
    memory.crossover = TWO_SHOT  # of all sizes
    most = min(memory.inbox_rows, max(CHECKED_ROWS))
    calls = [(rows, ONE_SHOT) for rows in (min(CHECKED_ROWS), most) for _ in range(NUM_INBOXES + 1)]
    calls += [(rows, TWO_SHOT) for rows in CHECKED_ROWS]
    expected = []
    for number, (rows, _) in enumerate(calls):
        expected.append(_numbers(memory, rows, number))
        all_reduce(expected[-1])
    finish(wait, LIMIT_S)  # NCCL connects in its first sum
    sums = []
    for number, (rows, memory.crossover) in enumerate(calls):
        mine = _numbers(memory, rows, number)
        sums.append(memory.sum(_addend(memory, number % 2, rows).copy_(mine)))
    finish(wait, CHECK_LIMIT_S)
    for (rows, _), right, total in zip(calls, expected, sums, strict=True):
        if not torch.equal(total, right):
            raise SumsFail(f"those of {rows} rows differ from NCCL's")


def _numbers(memory: PeerMemory, rows: int, call: int) -> torch.Tensor:
    """Small ones, and so exact in every dtype.

    No two ranks, neighbours or calls that follow each other have the same ones.
    """
    addend = _addend(memory, 0, rows)
    numbers = torch.arange(addend.numel(), dtype=torch.int32, device=addend.device) + call
    return (numbers % 7 + memory.rank).to(addend.dtype).view_as(addend)


def finish(wait: Wait, limit_s: float) -> None:
    """Wait for what the device was given."""
    ended = _mark()
    give_up = time.monotonic() + limit_s
    while not ended.query():
        if time.monotonic() > give_up:
            raise SumsFail(f"they do not end within {limit_s:g} s")
        wait(POLL_S)


def _mark() -> torch.cuda.Event:
    """An event of what the device was given until now."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def slowest(everyone: list[Times]) -> Times:
    """Each time as the slowest rank measured it: sums end together."""
    return {
        rows: (
            max(times[rows][0] for times in everyone),
            max(times[rows][1] for times in everyone),
            max(times[rows][2] for times in everyone),
        )
        for rows in everyone[0]
    }


def measure(memory: PeerMemory, all_reduce: Callable[[torch.Tensor], object], wait: Wait) -> Times:
    """Milliseconds of a sum by rows and way, on this rank; leaves the crossover undefined.

    PeerLost when one does not end.
    """
    times = {}
    for rows in SIZES:
        memory.crossover = ONE_SHOT
        one = time_call(partial(_sum, memory, rows), wait)
        memory.crossover = TWO_SHOT
        two = time_call(partial(_sum, memory, rows), wait)
        both = [torch.zeros_like(_addend(memory, 0, rows)) for _ in range(2)]
        nccl = time_call(lambda place, both=both: all_reduce(both[place]), wait)  # type: ignore[misc]
        times[rows] = (one, two, nccl)
    return times


def _addend(memory: PeerMemory, place: int, rows: int) -> torch.Tensor:
    addend = memory.take(place, rows)
    assert addend is not None, "the crossover allows all sizes"
    return addend


def _sum(memory: PeerMemory, rows: int, place: int) -> None:
    memory.sum(_addend(memory, place, rows))


def time_call(call: Callable[[int], object], wait: Wait) -> float:
    """Milliseconds of call(place), from a graph of many, at places 0 and 1 in turn.

    PeerLost when it does not end.
    """
    call(0), call(1)  # compiles, and connects
    finish(wait, LIMIT_S)
    device = torch.device("cuda", torch.cuda.current_device())
    pool = GraphPool(device, Pace(is_in_step=False))
    try:
        graph, _ = pool.capture(lambda: [call(index % 2) for index in range(CALLS)])
        graph.replay()  # all ranks end it together, and so begin together what is timed
        marks = [_mark()]
        for _ in range(REPLAYS):
            graph.replay()
            marks.append(_mark())
        finish(wait, LIMIT_S)
        return float(min(a.elapsed_time(b) for a, b in itertools.pairwise(marks))) / CALLS
    finally:
        pool.reset()  # an exception that is being handled would keep the graph, and it the group
