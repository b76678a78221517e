"""The tensor-parallel group and its epochs, and the few exchanges that ranks need.

Every result is bit for bit the same on all ranks: choices break ties towards the lowest id, and
sums add in rank order, but for those that NCCL does, in an order of its own that all ranks share. A
group of one exchanges nothing. Knows tensors; never models.

R rows of the step, N hidden size, V vocabulary columns of one rank.
"""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Lock, Thread
from typing import Final

import torch
import torch.distributed as dist

from nvserve.kernels.norm import add_rms_norm
from nvserve.protocol.progress import ProgressPage
from nvserve.workers.crossover import agree_on_crossover
from nvserve.workers.peer_memory import Crossover, Layout, PeerMemory, open_for_all
from nvserve.workers.roll_call import RollCall
from nvserve.workers.step_result import PeerLost, Wait

logger = logging.getLogger(__name__)

DEFAULT_LIMIT_S: Final = 20.0  # of a collective, and of connecting once all have shown up
ABORT_LIMIT_S: Final = 10.0  # of NCCL's abort, which took 0.9 s with a dead peer
SETTLE_S: Final = 0.05  # for a caller that has just entered a collective to be back
POLL_S: Final = 0.01  # between two looks at what is awaited

_ENVIRONMENT: Final = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # a watchdog must not end the process: we do that
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}

# What gloo's errors say once a rank is out of reach: where they are from, or that an earlier call
# was given up. They have no type of their own.
_GLOO_LOSSES: Final = ("/gloo/transport/", "caused pair closure")
# NCCL's are all DistBackendErrors, also where it finds no room on our GPU for another connection;
# the last line of one may be left over from something else.
_NCCL_OWN: Final = "out of memory"
_NCCL_LOSSES: Final = ("ncclRemoteError", "remote process exited")

# torch 2.13 renamed it, and warns at the old name.
_gather_into: Final = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)


def _tells_of_loss(error: Exception) -> bool:
    """Did a collective fail for want of a peer, or of the group?"""
    if isinstance(error, ValueError):
        return not dist.is_initialized()
    if isinstance(error, dist.DistError):
        text = str(error)
        return _NCCL_OWN not in text or any(loss in text for loss in _NCCL_LOSSES)
    return any(loss in str(error) for loss in _GLOO_LOSSES)


def _abort_nccl() -> None:
    time.sleep(SETTLE_S)
    try:
        dist.distributed_c10d._abort_process_group()
    except Exception:
        logger.exception("NCCL's abort failed")  # leave() sees that the group is still there


