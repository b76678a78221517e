"""The journal: exactly-once output, gaps seen, and everything needed for a replay kept."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvserve.frontend.journal import CORE_GRACE_S, Entry, Gap, Journal, Standing
from nvserve.protocol.messages import FinishReason, pack_ids, unpack_ids
from nvserve.protocol.sampling import SamplingParams

NONE, LENGTH = FinishReason.NONE, FinishReason.LENGTH


def make_entry(request_id: int = 1, **changes: object) -> Entry:
    fields: dict[str, object] = {
        "request_id": request_id,
        "prompt": pack_ids([7, 8]),
        "sampling": SamplingParams(max_tokens=5),
        "seed": 11,
        "arrival": 100.0,
        "deadline": 0.0,
    }
    return Entry(**(fields | changes))  # type: ignore[arg-type]  # fields by name


def accepted(*request_ids: int) -> Journal:
    journal = Journal()
    for request_id in request_ids:
        entry = make_entry(request_id)
        journal.add(entry)
        entry.standing = Standing.SENT
        assert journal.accept(request_id) is entry
    return journal


def test_ids_are_appended_once_whatever_is_repeated() -> None:
    journal = accepted(1)
    assert journal.append(1, 0, [5, 6], NONE) == [5, 6]
    assert journal.append(1, 0, [5, 6], NONE) is None
    assert journal.append(1, 1, [6, 7], NONE) == [7]
    entry = journal.get(1)
    assert entry is not None
    assert entry.emitted.tolist() == [5, 6, 7]


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), max_size=20))
def test_any_order_of_emits_yields_a_prefix_of_the_true_output_or_a_gap(
    emits: list[tuple[int, int]],
) -> None:
    truth = list(range(100, 120))
    journal = accepted(1)
    received: list[int] = []
    for first, count in emits:
        try:
            received += journal.append(1, first, truth[first : first + count], NONE) or []
        except Gap:
            assert first > len(received)
        assert received == truth[: len(received)]


def test_a_missing_emit_is_a_gap_and_changes_nothing() -> None:
    journal = accepted(1)
    journal.append(1, 0, [5], NONE)
    with pytest.raises(Gap, match="emit at 2, journal ends at 1"):
        journal.append(1, 2, [9], LENGTH)
    entry = journal.get(1)
    assert entry is not None
    assert entry.emitted.tolist() == [5]


def test_a_final_emit_ends_the_entry_and_what_follows_is_dropped() -> None:
    journal = accepted(1, 2)
    assert journal.append(1, 0, [5], LENGTH) == [5]
    assert journal.append(1, 1, [6], NONE) is None
    assert len(journal) == 1


def test_a_final_emit_with_nothing_new_still_ends_the_entry() -> None:
    journal = accepted(1)
    journal.append(1, 0, [5], NONE)
    assert journal.append(1, 0, [5], LENGTH) == []
    assert len(journal) == 0


def test_a_replay_carries_what_was_emitted_and_its_first_arrival() -> None:
    journal = accepted(1)
    journal.append(1, 0, [5, 6], NONE)
    (entry,) = journal.requeue_all()
    submit = entry.submit(frontend_life=3, core_life=4)
    assert (unpack_ids(submit.prompt), unpack_ids(submit.emitted)) == ([7, 8], [5, 6])
    assert (submit.frontend_life, submit.core_life, submit.seed) == (3, 4, 11)
    assert submit.is_replay
    assert submit.arrival == 100.0


def test_a_request_no_core_has_accepted_is_not_a_replay() -> None:
    journal = Journal()
    journal.add(make_entry())
    (entry,) = journal.requeue_all()
    assert not entry.submit(0, 1).is_replay
    assert journal.num_unanswered == 1


def test_emits_before_the_new_life_accepts_are_dropped() -> None:
    journal = accepted(1)
    journal.append(1, 0, [5], NONE)
    (entry,) = journal.requeue_all()
    entry.standing = Standing.SENT
    assert journal.append(1, 1, [6], NONE) is None
    journal.accept(1)
    assert journal.append(1, 1, [6], NONE) == [6]


def test_an_answer_nobody_waits_for_is_ignored() -> None:
    journal = accepted(1)
    assert journal.accept(1) is None
    assert journal.accept(99) is None


def test_a_reissued_entry_keeps_its_output_under_another_id() -> None:
    journal = accepted(1)
    journal.append(1, 0, [5], NONE)
    entry = journal.reissue(1, 2)
    assert entry is not None
    assert (entry.request_id, entry.emitted) == (2, array("i", [5]))
    assert journal.append(1, 1, [6], NONE) is None
    assert journal.reissue(1, 3) is None


def test_unanswered_requests_are_counted_through_every_end() -> None:
    journal = Journal()
    for request_id in (1, 2, 3):
        journal.add(make_entry(request_id))
    assert journal.num_unanswered == 3
    journal.close(1)
    entry = journal.get(2)
    assert entry is not None
    entry.standing = Standing.SENT
    journal.accept(2)
    assert journal.num_unanswered == 1
    journal.close(2)
    assert journal.num_unanswered == 1
    assert journal.close(2) is None


def test_strikes_that_core_told_travel_with_the_replay() -> None:
    journal = accepted(1)
    journal.strike(1, 2)
    journal.strike(9, 1)  # it has ended meanwhile
    [entry] = journal.requeue_all()
    assert entry.submit(0, 1).strikes == 2
    journal.strike(1, 0)
    assert entry.submit(0, 1).strikes == 0


def test_who_is_overdue_depends_on_whether_core_may_still_say_so() -> None:
    journal = Journal()
    for request_id, deadline, standing in (
        (1, 0.0, Standing.QUEUED),
        (2, 50.0, Standing.QUEUED),
        (3, 50.0, Standing.SENT),
        (4, 50.0, Standing.ACCEPTED),
        (5, 51.5, Standing.QUEUED),
    ):
        journal.add(make_entry(request_id, deadline=deadline, standing=standing))

    def overdue(now: float) -> list[int]:
        return [entry.request_id for entry in journal.overdue(now)]

    assert overdue(49.9) == []
    assert overdue(50.0) == [2]
    assert overdue(50.0 + CORE_GRACE_S) == [2, 3, 4]
