"""A pool that is short: preemption, bypassing, and blocks shared by prefix."""

import os

import pytest
from model_check.cases import assert_all_as_expected, assert_empty, make_world
from model_check.world import World

from nvserve.core.request import Phase
from nvserve.protocol.messages import (
    FinishReason,
)

NUM_SEEDS = max(20, round(200 * float(os.environ.get("NVSERVE_TEST_SCALE", "0.1"))))

# -- the pool is short


def test_the_youngest_request_is_preempted_first() -> None:
    world = make_world(num_blocks=9, max_model_len=32)
    ids = [world.submit([k] * 6, max_tokens=20, ignore_eos=True) for k in (2, 3, 4)]
    while not world.scheduler.counters.preempted:
        world.step()
    assert world.request(ids[2]).phase is Phase.WAITING
    assert world.request(ids[0]).phase is Phase.RUNNING
    world.run()
    assert_all_as_expected(world, ids)


def test_a_token_in_flight_at_a_preemption_is_kept() -> None:
    world = make_world(num_blocks=9, max_model_len=32)
    ids = [world.submit([k] * 6, max_tokens=20, ignore_eos=True) for k in (2, 3, 4)]
    world.send()
    while not world.scheduler.counters.preempted:
        world.send()  # with the step before it in flight
        world.work()
        if not world.scheduler.counters.preempted:
            world.deliver()
    request = world.request(ids[2])
    assert request.phase is Phase.WAITING
    num_before = request.num_output
    world.deliver()
    assert request.num_output == num_before + 1
    world.run()
    assert_all_as_expected(world, ids)


def test_nobody_takes_the_place_of_a_request_whose_token_is_in_flight() -> None:
    world = make_world(num_blocks=9, max_model_len=32)
    for k in (2, 3, 4):
        world.submit([k] * 6, max_tokens=20, ignore_eos=True)
    world.send()
    while True:
        late = world.submit([6], max_tokens=1, ignore_eos=True)  # one block would do
        world.send()
        if world.scheduler.counters.preempted:
            break
        world.end(late, FinishReason.ABORT)
        world.work()
        world.deliver()
    assert world.request(late).phase is Phase.WAITING


def test_a_resumed_request_hits_its_own_blocks_and_counts_right() -> None:
    """Sixteen requests of 40 + 60 tokens with a shared prefix in a pool for one and a half."""
    preempted = 0
    for seed in range(NUM_SEEDS):
        world = make_world(
            num_blocks=12, block_size=16, max_model_len=128, max_num_batched_tokens=64
        )
        ids = [
            world.submit([2] * 32 + [k] * 8, max_tokens=60, ignore_eos=True, seed=seed)
            for k in range(16)
        ]
        world.run()
        assert_all_as_expected(world, ids)
        assert_empty(world)
        preempted += world.scheduler.counters.preempted
    assert preempted > 0


def test_a_request_preempted_many_times_keeps_its_output_and_its_counts() -> None:
    """Whenever it got on by a token, requests of higher priority come and take its blocks."""
    world = make_world(num_blocks=13, max_model_len=49)
    victim = world.submit(
        [2] * 9, max_tokens=30, ignore_eos=True, priority=1, presence_penalty=0.5, seed=4
    )
    seen = num_preempted = 0
    while victim in world.scheduler.requests:
        request = world.request(victim)
        if request.num_output > seen and len(world.scheduler.requests) == 1:
            seen = request.num_output
            for _ in range(3):
                world.submit([3] * 6, max_tokens=20, ignore_eos=True, priority=0)
        was_running = request.phase is Phase.RUNNING
        world.step()
        num_preempted += was_running and request.phase is Phase.WAITING
    assert num_preempted >= 3
    assert_all_as_expected(world, [victim])


@pytest.mark.parametrize(
    ("num_blocks", "max_tokens", "growth"),
    [(60, 28, 4), (60, 10, 2), (9, 28, 4), (5, 12, 1)],
    ids=["roomy", "near its end", "alone", "short"],
)
def test_a_table_grows_ahead_as_far_as_it_is_needed_and_the_pool_allows(
    num_blocks: int, max_tokens: int, growth: int
) -> None:
    world = make_world(num_blocks=num_blocks, max_model_len=32)
    request_id = world.submit([2] * 3, max_tokens=max_tokens, ignore_eos=True)
    world.step()
    num_before = len(world.request(request_id).blocks)
    while len(world.request(request_id).blocks) == num_before:
        world.step()
    assert len(world.request(request_id).blocks) - num_before == growth


