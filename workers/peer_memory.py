"""The memory through which the ranks of one epoch sum their rows, kernels/all_reduce.py over it.

Every rank gives one allocation, laid out alike, and maps those of the others. It is made anew with
every epoch: nothing a dead rank still wrote can reach the next one, and what its mapping held of a
dead peer's memory goes back to the device.

N columns, R rows of a step.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import torch

from nvserve.kernels import all_reduce
from nvserve.kernels.all_reduce import NUM_INBOXES, Addends, Meeting
from nvserve.workers.descriptors import exchange_descriptors
from nvserve.workers.mapped_memory import MappedMemory
from nvserve.workers.roll_call import RollCall

logger = logging.getLogger(__name__)

MAX_ROWS: Final = 512  # more are NCCL's, which then is the faster one
MAX_INBOX_BYTES: Final = 64 << 20  # of all rows; with more ranks, fewer rows are best in one shot
ALIGNMENT: Final = 256
REFUSALS: Final = (RuntimeError, KeyError)  # of the driver; the binding raises the latter for news


class Crossover(NamedTuple):
    """Up to how many rows each way of summing is the fastest; above, NCCL is."""

    one_shot_rows: int
    two_shot_rows: int  # at least one_shot_rows


class Layout:
    """Where things are in a rank's allocation: flags, each place's two tables, then inboxes.

    In bytes.
    """

    def __init__(self, size: int, num_places: int, width: int, dtype: torch.dtype) -> None:
        self.size: Final = size
        self.num_places: Final = num_places
        self.width: Final = width
        self.dtype: Final = dtype
        self._first: Final = _aligned(2 * MAX_ROWS * size * torch.int32.itemsize)
        self._table: Final = _aligned(MAX_ROWS * width * dtype.itemsize)
        inboxes_of_row = NUM_INBOXES * (size - 1) * width * dtype.itemsize
        self.inbox_rows: Final = min(MAX_ROWS, MAX_INBOX_BYTES // inboxes_of_row)
        self._inbox_bytes: Final = self.inbox_rows * inboxes_of_row

    @property
    def is_possible(self) -> bool:
        """Kernels read rows 16 bytes at a time."""
        return self.width * self.dtype.itemsize % 16 == 0

    @property
    def num_bytes(self) -> int:
        return self.inboxes + self._inbox_bytes

    @property
    def inboxes(self) -> int:
        return self.addend(self.num_places)

    def addend(self, place: int) -> int:
        return self._first + 2 * place * self._table

    def sums(self, place: int) -> int:
        return self.addend(place) + self._table


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class PeerMemory:
    """One rank's side of it. All ranks call the same methods in the same order."""

    def __init__(
        self,
        rank: int,
        layout: Layout,
        mine: torch.Tensor,
        addresses: Sequence[int],
        abort: torch.Tensor,
        *,
        max_programs: int = MAX_ROWS,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """`mine` is this rank's allocation, uint8 and zero; addresses are of all ranks', mapped.

        `abort` is an int32 [1] of host memory that the device reads; max_programs is that of the
        smallest GPU. The crossover is for the caller to set.
        """
        device = mine.device
        self.rank: Final = rank
        self._layout: Final = layout
        self.width: Final = layout.width
        self._close: Final = close
        self.crossover = Crossover(MAX_ROWS, MAX_ROWS)
        self._abort: Final = abort
        self.meeting: Final = Meeting(
            rank,
            layout.size,
            MAX_ROWS,
            max_programs,
            layout.inbox_rows,
            inboxes=_addresses(addresses, layout.inboxes, device),
            turns=torch.zeros(layout.inbox_rows, dtype=torch.int32, device=device),
            flags=_addresses(addresses, 0, device),
            calls=torch.zeros(MAX_ROWS, dtype=torch.int32, device=device),
            given_up=torch.zeros(1, dtype=torch.int32, device=device),
            abort=abort,
        )
        self._places: Final = [
            self._place(mine, addresses, place) for place in range(layout.num_places)
        ]
        self._by_pointer: Final = {place.mine.data_ptr(): place for place in self._places}

    def _place(self, mine: torch.Tensor, addresses: Sequence[int], place: int) -> Addends:
        layout, at = self._layout, self._layout.addend(place)
        num_bytes = MAX_ROWS * layout.width * layout.dtype.itemsize
        table = mine[at : at + num_bytes].view(layout.dtype).view(MAX_ROWS, layout.width)
        return Addends(
            self.meeting,
            table,
            _addresses(addresses, at, mine.device),
            _addresses(addresses, layout.sums(place), mine.device),
        )

    @property
    def inbox_rows(self) -> int:
        """The most that are summed in one shot, whatever the crossover."""
        return self._layout.inbox_rows

    def take(self, place: int, num_rows: int) -> torch.Tensor | None:
        """[num_rows, N] to write addends to; None where NCCL is the faster.

        What was summed there before must have been followed by a sum at another place.
        """
        if num_rows > self.crossover.two_shot_rows:
            return None
        return self._places[place].mine[:num_rows]

    def holds(self, x: torch.Tensor) -> bool:
        """Is x what `take` gave?"""
        return x.data_ptr() in self._by_pointer

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of x [R, N], which `take` gave: a new tensor."""
        place = self._by_pointer[x.data_ptr()]
        return all_reduce.sum_rows(place, len(x), is_two_shot=self._is_two_shot(len(x)))

    def sum_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """norm.add_rms_norm of the sum over all ranks of x [R, N], which `take` gave."""
        place = self._by_pointer[x.data_ptr()]
        return all_reduce.sum_add_rms_norm(
            place, residual, weight, eps, is_two_shot=self._is_two_shot(len(x))
        )

    def _is_two_shot(self, num_rows: int) -> bool:
        return num_rows > min(self.crossover.one_shot_rows, self.inbox_rows)

    def close(self) -> None:
        """Give the memory back, once the device is done with it."""
        self._close()

    def abort(self) -> None:
        """Have every kernel that waits for a peer, and those behind it, give up; any thread may.

        Results are garbage from now on. The memory must stay until the device is done.
        """
        self._abort.fill_(1)


def _addresses(bases: Sequence[int], offset: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([base + offset for base in bases], dtype=torch.int64, device=device)


def open_for_all(layout: Layout, roll: RollCall, path: Path) -> PeerMemory | None:
    """The memory of this process' current GPU and its peers; None, for all ranks, where one cannot.

    All ranks call this; `path` is the beginning of file names, and new with every epoch. Whatever
    roll.wait() raises passes through, and nothing is left behind.
    """
    device = torch.cuda.current_device()
    with ExitStack() as undo:
        mine = _offer(layout, device, undo)
        # Nobody may be alone where all must come.
        if roll.all_agree("offers", mine is not None) and mine is not None:
            mapped = _map_all(mine, roll, path, device, undo)
            if roll.all_agree("maps", mapped is not None) and mapped is not None:
                max_programs = min(map(int, roll.hear_all("sms", str(num_multiprocessors(device)))))
                return PeerMemory(
                    roll.rank,
                    layout,
                    mine.tensor(),
                    [memory.address for memory in mapped],
                    pinned_word(),
                    max_programs=max_programs,
                    close=undo.pop_all().close,
                )
    logger.info("ranks do not share their memory: NCCL does all sums")
    return None


def _offer(layout: Layout, device: int, undo: ExitStack) -> MappedMemory | None:
    """What this rank gives; None where it cannot, or has no use for what the others give."""
    others = (other for other in range(torch.cuda.device_count()) if other != device)
    if not all(torch.cuda.can_device_access_peer(device, other) for other in others):
        return None
    if not layout.is_possible:
        return None
    try:
        memory = MappedMemory.allocate(layout.num_bytes, device)
    except (ImportError, *REFUSALS) as error:
        logger.warning("no memory for peers: %s", error)
        return None
    undo.callback(memory.close)
    return memory


def _map_all(
    mine: MappedMemory, roll: RollCall, path: Path, device: int, undo: ExitStack
) -> list[MappedMemory] | None:
    """The memory of all ranks, in rank order; None where one's cannot be exported or mapped."""
    with ExitStack() as files:
        try:
            exported = mine.export()
        except REFUSALS as error:
            logger.warning("no memory for peers: %s", error)
            exported = os.open(os.devnull, os.O_RDONLY)  # which they will not map either
        files.callback(os.close, exported)
        descriptors = exchange_descriptors(path, roll, exported)
        for descriptor in descriptors:
            files.callback(os.close, descriptor)
        mapped = []
        try:
            for rank, descriptor in enumerate(descriptors):
                if rank == roll.rank:
                    mapped.append(mine)
                    continue
                memory = MappedMemory.of_descriptor(descriptor, mine.num_bytes, device)
                undo.callback(memory.close)
                mapped.append(memory)
        except REFUSALS as error:
            logger.warning("no memory of rank %d: %s", len(mapped), error)
            return None
        return mapped


def num_multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def pinned_word() -> torch.Tensor:
    """An int32 of host memory, 0, that the device can read."""
    return torch.zeros(1, dtype=torch.int32).pin_memory()
