"""What surrounds the model in a decode step against its torch twins."""

import pytest
import torch
from gpu.kernel_cases import DEVICE, MARKS

from nvserve.kernels import decode_step, reference_step

pytestmark = MARKS


def test_gather_rows_matches_the_reference_and_writes_tables_as_far_as_they_are_read() -> None:
    num_slots, max_blocks = 9, 300
    last_token = torch.arange(100, 100 + num_slots).to(DEVICE)
    lengths = torch.tensor([0, 1, 15, 16, 17, 4799, 2064, 500, 0]).to(DEVICE)
    table = torch.randint(1, 99, (num_slots, max_blocks), dtype=torch.int32).to(DEVICE)
    rows = torch.tensor([5, 8, 0, 3, 2, 7, 8]).to(DEVICE)
    tables, expected_tables = torch.zeros_like(table), torch.zeros_like(table)
    got = decode_step.gather_rows(rows, last_token, lengths, table, tables, 16)
    expected = reference_step.gather_rows(rows, last_token, lengths, table, expected_tables, 16)
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours, theirs)
    for row, length in enumerate(got.seq_lens.tolist()):
        used = -(-length // 16)
        assert torch.equal(tables[row, :used], expected_tables[row, :used])
        assert not tables[row, used:].any()


@pytest.mark.parametrize("has_values", [False, True])
def test_advance_rows_matches_the_reference(has_values: bool) -> None:
    slots = torch.tensor([3, 0, 6, 5, 6]).to(DEVICE)  # the last one is scratch
    ids = torch.tensor([7, -1, 9, 11, 12]).to(DEVICE)
    lengths = torch.tensor([4, 5, 6, 7, 8]).to(DEVICE)
    values = torch.tensor([1.0, -3.0, 0.5, float("nan"), float("-inf")]).to(DEVICE)
    states = [torch.full((7,), 50).to(DEVICE) for _ in range(4)]
    chosen = values if has_values else None
    out = decode_step.advance_rows(slots, ids, chosen, lengths, states[0], states[1], 6)
    expected = reference_step.advance_rows(
        slots, ids, chosen, lengths, states[2], states[3], 6, decode_step.BAD_TOKEN
    )
    assert torch.equal(out, expected)
    assert out.dtype == torch.int32
    assert torch.equal(states[0][:6], states[2][:6])  # of the scratch slot either token may stay
    assert torch.equal(states[1], states[3])
    assert out.tolist() == [7, -1, 9, *((-1, -1) if has_values else (11, 12))]