class TensorParallel:
    """This rank's place among the ranks; the group behind it is replaced with every epoch."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        page: ProgressPage | None = None,
        limit_s: float = DEFAULT_LIMIT_S,
        *,
        wants_gloo: bool = False,
        layout: Layout | None = None,
    ) -> None:
        """`limit_s` shall exceed the launcher's hang limit: fencing a peer frees the others.

        `wants_gloo`: also on a GPU, where exchanges then go through host memory. With a `layout`,
        few rows are summed through peer memory where the GPUs reach each other's.
        """
        self.rank: Final = rank
        self.size: Final = size
        self._page = page
        self._limit: Final = timedelta(seconds=limit_s)
        self._wants_gloo: Final = wants_gloo
        self._layout: Final = layout
        self._is_nccl = False
        self._crossover: Crossover | None = None  # found in the first epoch
        self.peers: PeerMemory | None = None  # of this epoch, where the GPUs reach each other's
        self._is_aborted = False
        self._aborting: Thread | None = None
        self._abort_lock: Final = Lock()

    # -- epochs --------------------------------------------------------------------------------

    def join(self, launch_dir: str, epoch: int, device: torch.device, wait: Wait) -> None:
        """Form the group of this epoch with all ranks; every rank calls this.

        The device has nothing left to do for the epoch before. While ranks are missing,
        `wait(seconds)` is called again and again: it returns in time, or raises to give up.
        PeerLost when a rank that had shown up is gone before it has connected. (One that goes while
        NCCL connects may hold us until we are fenced.)
        """
        self.leave()
        self.release()
        self._is_aborted = False  # an abort that came late was meant for the epoch before
        if self.size == 1:
            return
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._is_nccl = device.type == "cuda" and not self._wants_gloo
        path = str(Path(launch_dir) / f"e{epoch}.group")
        store = dist.FileStore(path, self.size)  # type: ignore[attr-defined]  # exported unseen
        roll = RollCall(store, self.rank, self.size, lambda: wait(POLL_S))
        roll.hear_all("here", "")
        store.set_timeout(self._limit)
        # Ranks meet under the group's number, and one that did not form has used a number up here,
        # but not at the newcomer's.
        dist.distributed_c10d._world.group_count = 0
        hook = sys.excepthook
        try:
            dist.init_process_group(
                "nccl" if self._is_nccl else "gloo",
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=self._limit,
                device_id=device if self._is_nccl else None,
            )
        except RuntimeError as error:
            raise PeerLost(f"epoch {epoch}: the group did not form: {error}") from error
        finally:
            sys.excepthook = hook  # torch puts the rank before each line, once more for each group
        if self._is_nccl and self._layout is not None:
            self.peers = open_for_all(self._layout, roll, Path(launch_dir) / f"e{epoch}.memory")
        if self.peers is not None:
            self._crossover = agree_on_crossover(
                self.peers, roll, self._sum_through_nccl, wait, known=self._crossover
            )

    @property
    def can_be_captured(self) -> bool:
        """A CUDA graph may hold this group's collectives."""
        return self.size == 1 or self._is_nccl

    def abort(self) -> None:
        """Free our own device, whose kernels may wait for a dead peer, and return at once.

        The epoch is over for this rank. Any thread may call this, and more than once. With gloo
        nothing on the device waits for peers.
        """
        with self._abort_lock:
            self._is_aborted = True
            if self.peers is not None:
                self.peers.abort()
            if self._is_nccl and self._aborting is None and dist.is_initialized():
                self._aborting = Thread(target=_abort_nccl, daemon=True)
                self._aborting.start()

    @property
    def is_aborted(self) -> bool:
        """What fails from now until the group is left fails because of the abort."""
        return self._is_aborted

    def leave(self) -> None:
        """Drop the group, if any.

        With gloo this frees the peers that wait in a collective; NCCL first wants `abort`, and that
        no graph holds a collective of its any more. PeerLost when the group cannot be left.
        """
        self.abort()
        if self._aborting is not None:
            self._await_abort(self._aborting)
            self._aborting = None
        elif dist.is_initialized():
            dist.destroy_process_group()
        self._is_aborted = False

    def _await_abort(self, aborting: Thread) -> None:
        deadline = time.monotonic() + ABORT_LIMIT_S
        while aborting.is_alive():
            if time.monotonic() > deadline:
                raise PeerLost(f"rank {self.rank}: NCCL did not abort in {ABORT_LIMIT_S:g} s")
            if self._page is not None:
                self._page.beat()
            aborting.join(POLL_S)
        if dist.is_initialized():
            raise PeerLost(f"rank {self.rank}: NCCL did not abort")

    def release(self) -> None:
        """Give back the memory that peers shared, once the device is done with the epoch."""
        with self._abort_lock:
            peers, self.peers = self.peers, None
        if peers is not None:
            peers.close()

    # -- exchanges -----------------------------------------------------------------------------

    def place(self, number: int, num_rows: int) -> torch.Tensor | None:
        """[num_rows, N] where all_reduce is the fastest; None where it makes no difference.

        What is written there is summed before anything is written to another place, and sums that
        follow each other use places of different numbers.
        """
        return None if self.peers is None else self.peers.take(number, num_rows)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x in x's dtype; may reuse x."""
        if self._page is not None:
            self._page.beat()  # a long step on a CPU comes by here twice a layer
        if self.size == 1:
            return x
        if self.peers is not None and self.peers.holds(x):
            with self._collective():
                return self.peers.sum(x)
        if self._is_nccl:
            self._sum_through_nccl(x)
            return x
        parts = self.all_gather(x)
        total = parts[0].float()
        for other in parts[1:]:  # gloo's own sum has no fixed order
            total = total + other.float()
        return total.to(x.dtype)

    def _sum_through_nccl(self, x: torch.Tensor) -> None:
        with self._collective():
            dist.all_reduce(x)

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """kernels.norm.add_rms_norm of all_reduce(x), in one kernel where x is of a `place`."""
        if self.peers is not None and self.peers.holds(x):
            with self._collective():
                return self.peers.sum_add_rms_norm(x, residual, weight, eps)
        return add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x in rank order, [size, *x.shape]; the shapes must agree."""
        if self.size == 1:
            return x[None]
        mine = x.contiguous() if self._is_nccl else x.contiguous().cpu()
        parts = torch.empty((self.size, *mine.shape), dtype=mine.dtype, device=mine.device)
        if mine.numel():
            with self._collective():
                # As bytes: gloo does not know every dtype.
                _gather_into(parts.view(-1).view(torch.uint8), mine.view(-1).view(torch.uint8))
        return parts.to(x.device)

    def best(self, values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Over all ranks, each row's largest value, float32 [R], and its id, int64 [R].

        Equal values go to the lowest rank, which holds the lower ids. A NaN anywhere wins its row.
        """
        if self.size == 1:
            return values, ids
        pairs = torch.stack((values.float().view(torch.int32), ids.to(torch.int32)))
        everyone = self.all_gather(pairs)  # [size, 2, R] int32
        all_values = everyone[:, 0].contiguous().view(torch.float32)
        best = all_values.amax(dim=0)
        winner = (all_values == best).to(torch.uint8).argmax(dim=0)
        return best, everyone[:, 1].gather(0, winner[None])[0].long()

    def gather_logits(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """[R, V] of each rank -> float32 [R, vocab_size], padding cut off; a tensor of its own."""
        if self.size == 1:
            wide = logits[:, :vocab_size].float()
            return wide.clone() if wide.data_ptr() == logits.data_ptr() else wide
        parts = self.all_gather(logits)
        return parts.transpose(0, 1).flatten(1)[:, :vocab_size].float()

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Show on the progress page who is inside; PeerLost where the failure is no fault of ours.

        Nobody enters once there was an abort: NCCL would keep the caller until the abort is over,
        which waits for graphs that only the caller can drop.
        """
        if self._is_aborted:
            raise PeerLost(f"rank {self.rank}: the group was aborted")
        if self._page is not None:
            self._page.collectives_entered += 1
            self._page.beat()
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if not (self._is_aborted or _tells_of_loss(error)):
                raise  # no memory, a kernel that cannot run: peers would fail of it in vain
            raise PeerLost(f"rank {self.rank} lost a peer: {error}") from error
        if self._page is not None:
            self._page.collectives_left += 1