def test_an_admission_leaves_some_blocks_for_those_who_run() -> None:
    world = make_world(num_blocks=9, max_model_len=32)
    for k in (2, 3):
        world.submit([k] * 11, max_tokens=20, ignore_eos=True)
        world.step()
    newcomer = world.submit([4] * 3, max_tokens=5, ignore_eos=True)
    world.send()
    assert world.scheduler.batch is not None
    assert world.scheduler.batch.tables.pool.num_free == 1  # as many as it needs
    assert world.request(newcomer).phase is Phase.WAITING
    world.run()
    assert_all_as_expected(world, [newcomer])


def start_big_one_behind_a_long_decode(world: World) -> tuple[int, int]:
    """The long one holds 60 of 100 blocks, so that the big one, which needs 80, must wait."""
    long = world.submit([2] * 236, max_tokens=4000, ignore_eos=True)
    for _ in range(3):
        world.step()
    big = world.submit([3] * 318, max_tokens=2, ignore_eos=True)
    world.step()
    assert world.request(big).phase is Phase.WAITING
    return long, big


def make_wide_world(max_bypasses: int) -> World:
    return make_world(
        num_blocks=101,
        max_model_len=400,
        max_num_batched_tokens=512,
        max_num_seqs=16,
        max_bypasses=max_bypasses,
        vocab_size=1000,
    )


def test_small_requests_pass_a_big_one_that_waits_for_blocks() -> None:
    world = make_wide_world(max_bypasses=32)
    _, big = start_big_one_behind_a_long_decode(world)
    small = [world.submit([k] * 5, max_tokens=3, ignore_eos=True) for k in range(20)]
    for _ in range(12):
        world.step()
    assert_all_as_expected(world, small)
    world.run()
    assert_all_as_expected(world, [big])


def test_a_big_request_is_passed_a_bounded_number_of_times() -> None:
    world = make_wide_world(max_bypasses=5)
    long, big = start_big_one_behind_a_long_decode(world)
    small = [world.submit([k] * 5, max_tokens=3, ignore_eos=True) for k in range(20)]
    for _ in range(12):
        world.step()
    assert sum(k in world.closed for k in small) == 5
    world.end(long, FinishReason.ABORT)
    world.step()
    assert world.request(big).phase is Phase.RUNNING
    world.run()
    assert_all_as_expected(world, [big, *small])


# -- the prefix cache


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9, 11, 12, 13])
def test_the_last_token_of_a_known_prompt_is_computed_again(length: int) -> None:
    world = make_world()
    ids = []
    for _ in range(2):
        ids.append(world.submit([2] * length, max_tokens=5, ignore_eos=True))
        world.run()
    assert_all_as_expected(world, ids)
    assert world.entry(ids[0]).cached == 0
    assert world.entry(ids[1]).cached == (length - 1) // 4 * 4


def test_many_copies_of_a_prompt_at_once_are_right() -> None:
    world = make_world(max_num_seqs=32, num_blocks=200, max_num_batched_tokens=64)
    ids = [world.submit([2] * 12, max_tokens=6, ignore_eos=True) for _ in range(32)]
    world.run()
    assert_all_as_expected(world, ids)


def test_the_next_turn_finds_the_output_of_the_one_before() -> None:
    world = make_world()
    first = world.submit([2] * 10, max_tokens=15, ignore_eos=True)
    world.run()
    history = [2] * 10 + world.outcome(first)[0]
    second = world.submit([*history, 5, 6], max_tokens=5, ignore_eos=True)
    world.run()
    assert world.entry(second).cached == 24  # of 25, the last of which was never computed
    assert_all_as_expected(world, [second])


def test_other_salts_and_a_switched_off_cache_find_nothing() -> None:
    world = make_world()
    for salt in ("", "a", "b"):
        request_id = world.submit([2] * 13, max_tokens=2, salt=salt)
        world.run()
        assert world.entry(request_id).cached == 0
    world = make_world(has_prefix_cache=False)
    for _ in range(2):
        request_id = world.submit([2] * 13, max_tokens=2)
        world.run()
        assert world.entry(request_id).cached == 0


def test_a_prompt_is_findable_only_once_all_ranks_have_computed_it() -> None:
    world = make_world(tp_size=2)
    world.submit([2] * 13, max_tokens=20, ignore_eos=True)
    world.send()
    world.work()
    world.deliver(rank=0)
    early = world.submit([2] * 13, max_tokens=2, ignore_eos=True)
    world.send()
    assert world.request(early).num_cached == 0
    world.deliver(rank=1)
    late = world.submit([2] * 13, max_tokens=2, ignore_eos=True)
    world.run()
    assert world.entry(late).cached == 12
