"""How a worker's batch follows core: deltas in their order, and refusals of what cannot be."""

import random

import pytest
import torch

from nvserve.protocol.config import Config, ModelFacts
from nvserve.protocol.messages import (
    Chunks,
    NewRows,
    SchedulerOutput,
    TableChanges,
    pack_ids,
)
from nvserve.protocol.sampling import SamplingParams
from nvserve.workers.batch import BadStep, Batch
from nvserve.workers.staging import Staging

NUM_SLOTS = 6
NUM_BLOCKS = 20


def make_batch() -> Batch:
    facts = ModelFacts("LlamaForCausalLM", 50, 1, 1, 64, eos_token_ids=[2])
    config = Config("m", facts, ["m"], max_num_seqs=NUM_SLOTS, max_model_len=32, block_size=4)
    device = torch.device("cpu")
    return Batch(
        config, num_blocks=NUM_BLOCKS, vocab_size=50, device=device, staging=Staging(device)
    )


def new_rows(slots: list[int], **params: float) -> NewRows:
    empty = [b""] * len(slots)
    sampling = [SamplingParams(**params) for _ in slots]  # type: ignore[arg-type]
    return NewRows(slots, sampling, [100 + slot for slot in slots], empty, empty)


def step(
    *,
    freed: list[int] | None = None,
    leaves: list[int] | None = None,
    new: NewRows | None = None,
    tables: TableChanges | None = None,
    joins: list[int] | None = None,
    chunks: Chunks | None = None,
) -> SchedulerOutput:
    return SchedulerOutput(
        0, 0, False, freed=freed, leaves=leaves, new=new, tables=tables, joins=joins, chunks=chunks
    )


def filled_batch() -> Batch:
    """Slots 0 to 3 decode, in this order."""
    batch = make_batch()
    batch.apply(step(new=new_rows([0, 1, 2, 3]), joins=[0, 1, 2, 3]))
    return batch


def rows_of(batch: Batch) -> list[int]:
    """The decode list on the device; what lies behind it must be scratch."""
    num_rows = len(batch.decoding)
    assert (batch.rows[num_rows:] == batch.scratch).all()
    return batch.rows[:num_rows].tolist()


def test_joins_are_appended_in_their_order() -> None:
    batch = filled_batch()
    batch.apply(step(new=new_rows([5, 4]), joins=[5, 4]))
    assert rows_of(batch) == batch.decoding == [0, 1, 2, 3, 5, 4]


def test_leaves_keep_the_order_of_the_others() -> None:
    batch = filled_batch()
    batch.apply(step(leaves=[1]))
    assert rows_of(batch) == batch.decoding == [0, 2, 3]


def test_freed_slots_leave_the_decode_list_and_may_be_taken_in_the_same_step() -> None:
    batch = filled_batch()
    batch.apply(step(freed=[0, 2], new=new_rows([2], temperature=0.5)))
    assert rows_of(batch) == [1, 3]
    batch.apply(step(joins=[2]))
    assert rows_of(batch) == [1, 3, 2]
    assert batch.sampling.temperature[2] == 0.5


def test_a_slot_that_left_may_join_again_at_the_end_in_one_step() -> None:
    batch = filled_batch()
    batch.apply(step(leaves=[0], joins=[0]))
    assert rows_of(batch) == [1, 2, 3, 0]


def test_the_decode_list_follows_a_plain_list_through_random_deltas() -> None:
    for seed in range(50):
        draw, batch, expected = random.Random(seed), make_batch(), list[int]()
        batch.apply(step(new=new_rows(list(range(NUM_SLOTS)))))
        for _ in range(30):
            leaves = draw.sample(expected, draw.randint(0, len(expected)))
            expected = [slot for slot in expected if slot not in leaves]
            outside = [slot for slot in range(NUM_SLOTS) if slot not in expected]
            joins = draw.sample(outside, draw.randint(0, len(outside)))
            expected += joins
            batch.apply(step(leaves=leaves or None, joins=joins or None))
            assert rows_of(batch) == expected


def test_tables_are_written_from_the_given_entry_on() -> None:
    batch = filled_batch()
    tables = TableChanges([0, 2], [0, 0], [3, 1], pack_ids([7, 8, 9, 4]))
    batch.apply(step(tables=tables))
    batch.apply(step(tables=TableChanges([2, 0], [1, 3], [2, 1], pack_ids([5, 6, 10]))))
    assert batch.block_table[0].tolist() == [7, 8, 9, 10, 0, 0, 0, 0]
    assert batch.block_table[2].tolist() == [4, 5, 6, 0, 0, 0, 0, 0]
    assert batch.block_table[[1, 3, 4, 5, 6]].sum() == 0


def test_new_rows_write_their_sampling_parameters() -> None:
    batch = make_batch()
    one = SamplingParams(0.7, 0.9, 40, 0.05, presence_penalty=0.5, frequency_penalty=-0.25)
    two = SamplingParams(0.0, repetition_penalty=1.25)
    batch.apply(step(new=NewRows([4, 1], [one, two], [2**62 + 1, 3], [b"", b""], [b"", b""])))
    state = batch.sampling
    assert state.seeds[[4, 1]].tolist() == [2**62 + 1, 3]
    assert state.top_k[[4, 1]].tolist() == [40, -1]
    penalties = [state.presence, state.frequency, state.repetition]
    columns = [state.temperature, state.top_p, state.min_p, *penalties]
    expected = [(0.7, 0.9, 0.05, 0.5, -0.25, 1.0), (0.0, 1.0, 0.0, 0.0, 0.0, 1.25)]
    for slot, values in zip((4, 1), expected, strict=True):
        assert [float(c[slot]) for c in columns] == pytest.approx(values)


