"""Logprobs find their request: cut by row, joined over steps, prompt positions sent once."""

import zlib
from array import array

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from model_check.cases import make_world
from model_check.world import World

from nvserve.core import logprobs
from nvserve.core.emission import Emission
from nvserve.protocol.codec import BadFrame, decode_from_worker, encode
from nvserve.protocol.messages import Emits, Logprobs, ModelOutput, pack_ids, unpack_ids


def make_rows(rows: list[int], num_tops: list[int]) -> Logprobs:
    """Row r has the chosen value r / 8 and top ids 100 r, 100 r + 1, ..."""
    tops = [100 * row + k for row, count in zip(rows, num_tops, strict=True) for k in range(count)]
    chosen = array("f", [row / 8 for row in rows]).tobytes()
    values = array("f", [float(top) for top in tops]).tobytes()
    return Logprobs(rows, chosen, num_tops, pack_ids(tops), values)


def test_split_gives_each_row_its_own_values() -> None:
    pieces = logprobs.split(make_rows([0, 2, 5], [1, 0, 3]))
    assert list(pieces) == [0, 2, 5]
    assert unpack_ids(pieces[5].top_ids) == [500, 501, 502]
    assert pieces[2].num_tops == [0]
    assert array("f", pieces[5].chosen).tolist() == [5 / 8]
    assert {tuple(piece.rows) for piece in pieces.values()} == {(0,)}


def test_join_undoes_split() -> None:
    whole = make_rows([0, 2, 5], [1, 0, 3])
    joined: Logprobs | None = None
    for row, piece in logprobs.split(whole).items():
        joined = logprobs.join(joined, piece, shift=row)
    assert joined == whole


def test_positions_already_sent_are_left_out() -> None:
    rest = logprobs.between(make_rows([3, 4, 5, 6], [1, 1, 1, 1]), 4, 6)
    assert rest == make_rows([4, 5], [1, 1])
    assert logprobs.between(make_rows([3], [1]), 4, 9) is None
    assert logprobs.between(make_rows([4, 4], [1, 1]), 4, 9) is None
    assert logprobs.between(make_rows([3, 4, 5], [2, 0, 3]), 4, 9) == make_rows([4, 5], [0, 3])


def commit(world: World, output: ModelOutput) -> Emits:
    """What the frontend gets out of one answer."""
    sent: list[Emits] = []

    def take(reply: object) -> bool:
        assert isinstance(reply, Emits)
        sent.append(reply)
        return True

    assert world.scheduler.report(output, 0.0) is None
    world.replies.flush(take)
    return sent[0]


def answer(step: int, tokens: list[int], **fields: object) -> ModelOutput:
    column = pack_ids(tokens)
    return ModelOutput(0, step, column, checksum=zlib.crc32(column), **fields)  # type: ignore[arg-type]


def test_a_row_of_logprobs_reaches_the_request_of_that_row() -> None:
    world = make_world()
    ids = [world.submit([2, k], max_tokens=5, logprobs=1) for k in range(2, 5)]
    world.send()
    emits = commit(world, answer(0, [7, 8, 9], logprobs=make_rows([0, 2], [2, 1])))
    assert emits.request_ids == ids
    assert emits.logprobs is not None
    assert emits.logprobs[1] is None
    assert emits.logprobs[2] is not None
    assert unpack_ids(emits.logprobs[2].top_ids) == [200]


def test_prompt_logprobs_come_with_their_chunk_and_only_once() -> None:
    world = make_world(max_num_batched_tokens=4)
    request_id = world.submit([2] * 6, max_tokens=5, prompt_logprobs=1)
    world.send()
    emits = commit(world, answer(0, [], prompt_logprobs=[make_rows([1, 2, 3], [1, 1, 1])]))
    assert (emits.request_ids, emits.counts) == ([request_id], [0])
    assert emits.prompt_logprobs == [make_rows([1, 2, 3], [1, 1, 1])]
    world.start_epoch()
    world.send()
    output = answer(0, [], prompt_logprobs=[make_rows([1, 2, 3], [1, 1, 1])])
    again = ModelOutput(1, *[getattr(output, name) for name in output.__struct_fields__[1:]])
    assert world.scheduler.report(again, 0.0) is None
    assert len(world.replies) == 0


def test_output_computed_again_after_a_preemption_is_no_prompt() -> None:
    world = make_world()
    world.submit([2] * 3, max_tokens=5, prompt_logprobs=1, ignore_eos=True)
    world.send()
    emits = commit(world, answer(0, [7], prompt_logprobs=[make_rows([1, 2], [1, 1])]))
    assert emits.prompt_logprobs == [make_rows([1, 2], [1, 1])]
    world.start_epoch()
    world.send()
    output = answer(0, [8], prompt_logprobs=[make_rows([1, 2, 3], [1, 1, 1])])
    again = ModelOutput(1, *[getattr(output, name) for name in output.__struct_fields__[1:]])
    assert commit(world, again).prompt_logprobs is None


def test_a_request_with_prompt_logprobs_computes_its_whole_prompt() -> None:
    world = make_world()
    world.submit([2] * 9, max_tokens=2)
    world.run()
    request_id = world.submit([2] * 9, max_tokens=2, prompt_logprobs=1)
    world.step()
    assert world.request(request_id).num_cached == 0


def test_logprobs_of_rows_that_are_not_in_the_step_break_the_epoch() -> None:
    world = make_world()
    world.submit([2, 3], max_tokens=5, logprobs=1)
    world.send()
    broken = world.scheduler.report(answer(0, [7], logprobs=make_rows([1], [1])), 0.0)
    assert broken is not None
    assert "logprobs" in broken.reason


def test_an_emission_without_rows_is_not_sent() -> None:
    world = make_world()
    world.replies.emit(Emission())
    assert len(world.replies) == 0


SMALL = st.integers(-2, 4)


@st.composite
def raw_logprobs(draw: st.DrawFn) -> list[object]:
    """Fields as a peer may send them: lengths that agree, and any small integers."""
    rows, num_tops = draw(st.lists(st.tuples(SMALL, SMALL), max_size=3).map(_columns))
    tops = bytes(4 * max(0, sum(num_tops)))
    return ["Logprobs", rows, bytes(4 * len(rows)), num_tops, tops, tops]


def _columns(pairs: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [row for row, _ in pairs], [count for _, count in pairs]


@given(st.none() | raw_logprobs(), st.none() | raw_logprobs())
def test_no_logprobs_end_core(of_rows: list[object] | None, of_prompt: list[object] | None) -> None:
    """What does not fit together is a bad frame or ends the epoch."""
    world = make_world()
    for k in (2, 3):
        world.submit([k] * 3, max_tokens=5, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    world.send()
    tokens = pack_ids([7, 8])
    fields = [0, 0, tokens, None, zlib.crc32(tokens), of_rows, [of_prompt, None]]
    try:
        output = decode_from_worker(msgspec.msgpack.encode(["ModelOutput", *fields]))
    except BadFrame:
        return
    assert isinstance(output, ModelOutput)
    world.scheduler.report(output, 0.0)
    world.replies.flush(lambda reply: bool(encode(reply)))
    world.scheduler.check()
