"""The sampling references: known random words, distributions, truncation by hand, penalties."""

import math
from typing import Any, NamedTuple

import pytest
import torch

from nvserve.kernels import reference_sampling as reference
from nvserve.kernels import sampling

NUM_DRAWS = 20_000


class Rows(NamedTuple):
    """The arguments of sample() after the logits."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


def rows(
    num: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Rows:
    """num rows of one kind, one position each."""
    return Rows(
        torch.full((num,), temperature),
        torch.full((num,), top_k, dtype=torch.int32),
        torch.full((num,), top_p),
        torch.full((num,), min_p),
        torch.full((num,), 7),
        torch.arange(num),
    )


def kept_ids(
    logits: list[float],
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    temperature: float = 1.0,
) -> list[int]:
    row = rows(1, temperature, top_k, top_p, min_p)
    keep = reference.kept(torch.tensor([logits]), row.temperature, row.top_k, row.top_p, row.min_p)
    return keep[0].nonzero().flatten().tolist()


def chi_square_p(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Upper tail of Pearson's statistic (Wilson and Hilferty's normal approximation)."""
    expected = probabilities * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = len(counts) - 1
    cube = (statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))
    return 0.5 * math.erfc(cube / math.sqrt(2 / (9 * freedom)) / math.sqrt(2))


# -- noise -----------------------------------------------------------------------------------------
def test_philox_gives_the_published_words_for_key_and_counter_zero() -> None:
    zero = torch.tensor([0])
    words = reference.philox(zero, (zero, zero, zero))[0].tolist()
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def plain_philox(key: int, counter: list[int]) -> list[int]:
    """Philox-4x32-10 in Python integers, from the paper."""
    key0, key1 = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    for _ in range(10):
        left, right = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (right >> 32) ^ counter[1] ^ key0,
            right & 0xFFFFFFFF,
            (left >> 32) ^ counter[3] ^ key1,
            left & 0xFFFFFFFF,
        ]
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return counter


def test_token_bits_are_the_lane_of_the_token_at_its_counter() -> None:
    seeds = torch.tensor([-(2**63), -1, 2**62 + 12345])
    positions = torch.tensor([0, 2**33 + 5, 77])
    bits = reference.token_bits(seeds, positions, 9, 1022)
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        for column in range(9):
            token = 1022 + column
            counter = [token // 4, position & 0xFFFFFFFF, position >> 32, 0]
            assert bits[row, column] == plain_philox(seed % 2**64, counter)[token % 4]


def test_gumbel_noise_is_finite_at_both_ends_and_has_the_right_moments() -> None:
    ends = reference.gumbel_from_bits(torch.tensor([0, 1, 2**32 - 1]))
    assert ends.isfinite().all()
    assert ends[0] > 22
    bits = reference.token_bits(torch.tensor([3]), torch.tensor([9]), 200_000, 0)
    noise = reference.gumbel_from_bits(bits)
    assert abs(noise.mean().item() - 0.5772) < 0.01
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.03


def test_noise_depends_only_on_seed_position_and_global_id() -> None:
    seeds, positions = torch.tensor([5, 6]), torch.tensor([1, 1])
    whole = reference.token_bits(seeds, positions, 64, 0)
    shard = reference.token_bits(seeds, positions, 30, 34)
    assert torch.equal(whole[:, 34:], shard)
    alone = reference.token_bits(seeds[1:], positions[1:], 64, 0)
    assert torch.equal(whole[1:], alone)
    assert not torch.equal(whole[0], whole[1])


# -- choosing --------------------------------------------------------------------------------------
def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    values, ids = sampling.gumbel_argmax(
        logits, torch.zeros(2), torch.tensor([1, 1]), torch.tensor([1, 1]), 100
    )
    assert ids.tolist() == [101, 100]
    assert values.tolist() == [3.0, 2.0]
    assert sampling.sample(logits, *rows(2, temperature=9e-6, top_k=2)).tolist() == [1, 0]


def test_shards_together_choose_what_the_whole_vocabulary_chooses() -> None:
    torch.manual_seed(0)
    logits = torch.randn(50, 101)
    row = rows(50, temperature=0.8)
    arguments = (row.temperature, row.seeds, row.positions)
    _, expected = sampling.gumbel_argmax(logits, *arguments)
    parts = [(0, 37), (37, 70), (70, 101)]
    shards = [sampling.gumbel_argmax(logits[:, a:b], *arguments, a) for a, b in parts]
    values, ids = (torch.stack(column) for column in zip(*shards, strict=True))
    assert torch.equal(ids.gather(0, values.argmax(0, keepdim=True))[0], expected)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5, 1.5, -3.0, 0.2])
    ids = sampling.sample(logits.expand(NUM_DRAWS, -1), *rows(NUM_DRAWS, temperature=temperature))
    counts = torch.bincount(ids, minlength=8).double()
    assert chi_square_p(counts, (logits.double() / temperature).softmax(0)) > 0.001


