"""The memory through which the ranks of one epoch sum their rows, kernels/all_reduce.py over it.

Every rank gives one allocation, laid out alike, and maps those of the others. It is made anew with
every epoch: nothing a dead rank still wrote can reach the next one, and what its mapping held of a
dead peer's memory goes back to the device.

N columns, R rows of a step.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed.distributed_c10d import GroupName

from nvserve.kernels import all_reduce
from nvserve.kernels.all_reduce import Addends, Meeting
from nvserve.workers.roll_call import RollCall

logger = logging.getLogger(__name__)

MAX_ROWS: Final = 512  # more are NCCL's, which then is the faster one
ALIGNMENT: Final = 256


class Crossover(NamedTuple):
    """Up to how many rows each way of summing is the fastest; above, NCCL is."""

    one_shot_rows: int
    two_shot_rows: int  # at least one_shot_rows


class Layout:
    """Where things are in a rank's allocation, in bytes: flags, then each place's two tables."""

    def __init__(self, size: int, num_places: int, width: int, dtype: torch.dtype) -> None:
        self.size: Final = size
        self.num_places: Final = num_places
        self.width: Final = width
        self.dtype: Final = dtype
        self._first: Final = _aligned(2 * MAX_ROWS * size * torch.int32.itemsize)
        self._table: Final = _aligned(MAX_ROWS * width * dtype.itemsize)

    @property
    def is_possible(self) -> bool:
        """Kernels read rows 16 bytes at a time."""
        return self.width * self.dtype.itemsize % 16 == 0

    @property
    def num_bytes(self) -> int:
        return self._first + 2 * self.num_places * self._table

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
        owner: object = None,
    ) -> None:
        """`mine` is this rank's allocation, uint8 and zero; addresses are of all ranks', mapped.

        `abort` is an int32 [1] of host memory that the device reads; `owner` is kept alive. The
        crossover is for the caller to set.
        """
        device = mine.device
        self.rank: Final = rank
        self._layout: Final = layout
        self.width: Final = layout.width
        self._owner: Final = owner
        self.crossover = Crossover(MAX_ROWS, MAX_ROWS)
        self._abort: Final = abort
        self.meeting: Final = Meeting(
            rank,
            layout.size,
            MAX_ROWS,
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
        return num_rows > self.crossover.one_shot_rows

    def abort(self) -> None:
        """Have every kernel that waits for a peer, and those behind it, give up; any thread may.

        Results are garbage from now on. The memory must stay until the device is done.
        """
        self._abort.fill_(1)


def _addresses(bases: Sequence[int], offset: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([base + offset for base in bases], dtype=torch.int64, device=device)


def open_for_all(layout: Layout, roll: RollCall, name: str, launch_dir: str) -> PeerMemory | None:
    """The memory of this process' current GPU and its peers; None, for all ranks, where one cannot.

    All ranks call this, and `name` is new with every epoch.
    """
    mine = torch.cuda.current_device()
    others = (rank for rank in range(torch.cuda.device_count()) if rank != mine)
    reaches_all = all(torch.cuda.can_device_access_peer(mine, other) for other in others)
    # Nobody may be alone where all must come.
    if not roll.all_agree("reaches", reaches_all and layout.is_possible):
        logger.info("the GPUs do not reach each other's memory: NCCL does all sums")
        return None
    try:
        memory = open_peer_memory(roll.rank, layout, name, launch_dir)
    except RuntimeError as error:
        logger.warning("no peer memory, NCCL does all sums: %s", error)
        memory = None
    return memory if roll.all_agree("opened", memory is not None) else None


def open_peer_memory(rank: int, layout: Layout, name: str, launch_dir: str) -> PeerMemory:
    """Allocate on this process' current GPU, and map what the peers have; all ranks call this.

    `name` is new with every epoch. RuntimeError where the GPUs cannot reach each other's memory.
    """
    group, device = dist.group.WORLD, torch.device("cuda", torch.cuda.current_device())
    assert group is not None, "joined before"
    mine = _SymmetricMemory.empty_strided_p2p((layout.num_bytes,), (1,), torch.uint8, device)
    mine.zero_()
    torch.cuda.current_stream().synchronize()  # before any peer can write there
    # Under a name of its own, since the library remembers groups by name, also those that are gone.
    c10d._register_process_group(GroupName(name), group)
    try:
        with _temporary_files_in(launch_dir):
            handle = _SymmetricMemory.rendezvous(mine, name)
    finally:
        c10d._unregister_process_group(GroupName(name))
    addresses = list(handle.buffer_ptrs)
    if addresses[rank] != mine.data_ptr():
        raise RuntimeError("symmetric memory does not begin where its tensor does")
    abort = torch.zeros(1, dtype=torch.int32).pin_memory()
    return PeerMemory(rank, layout, mine, addresses, abort, owner=handle)


@contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    """torch binds a socket there, which a rank that is killed leaves behind."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
