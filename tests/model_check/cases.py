"""Small worlds and the assertions that tests of the scheduler share."""

from model_check.world import World
from nvserve.core.limits import Limits
from nvserve.protocol.messages import Refused


def make_limits(**changes: object) -> Limits:
    """Small limits: blocks of 4 tokens, 4 slots, a context of 64."""
    fields: dict[str, object] = {
        "vocab_size": 97,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_queued_requests": 100,
        "block_size": 4,
        "eos_token_ids": frozenset({1}),
    }
    return Limits(**(fields | changes))  # type: ignore[arg-type]


def make_world(*, num_blocks: int = 65, tp_size: int = 1, **limits: object) -> World:
    return World(make_limits(**limits), num_blocks=num_blocks, tp_size=tp_size)


def refusal(world: World, request_id: int) -> Refused:
    answer = world.entry(request_id).answer
    assert isinstance(answer, Refused)
    return answer


def assert_all_as_expected(world: World, request_ids: list[int]) -> None:
    for request_id in request_ids:
        assert world.outcome(request_id) == world.expected(request_id)


def assert_empty(world: World) -> None:
    """Nothing is left behind: every block free, every slot too."""
    assert world.scheduler.batch is not None
    pool = world.scheduler.batch.tables.pool
    assert pool.num_free == pool.num_usable
    assert world.scheduler.batch.num_free_slots == world.limits.max_num_seqs
    assert not world.journal


def first_tokens(count: int) -> list[int]:
    """What a request of prompt [5] and seed 7 gets."""
    world = make_world()
    request_id = world.submit([5], max_tokens=count, ignore_eos=True)
    world.run()
    return world.outcome(request_id)[0]
