"""100 000 scheduler steps of random traffic against the brute-force answer.

NVSERVE_TEST_SCALE multiplies the number of steps; 1 is what CI runs.
"""

import os

import pytest
from model_check.traffic import Traffic
from model_check.world import World, make_limits

SCALE = float(os.environ.get("NVSERVE_TEST_SCALE", "1"))


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
    for seed in range(6):
        world = World(limits, num_blocks=num_blocks, tp_size=tp_size)
        Traffic(world, seed).run(int(700 * SCALE))
        assert len(world.closed) > 0