def test_decode_inputs_read_last_token_position_and_place_of_each_row() -> None:
    batch = filled_batch()
    batch.apply(step(tables=TableChanges([1, 3], [0, 0], [2, 1], pack_ids([7, 8, 9]))))
    rows = torch.tensor([3, 1])
    batch.advance(rows, torch.tensor([11, 12]), torch.tensor([2, 5]))
    inputs = batch.decode_inputs(rows)
    assert inputs.tokens.tolist() == [11, 12]
    assert inputs.positions.tolist() == [2, 5]
    assert inputs.slot_mapping.tolist() == [9 * 4 + 2, 8 * 4 + 1]
    assert inputs.decode is not None
    assert inputs.decode.seq_lens.tolist() == [3, 6]


def test_the_scratch_row_stays_at_its_start_however_often_it_runs() -> None:
    batch = filled_batch()
    rows = torch.tensor([0, batch.scratch, batch.scratch])
    for length in range(1, 4):
        batch.advance(rows, torch.tensor([1, 2, 3]), torch.tensor([length] * 3))
    assert batch.lengths[0] == 3
    inputs = batch.decode_inputs(rows)
    assert inputs.slot_mapping.tolist()[1:] == [0, 0]


def test_chunk_columns_describe_every_token() -> None:
    batch = filled_batch()
    batch.apply(
        step(
            new=new_rows([4, 5]),
            tables=TableChanges([4, 5], [0, 0], [2, 1], pack_ids([3, 6, 2])),
        )
    )
    chunks = Chunks([4, 5], [3, 0], [3, 2], pack_ids([20, 21, 22, 30, 31]), [False, True])
    columns = batch.upload_chunks(chunks)
    inputs = batch.chunk_inputs(columns)
    assert inputs.tokens.tolist() == [20, 21, 22, 30, 31]
    assert inputs.positions.tolist() == [3, 4, 5, 0, 1]
    assert inputs.slot_mapping.tolist() == [3 * 4 + 3, 6 * 4, 6 * 4 + 1, 2 * 4, 2 * 4 + 1]
    assert inputs.prefill is not None
    assert inputs.prefill.cu_seqlens_q.tolist() == [0, 3, 5]
    assert inputs.prefill.seq_lens.tolist() == [6, 2]
    assert columns.sampling_slots.tolist() == [5]
    assert columns.sampling_ends.tolist() == [2]
    assert columns.last_rows.tolist() == [4]


def chunk(slot: int, start: int, tokens: list[int]) -> Chunks:
    return Chunks([slot], [start], [len(tokens)], pack_ids(tokens), [True])


IMPOSSIBLE = {
    "a slot behind the last": step(freed=[NUM_SLOTS]),
    "a negative slot": step(leaves=[-1]),
    "a leave of a slot that does not decode": step(leaves=[4]),
    "a join of a slot that decodes": step(joins=[2]),
    "a join twice": step(new=new_rows([4]), joins=[4, 4]),
    "a join of an empty slot": step(joins=[5]),
    "a chunk of an empty slot": step(chunks=chunk(5, 0, [1])),
    "the scratch block": step(tables=TableChanges([0], [0], [1], pack_ids([0]))),
    "a block behind the pool": step(tables=TableChanges([0], [0], [1], pack_ids([NUM_BLOCKS]))),
    "a table that is too long": step(tables=TableChanges([0], [7], [2], pack_ids([1, 2]))),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_an_impossible_delta_is_refused(what: str) -> None:
    with pytest.raises(BadStep):
        filled_batch().apply(IMPOSSIBLE[what])


IMPOSSIBLE_CHUNKS = {
    "no tokens": chunk(4, 0, []),
    "a negative start": chunk(4, -1, [1]),
    "an end behind the block table": chunk(4, 30, [1, 2, 3]),
    "a token id behind the vocabulary": chunk(4, 0, [50]),
    "a negative token id": chunk(4, 0, [-1]),
    "a slot that decodes": chunk(0, 0, [1]),
    "one slot twice": Chunks([4, 4], [0, 1], [1, 1], pack_ids([1, 2]), [False, True]),
}


@pytest.mark.parametrize("what", IMPOSSIBLE_CHUNKS)
def test_impossible_chunks_are_refused(what: str) -> None:
    batch = filled_batch()
    batch.apply(step(new=new_rows([4])))
    with pytest.raises(BadStep):
        batch.check_chunks(IMPOSSIBLE_CHUNKS[what])


def test_a_new_epoch_finds_empty_slots() -> None:
    batch = filled_batch()
    batch.apply(step(tables=TableChanges([0], [0], [1], pack_ids([7]))))
    batch.clear()
    assert batch.decoding == []
    assert (batch.rows == batch.scratch).all()
    assert batch.block_table.sum() == 0
    assert batch.sampling.params == [None] * (NUM_SLOTS + 1)
