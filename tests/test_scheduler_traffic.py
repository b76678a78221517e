"""100 000 scheduler steps of random traffic against the brute-force answer.

NVSERVE_TEST_SCALE above 0.1 makes it proportionally more.
"""

import os

import pytest
from model_check.cases import make_limits
from model_check.traffic import Traffic
from model_check.world import World

NUM_WORLDS = 24 * 6
SCALE = max(1.0, 10 * float(os.environ.get("NVSERVE_TEST_SCALE", "0.1")))
NUM_STEPS = int(100_000 * SCALE) // NUM_WORLDS + 1  # a world


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("has_prefix_cache", [True, False])
@pytest.mark.parametrize("budget", [1, 7, 16])
@pytest.mark.parametrize("num_blocks", [18, 40])
def test_random_traffic_gets_its_reference_tokens(
    budget: int, has_prefix_cache: bool, tp_size: int, num_blocks: int
) -> None:
    limits = make_limits(
        max_num_batched_tokens=budget, has_prefix_cache=has_prefix_cache, max_bypasses=3
    )
    num_preempted = num_hit_tokens = 0
    for seed in range(6):
        world = World(limits, num_blocks=num_blocks, tp_size=tp_size)
        Traffic(world, seed).run(NUM_STEPS)
        world.restart_core()  # with nothing left to replay; adds up the counters
        assert world.num_steps >= NUM_STEPS
        num_preempted += world.num_preempted
        num_hit_tokens += world.num_hit_tokens
    if num_blocks == 18 and budget > 1:  # a budget of 1 runs about one request at a time
        assert num_preempted > 100, "the pool was never short"
    assert (num_hit_tokens > 0) == has_prefix_cache


def test_equal_events_give_equal_decisions_whatever_the_hash_key() -> None:
    checksums = set()
    for hash_key in (b"one", b"other"):
        world = World(make_limits(), num_blocks=18, hash_key=hash_key)
        Traffic(world, seed=3).run(500)
        checksums.add(world.worker.frames_checksum)
    assert len(checksums) == 1
