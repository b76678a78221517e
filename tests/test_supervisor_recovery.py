"""A death under a virtual clock: who is replaced, who is kept, and the next epoch."""

import pytest
from supervisor_world import broken, make_world, started

from nvserve.protocol.control import (
    Condition,
    EpochBroken,
    EpochReady,
    Peers,
    Ready,
    Role,
    StartEpoch,
    State,
)
from nvserve.scripts.hangs import ChildId

FRONTEND, CORE = Role.FRONTEND, Role.CORE


def test_core_gets_the_smallest_pool_and_later_epochs_the_same_one() -> None:
    world = make_world()
    world.mute = {ChildId(Role.WORKER, 0), ChildId(Role.WORKER, 1)}
    world.start()
    for rank, num_blocks in ((0, 70), (1, 60)):
        child = world.worker(rank)
        world.hear(child, Ready())
        world.hear(child, EpochReady(0, num_blocks))
    assert world.orders(StartEpoch)[-1] == StartEpoch(0, 2, num_kv_blocks=60)
    world.die(world.worker(0))
    assert {order.num_kv_blocks for order in world.orders(StartEpoch) if order.epoch == 1} == {60}


def test_a_rank_without_room_for_the_pool_is_replaced() -> None:
    world = started()
    world.mute = {ChildId(Role.WORKER, 2)}
    world.die(world.worker(0))
    newcomer = world.worker(0)
    world.hear(newcomer, Ready())
    world.hear(newcomer, EpochReady(1, 49))
    assert newcomer in world.killed
    world.check()


def test_core_is_told_only_when_every_rank_has_joined() -> None:
    world = make_world()
    world.mute = {ChildId(Role.WORKER, 1)}
    world.start()
    assert not [o for o in world.sent if o.child.role is CORE and isinstance(o.message, StartEpoch)]
    assert world.policy.state is State.LOADING


def test_the_server_is_not_ready_before_its_frontend() -> None:
    world = make_world()
    world.mute = {ChildId(FRONTEND, 0)}
    world.start()
    assert world.orders(Condition)[-1].state is State.LOADING
    assert world.orders(Peers) == []
    world.hear(ChildId(FRONTEND, 0), Ready())
    world.check()
    assert world.orders(Condition)[-1].state is State.READY


def test_a_worker_death_fences_nobody_and_keeps_the_survivors() -> None:
    world = started(tp_size=4)
    kept = [world.worker(rank) for rank in (0, 1, 3)]
    world.die(world.worker(2))
    world.check()
    assert world.killed == []
    assert [world.worker(rank) for rank in (0, 1, 3)] == kept
    assert world.policy.formation.epoch == 1
    assert world.policy.restarts == {FRONTEND: 0, CORE: 0, Role.WORKER: 1}


def test_the_spare_takes_the_rank_and_another_one_is_started_after_the_recovery() -> None:
    world = started(num_spares=1)
    world.pass_time(0.5)
    [spare] = world.spares()
    world.die(world.worker(0))
    assert world.worker(0) == spare
    assert world.spares() == []
    world.pass_time(0.5)
    assert len(world.spares()) == 1


def test_no_spare_is_started_before_the_server_is_ready() -> None:
    world = make_world(num_spares=1)
    world.mute = {ChildId(Role.WORKER, 0)}
    world.start()
    world.pass_time(5.0)
    assert world.spares() == []


def test_a_spare_that_keeps_dying_is_tried_less_and_less_often() -> None:
    world = started(num_spares=1)
    world.mute = {ChildId(Role.WORKER, life) for life in range(2, 100)}
    num_started = 0
    for _ in range(400):
        world.pass_time(0.25)
        for spare in world.spares():
            num_started += 1
            world.die(spare)
    assert 3 <= num_started <= 8  # at 0, 2, 6, 14, 30, 62 s
    assert world.policy.state is State.READY


@pytest.mark.parametrize("has_core_died", [False, True])
@pytest.mark.parametrize("num_dead", [2, 4, 8])
def test_survivors_are_kept_however_many_die_at_once(num_dead: int, has_core_died: bool) -> None:
    """Each death is told by itself: those that follow belong to the first one's accident."""
    world = started(tp_size=8, max_restarts=1)
    kept = [world.worker(rank) for rank in range(num_dead, 8)]
    dead = [world.worker(rank) for rank in range(num_dead)] + [world.one(CORE)] * has_core_died
    world.mute = set(dead)
    for child in dead:
        world.die(child)
    world.check()
    assert world.policy.state is State.READY
    assert world.killed == []
    assert [world.worker(rank) for rank in range(num_dead, 8)] == kept


def test_survivors_that_one_dead_rank_holds_up_count_as_one_loss() -> None:
    world = started(tp_size=8, max_restarts=2)
    survivors = [world.worker(rank) for rank in range(1, 8)]
    world.mute = set(survivors)
    world.die(world.worker(0))
    world.pass_time(3.0)
    assert world.killed == survivors
    world.check()
    assert world.policy.state is State.READY


def test_a_core_death_keeps_every_worker_and_makes_a_new_epoch() -> None:
    world = started()
    workers = [world.worker(0), world.worker(1)]
    world.die(world.one(CORE))
    world.check()
    assert [world.worker(0), world.worker(1)] == workers
    assert world.one(CORE) == ChildId(CORE, 1)
    assert world.policy.formation.epoch == 1


def test_a_core_that_does_not_take_up_the_epoch_is_replaced() -> None:
    world = started()
    world.mute = {ChildId(CORE, 1)}
    world.die(world.one(CORE))
    world.hear(ChildId(CORE, 1), Ready())
    world.pass_time(11.0)
    assert world.killed == [ChildId(CORE, 1)]
    world.check()


def test_a_frontend_death_makes_no_epoch() -> None:
    world = started()
    world.die(world.one(FRONTEND))
    world.check()
    assert world.policy.formation.epoch == 0
    assert world.orders(Peers)[-1] == Peers(1, 0)
    assert world.orders(Condition)[-1].frontend_restarts_total == 1


def test_a_frontend_and_a_worker_die_at_once() -> None:
    world = started()
    world.die(world.one(FRONTEND))
    world.die(world.worker(0))
    world.check()
    assert world.policy.state is State.READY


def test_a_lost_peer_is_not_blamed_on_the_one_who_noticed() -> None:
    world = started()
    noticed, dead = world.worker(0), world.worker(1)
    broken(world, 0, named=0)
    world.now += 0.01
    world.die(dead)
    world.pass_time(1.0)
    assert world.killed == []
    assert world.worker(0) == noticed
    assert world.policy.formation.epoch == 1
    world.check()


def test_a_broken_epoch_that_names_a_rank_replaces_that_rank() -> None:
    world = started()
    named = world.worker(1)
    broken(world, 0, named=1)
    world.pass_time(0.5)
    assert world.killed == [named]
    world.check()


def test_news_of_an_older_epoch_is_ignored() -> None:
    world = started()
    world.die(world.worker(0))
    world.hear(world.worker(1), EpochBroken(0, -1, 7, "late"))
    world.pass_time(1.0)
    assert world.policy.formation.epoch == 1
