"""The core process over real sockets; this test plays launcher, frontend and workers."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from core_rig import CORE_LIFE, LIMIT_S, Rig, wait_for

from nvserve.core.links import MAX_BYTES
from nvserve.protocol.codec import decode_from_child, encode
from nvserve.protocol.control import (
    EpochBroken,
    Exit,
    Held,
    Hold,
    Peers,
    Role,
    Searching,
    StartEpoch,
)
from nvserve.protocol.messages import (
    Abort,
    Accepted,
    CoreStats,
    Emits,
    FinishReason,
    Refused,
    SchedulerOutput,
    StepDone,
    StepFailed,
    Strikes,
    unpack_ids,
)
from nvserve.protocol.progress import Phase, page_path, read_page


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


def test_large_submits_are_taken_in_several_turns(rig: Rig) -> None:
    """Between which core beats, and everybody else gets steps."""
    rig.meet(life=1)
    rig.start_epoch(tp_size=1)
    num_bytes = MAX_BYTES // 4
    for request_id in range(20):
        words = [[5] * 1024] * (num_bytes // 1024)
        rig.submit(request_id, max_tokens=1, bad_words=words)
    accepted: list[int] = []
    while len(accepted) < 20:
        at_once = rig.expect_reply(Accepted).request_ids
        assert len(at_once) <= 4
        accepted += at_once
    assert accepted == list(range(20))


def test_ids_are_told_only_when_no_submit_is_unread(rig: Rig) -> None:
    """Else the frontend takes what it sent and core does not list for lost."""
    rig.meet(life=1)
    rig.start_epoch(tp_size=1)
    long = [2] * (MAX_BYTES // 4)  # refused, and so large that its turn ends with it

    def poll() -> bool | None:
        rig.submit(7, max_tokens=1, prompt=long)
        is_seen = False
        while not isinstance(reply := rig.next_reply(), Refused):
            assert isinstance(reply, CoreStats), reply
            is_seen |= reply.request_ids is None
        return is_seen or None

    wait_for(poll)
    rig.submit(8, max_tokens=1)
    rig.expect_reply(Accepted)
    wait_for(lambda: True if rig.expect_reply(CoreStats).request_ids == [8] else None)


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


def test_core_leaves_with_its_launcher(rig: Rig) -> None:
    rig.control.socket.close()
    assert rig.process.wait(LIMIT_S) != 0