def test_draws_over_seeds_follow_the_softmax_too() -> None:
    logits = torch.tensor([0.3, 0.0, 1.0, -0.5])
    same_place = torch.zeros(NUM_DRAWS, dtype=torch.int64)
    arguments = rows(NUM_DRAWS)._replace(
        seeds=torch.arange(NUM_DRAWS) * 2**33, positions=same_place
    )
    counts = torch.bincount(sampling.sample(logits.expand(NUM_DRAWS, -1), *arguments)).double()
    assert chi_square_p(counts, logits.double().softmax(0)) > 0.001


def test_truncated_draws_follow_the_renormalized_softmax() -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5, 1.5, -3.0, 0.2])
    ids = sampling.sample(logits.expand(NUM_DRAWS, -1), *rows(NUM_DRAWS, top_k=4, top_p=0.9))
    kept = kept_ids(logits.tolist(), top_k=4, top_p=0.9)
    counts = torch.bincount(ids, minlength=8).double()
    assert counts.sum() == counts[kept].sum()
    assert chi_square_p(counts[kept], logits.double()[kept].softmax(0)) > 0.001


# -- truncation ------------------------------------------------------------------------------------
LOGITS = [math.log(p) for p in (0.1, 0.4, 0.05, 0.25, 0.2)]


def test_truncations_keep_what_their_definitions_say() -> None:
    assert kept_ids(LOGITS) == [0, 1, 2, 3, 4]
    assert kept_ids(LOGITS, top_k=2) == [1, 3]
    assert kept_ids(LOGITS, top_k=5) == kept_ids(LOGITS, top_k=50) == [0, 1, 2, 3, 4]
    assert kept_ids(LOGITS, top_p=0.6) == [1, 3]
    assert kept_ids(LOGITS, top_p=0.66) == [1, 3, 4]
    assert kept_ids(LOGITS, top_p=0.0) == [1]
    assert kept_ids(LOGITS, min_p=0.3) == [1, 3, 4]
    assert kept_ids(LOGITS, min_p=1.0) == [1]


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    # Of the two best, 0.4 and 0.25, the first has 0.615 of the mass.
    assert kept_ids(LOGITS, top_k=2, top_p=0.6) == [1]
    assert kept_ids(LOGITS, top_k=2, top_p=0.62) == [1, 3]


def test_temperature_comes_before_truncation() -> None:
    assert kept_ids(LOGITS, top_p=0.6, temperature=0.25) == [1]
    assert kept_ids(LOGITS, top_p=0.6, temperature=100.0) == [1, 3, 4]


def test_ties_at_a_threshold_stay_together() -> None:
    assert kept_ids([1.0, 2.0, 1.0, 0.0, 1.0], top_k=2) == [0, 1, 2, 4]
    assert kept_ids([0.0, 0.0, 0.0, 0.0], top_p=0.1) == [0, 1, 2, 3]


