"""The core process over real sockets; this test plays launcher, frontend and workers."""

import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import zmq

from nvserve.core.grammar import GIVE_UP_S
from nvserve.protocol import channel
from nvserve.protocol.channel import ControlChannel, Inbox, Outbox
from nvserve.protocol.codec import decode_from_child, decode_to_frontend, decode_to_worker, encode
from nvserve.protocol.config import Config, ModelFacts
from nvserve.protocol.control import (
    EpochBroken,
    EpochReady,
    Exit,
    FaultKind,
    FromChild,
    Held,
    Hold,
    Inject,
    Peers,
    Ready,
    Role,
    Searching,
    Setup,
    StartEpoch,
)
from nvserve.protocol.faults import SEND
from nvserve.protocol.messages import (
    Abort,
    Accepted,
    CoreStats,
    Emits,
    FinishReason,
    Hello,
    Message,
    ModelOutput,
    SchedulerOutput,
    StepDone,
    StepFailed,
    Strikes,
    Submit,
    pack_ids,
    unpack_ids,
)
from nvserve.protocol.progress import Phase, page_path, read_page
from nvserve.protocol.sampling import SamplingParams

LIMIT_S = 60.0  # for whatever surely comes, the start of an interpreter included
CORE_LIFE = 4
SOURCE = Path(__file__).parent.parent / ".src"
T = TypeVar("T")


