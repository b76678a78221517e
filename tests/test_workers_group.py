"""How ranks agree while they form a group, and how a rank that waits on its device is freed."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Lock, Semaphore

import pytest
import torch
from memfd_memory import MemfdMemory
from torch._C._distributed_c10d import HashStore

from nvserve.kernels import all_reduce
from nvserve.kernels.all_reduce import NUM_INBOXES, Addends
from nvserve.protocol.channel import ControlChannel
from nvserve.protocol.child import Child
from nvserve.protocol.codec import encode
from nvserve.protocol.config import Config, ModelFacts
from nvserve.protocol.control import FaultKind, Inject, Role, Setup, StartEpoch
from nvserve.protocol.progress import ProgressPage
from nvserve.workers import crossover, lifeline, peer_memory
from nvserve.workers.crossover import NCCL_ALONE, SumsFail, Times, agree_on_crossover
from nvserve.workers.descriptors import exchange_descriptors
from nvserve.workers.lifeline import hold_lifeline
from nvserve.workers.peer_memory import MAX_ROWS, Crossover, Layout, PeerMemory, open_for_all
from nvserve.workers.roll_call import RollCall

LIMIT_S = 30.0
LAYOUT = Layout(2, 3, 64, torch.float32)


class GaveUp(Exception):
    """What a wait raises."""


def in_concert(size: int, run: Callable[[RollCall], object]) -> list[object]:
    """What run(roll) returns on each of `size` ranks, which are threads."""
    store, results = HashStore(), [object()] * size

    def work(rank: int) -> None:
        roll = RollCall(store, rank, size, lambda: time.sleep(0.001))
        results[rank] = run(roll)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    return results


def test_every_rank_hears_all_answers_in_rank_order() -> None:
    heard = in_concert(3, lambda roll: roll.hear_all("name", f"rank {roll.rank}"))
    assert heard == [["rank 0", "rank 1", "rank 2"]] * 3


def test_one_no_is_a_no_for_all() -> None:
    assert in_concert(3, lambda roll: roll.all_agree("ready", roll.rank != 1)) == [False] * 3
    assert in_concert(3, lambda roll: roll.all_agree("ready", True)) == [True] * 3


def give_up() -> None:
    raise GaveUp


def test_a_rank_that_waits_for_the_missing_can_give_up() -> None:
    roll = RollCall(HashStore(), 0, 2, give_up)
    with pytest.raises(GaveUp):
        roll.hear_all("here", "")


def memory_of(rank: int) -> PeerMemory:
    mine = torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8)
    return PeerMemory(rank, LAYOUT, mine, [0, 0], torch.zeros(1, dtype=torch.int32))


def agree(known: list[Crossover | None]) -> list[object]:
    """The crossover of each rank's memory afterwards."""

    def run(roll: RollCall) -> Crossover:
        memory = memory_of(roll.rank)
        found = agree_on_crossover(memory, roll, abs, lambda _: None, known[roll.rank])
        assert memory.crossover == found
        return found

    return in_concert(2, run)