def test_truncation_agrees_with_transformers() -> None:
    warpers: Any = pytest.importorskip("transformers.generation.logits_process")
    torch.manual_seed(0)
    logits = 3 * torch.randn(40, 300)
    chain = (
        warpers.TemperatureLogitsWarper(0.7),
        warpers.TopKLogitsWarper(30),
        warpers.TopPLogitsWarper(0.8),
        warpers.MinPLogitsWarper(0.05),
    )
    scores = logits
    for warper in chain:
        scores = warper(torch.zeros(40, 1, dtype=torch.long), scores)
    row = rows(40, temperature=0.7, top_k=30, top_p=0.8, min_p=0.05)
    keep = reference.kept(logits, row.temperature, row.top_k, row.top_p, row.min_p)
    assert torch.equal(keep, scores.isfinite())


# -- logprobs, penalties ---------------------------------------------------------------------------
def test_token_logprobs_are_log_softmax() -> None:
    torch.manual_seed(0)
    logits, ids = torch.randn(6, 50).bfloat16(), torch.randint(0, 50, (6,))
    expected = logits.float().log_softmax(-1)
    chosen, top_ids, top = sampling.token_logprobs(logits, ids, 4)
    assert torch.allclose(chosen, expected.gather(1, ids[:, None])[:, 0], atol=1e-6)
    assert torch.allclose(top, expected.topk(4).values, atol=1e-6)
    assert torch.allclose(expected.gather(1, top_ids), top, atol=1e-6)


def test_penalties_follow_their_formulas_and_their_slots() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5], [2.0, -2.0, 1.0, 0.5]])
    counts = torch.zeros(3, 4, dtype=torch.int32)
    counts[2] = torch.tensor([3, 1, 0, 0])
    prompt = torch.zeros(3, 4, dtype=torch.bool)
    prompt[2, 2] = True
    strengths = (torch.tensor([0.5, 0.5]), torch.tensor([0.1, 0.1]), torch.tensor([2.0, 2.0]))
    out = sampling.apply_penalties(logits, torch.tensor([2, 0]), counts, prompt, *strengths)
    assert out is logits
    expected = [1.0 - 1.5 - 0.1, -4.0 - 0.5 - 0.1, 0.5, 0.5]
    assert torch.allclose(out[0], torch.tensor(expected))
    assert out[1].tolist() == [2.0, -2.0, 1.0, 0.5]


def test_neutral_penalties_change_nothing() -> None:
    logits = torch.randn(2, 5)
    expected = logits.clone()
    counts, prompt = torch.ones(2, 5, dtype=torch.int32), torch.ones(2, 5, dtype=torch.bool)
    neutral = (torch.zeros(2), torch.zeros(2), torch.ones(2))
    sampling.apply_penalties(logits, torch.tensor([0, 1]), counts, prompt, *neutral)
    assert torch.equal(logits, expected)


def test_a_token_mask_bans_exactly_the_zero_bits() -> None:
    logits = torch.zeros(2, 70)
    mask = torch.full((2, 3), -1, dtype=torch.int32)
    mask[0, 0], mask[0, 2] = -(2**31), 5  # bits 31; 64 and 66
    sampling.apply_token_mask(logits, mask)
    allowed = logits[0].isfinite().nonzero().flatten().tolist()
    assert allowed == [31, *range(32, 64), 64, 66]
    assert logits[1].isfinite().all()


def test_counts_add_for_shared_slots_and_ignore_foreign_ids() -> None:
    counts = torch.zeros(3, 4, dtype=torch.int32)
    sampling.count_tokens(counts, torch.tensor([1, 1, 2, 0]), torch.tensor([3, 3, -1, 4]))
    assert counts.tolist() == [[0, 0, 0, 0], [0, 0, 0, 2], [0, 0, 0, 0]]