def wait_for(poll: Callable[[], T | None]) -> T:
    """The first result of `poll` that is not None."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        result = poll()
        if result is not None:
            return result
    raise TimeoutError(f"nothing within {LIMIT_S} s")


class Rig:
    """A core process and everybody it talks to."""

    def __init__(self, launch_dir: Path, *, enable_faults: bool = False) -> None:
        self.launch_dir = str(launch_dir)
        self.model = f"{launch_dir}/m"
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.control, theirs = ControlChannel.pair()
        os.set_inheritable(theirs.fileno(), True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nvserve.core.main", str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONSAFEPATH": "1"},
        )
        theirs.close()
        self.epoch = -1
        self.sockets: list[Outbox | Inbox] = []
        facts = ModelFacts("X", vocab_size=100, num_layers=1, num_kv_heads=1, context_len=64)
        config = Config(
            model=self.model,
            facts=facts,
            served_model_names=["m"],
            max_model_len=64,
            block_size=4,
            enable_faults=enable_faults,
        )
        self.searches: list[int] = []
        self.tell(Setup(config, Role.CORE, CORE_LIFE, self.launch_dir))
        self.expect_control(Ready)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for link in self.sockets:
            link.close()
        self.context.term()
        self.control.close()

    def block_compiler(self) -> None:
        """No grammar is ever compiled: the compiler waits for somebody to write the tokenizer."""
        os.mkdir(self.model)
        os.mkfifo(f"{self.model}/tokenizer.json")

    def compile_for_ever(self, request_id: int) -> None:
        """Submit a request whose grammar is being compiled, without end, once this returns."""
        self.block_compiler()
        self.submit(request_id, max_tokens=1, grammar="json:")

        def poll() -> bool | None:
            return True if self.expect_reply(CoreStats).unanswered_ids == [request_id] else None

        wait_for(poll)

    # -- launcher

    def tell(self, message: Message) -> None:
        assert self.control.send(encode(message))

    def expect_control(self, kind: type[T]) -> T:
        def poll() -> FromChild | None:
            frame = self.control.receive()
            message = None if frame is None else decode_from_child(frame)
            if isinstance(message, Searching):
                self.searches.append(message.num_suspects)
                return None
            return message

        message = wait_for(poll)
        assert isinstance(message, kind), message
        return message

    # -- frontend

    def meet(self, life: int) -> None:
        lives = (self.launch_dir, life, CORE_LIFE)
        self.life = life
        self.from_core = Inbox(self.context, channel.core_to_frontend(*lives))
        self.to_core = Outbox(self.context, channel.frontend_to_core(*lives))
        self.sockets += [self.from_core, self.to_core]
        self.to_core.send(encode(Hello(life)))
        self.tell(Peers(life, CORE_LIFE))
        assert self.expect_reply(Hello).life == CORE_LIFE

    def submit(
        self,
        request_id: int,
        *,
        max_tokens: int,
        core_life: int = CORE_LIFE,
        grammar: str = "",
        timeout_s: float = 0.0,
    ) -> None:
        now = time.time()
        submit = Submit(
            self.life,
            core_life,
            request_id,
            pack_ids([1, 2, 3]),
            b"",
            SamplingParams(max_tokens=max_tokens, grammar=grammar),
            seed=0,
            arrival=now,
            deadline=now + timeout_s if timeout_s else 0.0,
        )
        self.to_core.send(encode(submit))

    def expect_reply(self, kind: type[T]) -> T:
        """The next reply of this kind; CoreStats may come between."""

        def poll() -> T | None:
            frame = self.from_core.receive(timeout_ms=50)
            if frame is None:
                return None
            message = decode_to_frontend(frame)
            if isinstance(message, kind):
                return message
            assert isinstance(message, CoreStats), message
            return None

        return wait_for(poll)

    # -- workers

    def start_epoch(self, tp_size: int, *, is_blamed: bool = False) -> None:
        self.epoch += 1
        self.step_inboxes = [
            Inbox(self.context, channel.core_to_worker(self.launch_dir, self.epoch, rank))
            for rank in range(tp_size)
        ]
        address = channel.worker_to_core(self.launch_dir, self.epoch)
        self.reports = [Outbox(self.context, address) for _ in range(tp_size)]
        self.sockets += [*self.step_inboxes, *self.reports]
        self.tell(StartEpoch(self.epoch, tp_size, num_kv_blocks=40, is_blamed=is_blamed))
        for rank, outbox in enumerate(self.reports):
            outbox.send(encode(Hello(self.epoch, rank)))
        for inbox in self.step_inboxes:
            assert self.expect_step_message(inbox) == Hello(CORE_LIFE)
        assert self.expect_control(EpochReady).epoch == self.epoch

    def expect_step_message(self, inbox: Inbox) -> Hello | SchedulerOutput:
        return decode_to_worker(wait_for(lambda: inbox.receive(timeout_ms=50)))

    def run_step(self, tokens: list[int]) -> SchedulerOutput:
        """All ranks take the next step and answer with these ids."""
        steps = [self.expect_step_message(inbox) for inbox in self.step_inboxes]
        step = steps[0]
        assert isinstance(step, SchedulerOutput)
        assert all(other == step for other in steps)
        self.answer(step, tokens)
        return step

    def answer(self, step: SchedulerOutput, tokens: list[int]) -> None:
        column = pack_ids(tokens)
        checksum = zlib.crc32(column)
        self.reports[0].send(encode(ModelOutput(self.epoch, step.step, column, checksum=checksum)))
        for rank, outbox in enumerate(self.reports[1:], start=1):
            outbox.send(encode(StepDone(self.epoch, step.step, rank, checksum)))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    try:
        yield rig
    finally:
        rig.close()


def test_a_request_travels_through_core_and_back(rig: Rig) -> None:
    rig.meet(life=1)
    rig.start_epoch(tp_size=2)
    rig.submit(7, max_tokens=3)
    assert rig.expect_reply(Accepted).request_ids == [7]
    emitted: list[int] = []
    for token in (11, 12, 13):
        rig.run_step([token])
        emits = rig.expect_reply(Emits)
        assert (emits.core_life, emits.frontend_life) == (CORE_LIFE, 1)
        assert emits.firsts == [len(emitted)]
        emitted += unpack_ids(emits.tokens)
    assert emitted == [11, 12, 13]
    assert emits.finishes == [FinishReason.LENGTH]
    page = read_page(page_path(rig.launch_dir, Role.CORE.value, CORE_LIFE))
    assert page is not None
    assert page.epoch == 0
    assert page.step == 2
    rig.tell(Exit())
    assert rig.process.wait(LIMIT_S) == 0


def test_a_core_that_follows_another_loads_grammars_when_it_serves_and_is_idle(rig: Rig) -> None:
    maps = Path(f"/proc/{rig.process.pid}/maps")
    rig.meet(life=1)
    assert "llguidance" not in maps.read_text(), "it is loaded before core serves"
    rig.start_epoch(tp_size=1)
    wait_for(lambda: True if "llguidance" in maps.read_text() else None)


def test_garbage_and_other_lives_are_counted_and_change_nothing(rig: Rig) -> None:
    rig.meet(life=1)
    rig.start_epoch(tp_size=1)
    rig.to_core.send(b"\xc1 no message")
    rig.to_core.send(encode(StepFailed(0, 0, 0, "the wrong direction")))
    rig.submit(8, max_tokens=3, core_life=CORE_LIFE - 1)
    rig.reports[0].send(b"")
    rig.reports[0].send(encode(StepDone(5, 0, 0, 0)))

    def poll() -> CoreStats | None:
        stats = rig.expect_reply(CoreStats)
        return stats if stats.dropped_total >= 5 else None

    stats = wait_for(poll)
    assert (stats.dropped_total, stats.accepted_total) == (5, 0)
    rig.submit(9, max_tokens=1)
    assert rig.expect_reply(Accepted).request_ids == [9]


def test_a_reason_of_any_length_fits_the_control_channel(rig: Rig) -> None:
    rig.meet(life=1)
    rig.start_epoch(tp_size=1)
    rig.submit(7, max_tokens=2)
    rig.expect_reply(Accepted)
    rig.reports[0].send(encode(StepFailed(0, 0, 0, "NaN " * 100_000)))
    assert rig.expect_control(EpochBroken).reason == "NaN " * 500


def test_a_failed_step_is_told_to_the_launcher_and_survived(rig: Rig) -> None:
    rig.meet(life=1)
    rig.start_epoch(tp_size=1)
    rig.submit(7, max_tokens=2)
    rig.expect_reply(Accepted)
    rig.run_step([11])
    assert unpack_ids(rig.expect_reply(Emits).tokens) == [11]
    rig.reports[0].send(encode(StepFailed(0, 1, 0, "NaN")))
    broken = rig.expect_control(EpochBroken)
    assert (broken.epoch, broken.step, broken.reason, broken.suspects) == (0, 1, "NaN", [7])
    strikes = rig.expect_reply(Strikes)
    assert (strikes.request_ids, strikes.counts) == ([7], [1])
    rig.start_epoch(tp_size=1)
    assert rig.searches == [1]
    step = rig.run_step([12])
    assert step.chunks is not None
    assert unpack_ids(step.chunks.tokens) == [1, 2, 3, 11]
    emits = rig.expect_reply(Emits)
    assert (emits.firsts, unpack_ids(emits.tokens)) == ([1], [12])


def test_a_held_core_plans_nothing_until_the_next_epoch(rig: Rig) -> None:
    rig.meet(life=1)
    rig.start_epoch(tp_size=1)
    rig.submit(7, max_tokens=9)
    rig.run_step([11])
    in_flight = [rig.expect_step_message(rig.step_inboxes[0]) for _ in range(2)]
    rig.tell(Hold())
    for step in in_flight:
        assert isinstance(step, SchedulerOutput)
        rig.answer(step, [12])
    rig.expect_control(Held)
    rig.start_epoch(tp_size=1)
    assert rig.run_step([14]).step == 0


def test_requests_of_an_epoch_that_the_launcher_blames_are_suspects(rig: Rig) -> None:
    rig.meet(life=1)
    rig.start_epoch(tp_size=1)
    rig.submit(7, max_tokens=3)
    rig.run_step([11])
    rig.reports[0].send(encode(StepFailed(0, 1, 0, "gone", is_peer_lost=True)))
    broken = rig.expect_control(EpochBroken)
    assert broken.rank == -1
    assert rig.searches == []
    rig.start_epoch(tp_size=1, is_blamed=True)
    if not rig.searches:
        assert decode_from_child(wait_for(rig.control.receive)) == Searching(1)


def test_submits_that_cannot_be_answered_yet_are_named_in_the_statistics(rig: Rig) -> None:
    """Else the frontend takes them for lost: one waits for an epoch, one for its grammar."""
    rig.block_compiler()
    rig.meet(life=1)
    rig.submit(7, max_tokens=1)
    rig.submit(8, max_tokens=1, grammar="json:")

    def poll() -> CoreStats | None:
        stats = rig.expect_reply(CoreStats)
        return stats if stats.unanswered_ids == [8, 7] else None

    assert wait_for(poll).request_ids == []
    rig.start_epoch(tp_size=1)
    assert rig.expect_reply(Accepted).request_ids == [7]
    stats = rig.expect_reply(CoreStats)
    assert (stats.request_ids, stats.unanswered_ids) == ([7], [8])


def test_a_deadline_passes_while_the_grammar_is_compiled(rig: Rig) -> None:
    """Without end, here. Two have their threads, and the third waits for one."""
    rig.block_compiler()
    rig.meet(life=1)
    rig.start_epoch(tp_size=1)
    late: set[int] = set()
    for request_id in (7, 8, 9):
        rig.submit(request_id, max_tokens=1, grammar="json:", timeout_s=0.1)
    while late != {7, 8, 9}:
        accepted = rig.expect_reply(Accepted).request_ids
        emits = rig.expect_reply(Emits)
        assert emits.request_ids == accepted
        assert set(emits.finishes) == {FinishReason.DEADLINE}
        assert late.isdisjoint(accepted)
        late.update(accepted)
    stats = wait_for(lambda: s if not (s := rig.expect_reply(CoreStats)).unanswered_ids else None)
    assert stats.finished_totals[FinishReason.DEADLINE] == 3


def test_an_id_that_comes_again_while_its_grammar_is_compiled_is_dropped(rig: Rig) -> None:
    rig.block_compiler()
    rig.meet(life=1)
    rig.start_epoch(tp_size=1)
    rig.submit(7, max_tokens=1, grammar="json:", timeout_s=0.5)
    rig.submit(7, max_tokens=1)
    assert rig.expect_reply(Accepted).request_ids == [7]
    emits = rig.expect_reply(Emits)
    assert (emits.request_ids, emits.finishes) == ([7], [FinishReason.DEADLINE])


def test_a_new_frontend_starts_with_nothing_and_the_old_requests_are_gone(rig: Rig) -> None:
    rig.meet(life=1)
    rig.start_epoch(tp_size=1)
    rig.submit(7, max_tokens=50)
    rig.expect_reply(Accepted)
    rig.meet(life=2)
    rig.submit(8, max_tokens=1)
    assert rig.expect_reply(Accepted).request_ids == [8]
    stats = rig.expect_reply(CoreStats)
    assert stats.finished_totals[FinishReason.ABORT] == 1
    assert stats.num_running + stats.num_waiting == 1


def test_orders_for_an_older_life_or_epoch_are_ignored(rig: Rig) -> None:
    rig.meet(life=2)
    rig.start_epoch(tp_size=1)
    rig.submit(7, max_tokens=5)
    rig.expect_reply(Accepted)
    rig.tell(Peers(1, CORE_LIFE))
    rig.tell(Peers(3, CORE_LIFE + 1))
    rig.tell(StartEpoch(0, 1, num_kv_blocks=40))
    rig.run_step([11])
    assert unpack_ids(rig.expect_reply(Emits).tokens) == [11]
    rig.run_step([12])
    assert unpack_ids(rig.expect_reply(Emits).tokens) == [12]


def test_an_abort_is_answered_while_the_workers_are_silent(rig: Rig) -> None:
    rig.meet(life=1)
    rig.start_epoch(tp_size=1)
    rig.submit(7, max_tokens=50)
    rig.expect_reply(Accepted)
    rig.to_core.send(encode(Abort(1, CORE_LIFE, [7])))
    emits = rig.expect_reply(Emits)
    assert (emits.request_ids, emits.finishes) == ([7], [FinishReason.ABORT])


def test_an_idle_core_beats_its_page_and_says_that_it_waits(rig: Rig) -> None:
    path = page_path(rig.launch_dir, Role.CORE.value, CORE_LIFE)

    def poll() -> bool | None:
        page = read_page(path)
        is_fresh = page is not None and time.monotonic() - page.time_s < 0.5
        return True if is_fresh and page is not None and page.phase is Phase.WAITING else None

    first = read_page(path)
    assert first is not None
    wait_for(poll)
    wait_for(lambda: True if (page := read_page(path)) and page.time_s > first.time_s else None)


def test_core_leaves_while_a_grammar_is_compiled(rig: Rig) -> None:
    rig.meet(life=1)
    rig.compile_for_ever(7)
    rig.tell(Exit())
    assert rig.process.wait(GIVE_UP_S / 2) == 0


def test_a_fault_of_core_ends_it_while_a_grammar_is_compiled(tmp_path: Path) -> None:
    """Else it would have to be found to hang, which takes seconds."""
    rig = Rig(tmp_path, enable_faults=True)
    try:
        rig.meet(life=1)
        rig.compile_for_ever(7)
        rig.tell(Inject(FaultKind.EXCEPTION, phase=SEND))
        assert rig.process.wait(GIVE_UP_S / 2) == 1
    finally:
        rig.close()


def test_core_leaves_with_its_launcher(rig: Rig) -> None:
    rig.control.socket.close()
    assert rig.process.wait(LIMIT_S) != 0
