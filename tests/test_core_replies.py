"""What core tells the frontend survives a full socket: nothing lost, order kept, merged."""

from model_check.cases import make_world
from model_check.world import CORE_LIFE, FRONTEND_LIFE

from nvserve.core.errors import RequestRefused
from nvserve.core.replies import Replies, Reply, merge_emits
from nvserve.protocol.messages import (
    Accepted,
    Emits,
    FinishReason,
    Logprobs,
    RefusalKind,
    Refused,
    Strikes,
    pack_ids,
    unpack_ids,
)

NONE, STOP, ABORT = FinishReason.NONE, FinishReason.STOP, FinishReason.ABORT


def make_emits(
    *rows: tuple[int, int, list[int], FinishReason], logprobs: list[Logprobs | None] | None = None
) -> Emits:
    """Rows of request id, first, tokens, finish."""
    return Emits(
        core_life=1,
        frontend_life=2,
        request_ids=[row[0] for row in rows],
        firsts=[row[1] for row in rows],
        counts=[len(row[2]) for row in rows],
        tokens=pack_ids([token for row in rows for token in row[2]]),
        finishes=[row[3] for row in rows],
        cached=[0] * len(rows),
        logprobs=logprobs,
    )


def make_logprobs(token_id: int) -> Logprobs:
    return Logprobs([0], pack_ids([token_id]), [1], pack_ids([token_id]), pack_ids([token_id]))


def test_merged_emits_keep_the_first_index_and_the_order_of_tokens() -> None:
    merged = merge_emits(
        [
            make_emits((7, 3, [10], NONE), (8, 0, [20], NONE)),
            make_emits((8, 1, [21], STOP), (9, 5, [30], NONE), (7, 4, [11], NONE)),
        ]
    )
    assert merged == make_emits((7, 3, [10, 11], NONE), (8, 0, [20, 21], STOP), (9, 5, [30], NONE))


def test_a_request_id_that_comes_again_after_its_final_emit_is_kept_apart() -> None:
    merged = merge_emits(
        [
            make_emits((7, 3, [10], NONE)),
            make_emits((7, 4, [], ABORT)),
            make_emits((7, 4, [5], NONE)),
        ]
    )
    assert merged == make_emits((7, 3, [10], ABORT), (7, 4, [5], NONE))


def test_merged_logprobs_point_at_their_tokens() -> None:
    merged = merge_emits(
        [
            make_emits((7, 0, [10], NONE)),
            make_emits((7, 1, [11], NONE), (8, 0, [9], NONE), logprobs=[make_logprobs(11), None]),
            make_emits((7, 2, [12], NONE), logprobs=[make_logprobs(12)]),
        ]
    )
    assert merged.logprobs is not None
    seven = merged.logprobs[0]
    assert seven is not None
    assert seven.rows == [1, 2]
    assert unpack_ids(seven.top_ids) == [11, 12]
    assert merged.logprobs[1] is None


def test_unsendable_replies_are_kept_in_order_and_merged() -> None:
    replies = Replies(core_life=1)
    replies.restart(2)
    for request_id in (1, 2):
        replies.accept(request_id)
    replies.refuse(3, RequestRefused("prompt", "no"))
    assert not replies.flush(lambda reply: False)
    replies.accept(4)
    sent: list[Reply] = []

    def send(reply: Reply) -> bool:
        sent.append(reply)
        return True

    assert replies.flush(send)
    no = Refused(1, 2, 3, RefusalKind.INVALID, "no", "prompt")
    assert sent == [Accepted(1, 2, [1, 2, 4]), no]
    assert len(replies) == 0


def test_a_blocked_frontend_costs_one_entry_a_request_and_loses_nothing() -> None:
    world = make_world()
    ids = [world.submit([k, 2], max_tokens=30, ignore_eos=True) for k in range(4)]
    world.is_frontend_blocked = True
    for _ in range(20):
        world.step()
    assert len(world.replies) == 1
    world.is_frontend_blocked = False
    world.flush()
    assert [len(world.entry(k).emitted) for k in ids] == [20] * 4
    world.run()
    assert all(world.outcome(k) == world.expected(k) for k in ids)


def test_a_new_frontend_life_gets_nothing_of_the_old_one() -> None:
    replies = Replies(core_life=1)
    replies.restart(2)
    replies.accept(1)
    replies.restart(3)
    assert len(replies) == 0


def test_strikes_follow_the_emits_they_speak_of_and_only_the_last_count() -> None:
    world = make_world(max_num_seqs=4)
    ids = [world.submit([k, 3], max_tokens=30, ignore_eos=True) for k in range(4)]
    world.is_frontend_blocked = True
    world.step()
    for _ in range(2):
        world.send()
        world.fail_step()
    sent: list[Reply] = []

    def send(reply: Reply) -> bool:
        sent.append(reply)
        return True

    world.replies.flush(send)
    assert [type(reply) for reply in sent] == [Emits, Strikes]
    assert sent[1] == Strikes(CORE_LIFE, FRONTEND_LIFE, ids, [2, 2, 1, 1])
