"""Sampling, penalties and masks against their torch twins."""

from typing import NamedTuple

import pytest
import torch
from gpu.kernel_cases import DEVICE, DTYPES, MARKS, TOLERANCE, assert_close, random

from nvserve.kernels import reference_sampling, sampling
from nvserve.kernels.dispatch import HAS_TRITON, INTERPRETED

pytestmark = MARKS

VOCABULARIES = [500] if INTERPRETED else [500, 32_003, 151_936]


class Rows(NamedTuple):
    """The arguments of sample() after the logits."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


def rows(num_rows: int) -> Rows:
    """One of each kind of row, repeated: greedy, plain, top-k, top-p, min-p and all of them."""
    kinds = torch.tensor(
        [
            # temperature, top_k, top_p, min_p
            [0.0, 5, 0.5, 0.1],
            [1.0, 0, 1.0, 0.0],
            [0.7, 20, 1.0, 0.0],
            [1.3, 0, 0.9, 0.0],
            [1.0, 0, 1.0, 0.05],
            [0.6, 20, 0.95, 0.02],
            [2.0, 1, 1.0, 0.0],
            [1.0, 0, 0.0, 0.0],
            [1.0, 300, 0.5, 0.0],
            [1.0, 3000, 0.999, 0.0],
        ]
    )
    kinds = kinds[torch.arange(num_rows) % len(kinds)].to(DEVICE)
    return Rows(
        kinds[:, 0].contiguous(),
        kinds[:, 1].to(torch.int32),
        kinds[:, 2].contiguous(),
        kinds[:, 3].contiguous(),
        torch.randint(-(2**63), 2**63 - 1, (num_rows,)).to(DEVICE),
        torch.randint(0, 2**33, (num_rows,)).to(DEVICE),
    )


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_random_bits_equal_the_reference_bits() -> None:
    import triton
    import triton.language as tl

    from nvserve.kernels import noise

    def store_bits(out_ptr, seed_ptr, position_ptr, first_group):  # type: ignore[no-untyped-def]
        groups = first_group + tl.arange(0, 16)
        bits = noise.token_bits(tl.load(seed_ptr), tl.load(position_ptr), groups)
        tl.store(out_ptr + tl.arange(0, 64), bits.to(tl.int64))

    store_bits.__globals__.update(tl=tl, noise=noise)
    kernel = triton.jit(store_bits)
    for seed, position, group in ((0, 0, 0), (-1, 2**33 + 7, 37_983), (2**62 + 9, 2**31, 5)):
        key, place = torch.tensor([seed]).to(DEVICE), torch.tensor([position]).to(DEVICE)
        out = torch.zeros(64, dtype=torch.int64, device=DEVICE)
        kernel[(1,)](out, key, place, group)
        assert torch.equal(out, reference_sampling.token_bits(key, place, 64, 4 * group)[0])


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.parametrize("num_rows", [1, 2, 3, 9])
def test_what_the_scan_leaves_begins_at_multiples_of_16_bytes(num_rows: int) -> None:
    """Else kernels compile once more for the numbers of rows where it does not."""
    from nvserve.kernels import sampling_triton

    temperature = torch.ones(num_rows, device=DEVICE)
    integers = torch.arange(num_rows, device=DEVICE)
    logits = random(num_rows, 4099, dtype=torch.float32)
    scanned = sampling_triton._scan(logits, temperature, integers.int(), integers, integers, 0)
    assert [each.data_ptr() % 16 for each in scanned] == [0] * 5


@pytest.mark.parametrize("first_token_id", [0, 4096, 37])
@pytest.mark.parametrize("num_tokens", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gumbel_argmax_picks_the_reference_token(
    num_tokens: int, first_token_id: int, dtype: torch.dtype
) -> None:
    logits = 3 * random(12, num_tokens, dtype=dtype)
    row = rows(12)
    arguments = (row.temperature, row.seeds, row.positions)
    values, ids = sampling.gumbel_argmax(logits, *arguments, first_token_id)
    expected = reference_sampling.perturb(logits, *arguments, first_token_id)
    best, best_ids = reference_sampling.gumbel_argmax(logits, *arguments, first_token_id)
    assert torch.allclose(values, best, atol=2e-4, rtol=1e-5)
    # Logarithms differ in their last bits, so near ties may fall the other way.
    got = expected.gather(1, ids[:, None] - first_token_id)[:, 0]
    assert torch.all((ids == best_ids) | (best - got < 2e-4))
    assert (ids == best_ids).float().mean() > 0.9


@pytest.mark.parametrize("num_tokens", VOCABULARIES)
@pytest.mark.parametrize("spread", [0.1, 4.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sample_picks_the_reference_token(
    num_tokens: int, spread: float, dtype: torch.dtype
) -> None:
    num_rows = 10 if INTERPRETED else 60
    logits = spread * random(num_rows, num_tokens, dtype=dtype)
    logits[:, ::7] = float("-inf")
    arguments = rows(num_rows)
    ids = sampling.sample(logits, *arguments)
    expected = reference_sampling.sample(logits, *arguments)
    # A nucleus' edge is a sum of rounded terms, so a rare row may differ; greedy rows never.
    assert (ids == expected).float().mean() >= 0.95
    assert torch.equal(ids[::10], expected[::10])


def test_sample_with_ties_takes_the_reference_token() -> None:
    logits = torch.randint(-3, 3, (40, 700)).float().to(DEVICE)[: 10 if INTERPRETED else 40]
    arguments = rows(len(logits))
    ids = sampling.sample(logits, *arguments)
    assert torch.equal(ids, reference_sampling.sample(logits, *arguments))
    nothing = torch.full((2, 64), float("-inf"), device=DEVICE)
    assert sampling.sample(nothing, *rows(2)).max() < 64


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")  # of the interpreter's numpy
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("num_tokens", [1000, 1024, 4096])  # 1024: a whole tile of few rows' scan
@pytest.mark.parametrize("first_token_id", [0, 512])
def test_a_row_of_nan_gets_some_id_and_harms_no_other(num_tokens: int, first_token_id: int) -> None:
    """The step fails for it; the kernel must not read where its best token is not."""
    logits = random(8, num_tokens)
    arguments = rows(8)
    expected = sampling.sample(logits, *arguments, first_token_id=first_token_id)
    for bad in (0, 3, 6):
        spoiled = logits.clone()
        spoiled[bad] = float("nan")
        ids = sampling.sample(spoiled, *arguments, first_token_id=first_token_id)
        assert first_token_id <= int(ids[bad]) < first_token_id + num_tokens
        others = torch.arange(8) != bad
        assert torch.equal(ids[others], expected[others])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's numpy
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_nan_among_the_logits_of_a_row_shows_in_its_value(temperature: float) -> None:
    num_rows, num_tokens, first_token_id = 12, 5000, 512
    logits = random(num_rows, num_tokens)
    heat = torch.full((num_rows,), temperature, device=DEVICE)
    seeds = torch.arange(num_rows, device=DEVICE)
    places = {0: 0, 3: 4095, 5: 4096, 8: num_tokens - 1}  # of either tile
    sound = torch.tensor([row not in places for row in range(num_rows)], device=DEVICE)
    expected = sampling.gumbel_argmax(logits, heat, seeds, seeds, first_token_id)
    for row, column in places.items():
        logits[row, column] = float("nan")
    values, ids = sampling.gumbel_argmax(logits, heat, seeds, seeds, first_token_id)
    assert torch.equal(values.isnan(), ~sound)
    assert torch.equal(values[sound], expected[0][sound])
    assert torch.equal(ids[sound], expected[1][sound])
    assert ((ids >= first_token_id) & (ids < first_token_id + num_tokens)).all()


@pytest.mark.parametrize("num_tokens", [100] if INTERPRETED else [100, 32_003])
@pytest.mark.parametrize("dtype", DTYPES)
def test_penalties_masks_and_counts_match_the_reference(
    num_tokens: int, dtype: torch.dtype
) -> None:
    num_rows, num_slots = 5, 9
    slots = torch.tensor([3, 0, 8, 3, 1], dtype=torch.int32).to(DEVICE)
    counts = torch.randint(0, 3, (num_slots, num_tokens), dtype=torch.int32).to(DEVICE)
    prompt = (torch.rand(num_slots, num_tokens) < 0.3).to(DEVICE)
    frequency, presence = torch.rand(num_rows).to(DEVICE), torch.rand(num_rows).to(DEVICE)
    repetition = 0.5 + torch.rand(num_rows).to(DEVICE)
    frequency[1] = presence[1] = 0.0
    repetition[1] = 1.0
    logits = random(num_rows, num_tokens, dtype=dtype)
    penalties = (slots, counts, prompt, frequency, presence, repetition)
    expected = reference_sampling.apply_penalties(logits.clone(), *penalties)
    assert sampling.apply_penalties(logits, *penalties) is logits
    assert_close(logits, expected, TOLERANCE[dtype])

    words = torch.randint(-(2**31), 2**31, (num_rows, -(-num_tokens // 32)), dtype=torch.int32)
    expected = reference_sampling.apply_token_mask(expected, words.to(DEVICE))
    sampling.apply_token_mask(logits, words.to(DEVICE))
    assert torch.equal(logits.isinf(), expected.isinf())

    ids = torch.tensor([1, -1, 5, 1, num_tokens]).to(DEVICE)
    expected = counts.clone()
    reference_sampling.count_tokens(expected, slots, ids)
    sampling.count_tokens(counts, slots, ids)
    assert torch.equal(counts, expected)