def test_the_slowest_rank_decides_the_crossover(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[Times] = [
        {1: (4.0, 6.0, 18.0), 32: (7.0, 7.5, 20.0), 128: (30.0, 12.0, 37.0)},
        {1: (5.0, 6.0, 17.0), 32: (8.0, 7.0, 21.0), 128: (20.0, 13.0, 36.0)},
    ]
    measured = iter(times)  # whichever rank comes first
    monkeypatch.setattr(crossover, "compile_sums", lambda _: None)
    monkeypatch.setattr(crossover, "check", lambda *_: None)
    monkeypatch.setattr(crossover, "measure", lambda *_: next(measured))
    assert agree([None, None]) == [Crossover(1, 128)] * 2


def test_a_rank_that_knows_the_crossover_spares_all_from_measuring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it was measured again, this would need a GPU."""
    monkeypatch.setattr(crossover, "compile_sums", lambda _: None)
    monkeypatch.setattr(crossover, "check", lambda *_: None)
    assert agree([None, Crossover(8, 64)]) == [Crossover(8, 64)] * 2
    assert agree([Crossover(1, 2), Crossover(8, 64)]) == [Crossover(1, 2)] * 2


def test_once_sums_have_failed_nobody_tries_again() -> None:
    """Where a newcomer tried, this would need a GPU."""
    assert agree([NCCL_ALONE, None]) == [NCCL_ALONE] * 2


@pytest.mark.parametrize(("size", "width", "rows"), [(2, 8192, MAX_ROWS), (8, 16384, 97)])
def test_rows_without_an_inbox_are_summed_in_two_shots(
    size: int, width: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout(size, 1, width, torch.bfloat16)
    assert layout.inbox_rows == rows
    mine = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    assert layout.inboxes + NUM_INBOXES * rows * (size - 1) * width * 2 == len(mine)
    memory = PeerMemory(0, layout, mine, [0] * size, torch.zeros(1, dtype=torch.int32))
    ways = []

    def note(addends: Addends, num_rows: int, *, is_two_shot: bool) -> torch.Tensor:
        ways.append(is_two_shot)
        return addends.mine

    monkeypatch.setattr(all_reduce, "sum_rows", note)
    for num_rows in (rows, min(rows + 1, MAX_ROWS)):
        place = memory.take(0, num_rows)
        assert place is not None
        memory.sum(place)
    assert ways == [False, rows < MAX_ROWS]


@pytest.mark.parametrize("known", [None, Crossover(8, 64)], ids=["first epoch", "later epoch"])
def test_sums_that_fail_on_any_rank_are_left_to_nccl_by_all(
    known: Crossover | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every epoch: a newcomer maps what nobody has looked at."""

    def check(memory: PeerMemory, *_: object) -> None:
        if memory.rank == 1:
            raise SumsFail("injected")

    monkeypatch.setattr(crossover, "compile_sums", lambda _: None)
    monkeypatch.setattr(crossover, "check", check)
    assert agree([known, None]) == [NCCL_ALONE] * 2
    assert memory_of(0).take(0, 1) is not None
    memory = memory_of(0)
    memory.crossover = NCCL_ALONE
    assert memory.take(0, 1) is None


class Narrow(PeerMemory):
    """Sums of more rows than some are wrong."""

    most_rows = 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone() if len(x) <= self.most_rows else x + 1


@pytest.mark.parametrize(("most_rows", "failing"), [(0, 3), (3, MAX_ROWS), (511, MAX_ROWS)])
def test_sums_are_checked_for_few_rows_and_for_as_many_as_there_may_be(
    most_rows: int, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crossover, "finish", lambda *_: None)
    mine = torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8)
    memory = Narrow(0, LAYOUT, mine, [0, 0], torch.zeros(1, dtype=torch.int32))
    memory.most_rows = most_rows
    with pytest.raises(SumsFail, match=f"those of {failing} rows"):
        crossover.check(memory, torch.clone, lambda _: None)
    memory.most_rows = MAX_ROWS
    crossover.check(memory, torch.clone, lambda _: None)


def test_a_rank_whose_sums_are_wrong_asks_nccl_for_as_many_as_its_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One more on one rank would be summed with another's next one, silently."""
    monkeypatch.setattr(crossover, "compile_sums", lambda _: None)
    monkeypatch.setattr(crossover, "finish", lambda *_: None)
    asked: dict[int, list[int]] = {0: [], 1: []}

    def run(roll: RollCall) -> Crossover:
        mine = torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8)
        memory = Narrow(roll.rank, LAYOUT, mine, [0, 0], torch.zeros(1, dtype=torch.int32))
        memory.most_rows = MAX_ROWS if roll.rank == 0 else 0

        def all_reduce(x: torch.Tensor) -> None:
            asked[roll.rank].append(len(x))

        return agree_on_crossover(memory, roll, all_reduce, lambda _: None, None)

    assert in_concert(2, run) == [NCCL_ALONE] * 2
    assert asked[0] == asked[1]
    assert set(asked[0]) == {3, MAX_ROWS}


class Fragile(MemfdMemory):
    """Memory whose calls fail as told, once; `num_open` counts what has not been closed."""

    failing = ""
    num_open = 0
    lock = Lock()

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        super().__init__(descriptor, num_bytes)
        with self.lock:
            Fragile.num_open += 1

    @classmethod
    def fail(cls, name: str) -> None:
        with cls.lock:
            if cls.failing == name:
                cls.failing = ""
                raise RuntimeError("injected")

    @staticmethod
    def allocate(num_bytes: int, device: int) -> MemfdMemory:
        Fragile.fail("allocate")
        descriptor = os.memfd_create("memory")
        os.truncate(descriptor, num_bytes)
        return Fragile(descriptor, num_bytes)

    @staticmethod
    def of_descriptor(descriptor: int, num_bytes: int, device: int) -> MemfdMemory:
        Fragile.fail("of_descriptor")
        return Fragile(os.dup(descriptor), num_bytes)

    def export(self) -> int:
        Fragile.fail("export")
        return super().export()

    def close(self) -> None:
        super().close()
        with self.lock:
            Fragile.num_open -= 1


