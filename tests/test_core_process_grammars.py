"""The core process while a grammar is compiled, which may take for ever."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from core_rig import Rig, wait_for

from nvserve.core.grammar import GIVE_UP_S
from nvserve.protocol.control import Exit, FaultKind, Inject
from nvserve.protocol.faults import SEND
from nvserve.protocol.messages import Accepted, CoreStats, Emits, FinishReason, RefusalKind, Refused


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    try:
        yield rig
    finally:
        rig.close()


def test_a_core_that_follows_another_loads_grammars_when_it_serves_and_is_idle(rig: Rig) -> None:
    maps = Path(f"/proc/{rig.process.pid}/maps")
    rig.meet(life=1)
    assert "llguidance" not in maps.read_text(), "it is loaded before core serves"
    rig.start_epoch(tp_size=1)
    wait_for(lambda: True if "llguidance" in maps.read_text() else None)


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


def test_over_the_queue_limit_nobody_waits_for_a_grammar_to_be_told_so(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_num_seqs=1, max_queued_requests=2)
    try:
        rig.block_compiler()
        rig.meet(life=1)
        rig.start_epoch(tp_size=1)
        for request_id in (7, 8):
            rig.submit(request_id, max_tokens=1)
            assert rig.expect_reply(Accepted).request_ids == [request_id]
        rig.submit(9, max_tokens=1, grammar="json:")
        rig.submit(10, max_tokens=1, grammar="json:")
        refused = rig.expect_reply(Refused)
        assert (refused.request_id, refused.kind) == (10, RefusalKind.BUSY)
    finally:
        rig.close()


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