@pytest.mark.parametrize("failing", ["", "allocate", "export", "of_descriptor"])
def test_peer_memory_is_for_all_ranks_or_for_none(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(peer_memory, "pinned_word", lambda: torch.zeros(1, dtype=torch.int32))
    monkeypatch.setattr(peer_memory, "num_multiprocessors", lambda _: 3)
    monkeypatch.setattr(peer_memory, "MappedMemory", Fragile)
    monkeypatch.setattr(Fragile, "failing", failing)
    monkeypatch.setattr(Fragile, "num_open", 0)
    layout = Layout(3, 3, 64, torch.float32)
    opened = in_concert(3, lambda roll: open_for_all(layout, roll, tmp_path / "e0.memory"))
    memories = [memory for memory in opened if isinstance(memory, PeerMemory)]
    assert len(memories) == (0 if failing else 3)
    for memory in memories:
        memory.close()
    assert Fragile.num_open == 0
    assert list(tmp_path.iterdir()) == []


def test_a_join_that_is_given_up_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(peer_memory, "MappedMemory", Fragile)
    monkeypatch.setattr(Fragile, "num_open", 0)
    for known in ("offers", "bound"):  # how far the other rank has come before it died
        store = HashStore()
        store.set("offers1", "yes")
        if known == "bound":
            store.set("bound1", "")
        with pytest.raises(GaveUp):
            open_for_all(LAYOUT, RollCall(store, 0, 2, give_up), tmp_path / "e0.memory")
        assert Fragile.num_open == 0
        assert list(tmp_path.iterdir()) == []


def test_descriptors_reach_every_rank_in_rank_order(tmp_path: Path) -> None:
    def run(roll: RollCall) -> list[str]:
        with (tmp_path / f"file{roll.rank}").open("w+") as mine:
            mine.write(f"of rank {roll.rank}")
            mine.flush()
            texts = []
            for descriptor in exchange_descriptors(tmp_path / "e0.", roll, mine.fileno()):
                texts.append(os.pread(descriptor, 100, 0).decode())
                os.close(descriptor)
            return texts

    assert in_concert(3, run) == [["of rank 0", "of rank 1", "of rank 2"]] * 3


def test_an_exchange_with_a_rank_that_dies_in_it_can_be_given_up(tmp_path: Path) -> None:
    store = HashStore()
    store.set("bound1", "")  # it was there, and sends nothing
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as gone:
        gone.bind(str(tmp_path / "e0.1"))
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(GaveUp):
            exchange_descriptors(tmp_path / "e0.", RollCall(store, 0, 2, give_up), 0)
        assert len(os.listdir("/proc/self/fd")) == before
    assert not (tmp_path / "e0.0").exists()


def test_rows_that_kernels_cannot_read_are_left_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    odd = Layout(2, 3, 63, torch.float32)
    assert in_concert(2, lambda roll: open_for_all(odd, roll, Path("e0."))) == [None, None]


# -- the lifeline ----------------------------------------------------------------------------------


class Ends:
    """A child whose launcher is the test, and how often its lifeline called abort()."""

    def __init__(self, folder: Path, looked: Event | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        facts = ModelFacts("LlamaForCausalLM", 97, 2, 4, 4096)
        setup = Setup(Config("m", facts, ["m"]), Role.WORKER, 0, str(folder))
        self.launcher = ControlChannel(ours)
        self.child = Child(setup, ControlChannel(theirs), ProgressPage(str(folder / "page")))
        self.child.looked = looked or self.child.looked
        self.was_aborted = Event()
        self.thread = hold_lifeline(self.child, self.was_aborted.set)

    def close(self) -> None:
        self.launcher.socket.close()
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive(), "a lifeline ends with the launcher"
        self.child.control.socket.close()


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(lifeline, "GRACE_S", 0.05)
    ends = Ends(tmp_path)
    yield ends
    ends.close()


def test_a_message_that_nobody_reads_aborts_the_group(ends: Ends) -> None:
    assert ends.launcher.send(encode(StartEpoch(1, 2, 0)))
    assert ends.was_aborted.wait(LIMIT_S)
    assert ends.child.receive() == StartEpoch(1, 2, 0)  # it was left for the main loop


def test_a_message_that_does_not_end_the_epoch_is_let_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifeline, "GRACE_S", 0.01)
    ends = Ends(tmp_path, looked=(blind := Blind()))
    assert ends.launcher.send(encode(Inject(FaultKind.SLOW)))
    for _ in range(3):
        assert blind.times.acquire(timeout=LIMIT_S)
    ends.close()
    assert not ends.was_aborted.is_set()


class Blind(Event):
    """Of a main loop that does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.times = Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self.times.release()
        return super().wait(timeout)


class Looking(Event):
    """Of a main loop that looks just after it was last asked."""

    def __init__(self) -> None:
        super().__init__()
        self.times = Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout == lifeline.GRACE_S
        self.times.release()
        return True


def test_a_main_loop_that_looks_is_left_alone(tmp_path: Path) -> None:
    """Even where a message is unread at each of these moments: it is the next one."""
    ends = Ends(tmp_path, looked=(looking := Looking()))
    assert ends.launcher.send(encode(StartEpoch(1, 2, 0)))
    for _ in range(50):
        assert looking.times.acquire(timeout=LIMIT_S)
    ends.close()
    assert not ends.was_aborted.is_set()
