"""Thousands of fault schedules against a simulated launch: every request gets its one right end."""

import os
import random
import time
from collections.abc import Callable

import pytest
from model_check.cases import make_limits
from model_check.fake_worker import next_token
from simulation.cluster import CORE_POISON, Cluster
from simulation.frontend import Client
from simulation.workers import MODEL_VOCABULARY, POISON

from nvserve.core.limits import Limits
from nvserve.protocol.control import Role, State
from nvserve.protocol.messages import FinishReason
from nvserve.protocol.sampling import SamplingParams

LIMIT_S = 400.0  # of virtual time, after which something hangs
LIMITS = make_limits(vocab_size=100, max_num_seqs=4, eos_token_ids=frozenset())
MESSAGES = ("SchedulerOutput", "ModelOutput", "StepDone", "Submit", "Accepted", "Emits", "Abort")
SEEDS = 120
LOOK_S = 0.05
WIDE_LIMITS = make_limits(vocab_size=100, max_num_seqs=16, eos_token_ids=frozenset())
MAX_CRASHES = 6  # of 16 suspects, 8, 4, 2, and one twice


def expected(client: Client) -> list[int]:
    ids: list[int] = []
    while len(ids) < client.sampling.max_tokens:
        ids.append(next_token(client.prompt + ids, client.seed, MODEL_VOCABULARY))
    return ids


class Schedule:
    """Requests and faults drawn from a seed."""

    def __init__(
        self,
        seed: int,
        limits: Limits = LIMITS,
        *,
        num_blocks: int = 40,
        max_restarts: int = 1000,
    ) -> None:
        self.chance = random.Random(seed)
        tp_size = self.chance.choice([1, 2, 2, 3])
        self.cluster = Cluster(
            seed, limits, tp_size=tp_size, num_blocks=num_blocks, max_restarts=max_restarts
        )
        self.poisonous: list[Client] = []
        self.num_blamed = 0  # faults that look like a request's own
        self.told: list[str] = []

    def run(self, num_faults: int) -> None:
        cluster, chance = self.cluster, self.chance
        cluster.start()
        cluster.clock.run(20.0, lambda: cluster.policy.was_ready)
        assert cluster.policy.was_ready, cluster.notes
        now = cluster.clock.now
        for _ in range(chance.randrange(1, 9)):
            self.at(chance.random() * 0.5, lambda: cluster.submit(self.draw_client()))
        for _ in range(num_faults):
            fault = chance.choice(self.faults())
            self.at(chance.choice([0.2, 0.2, 1.0, 6.0]) * chance.random(), fault)
        cluster.clock.run(now + 0.6, lambda: False)
        cluster.run(now + LIMIT_S)

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        self.cluster.clock.after(delay_s, action)

    def draw_client(self, *, poison: int = -1) -> Client:
        chance = self.chance
        prompt = [chance.randrange(5, 20) for _ in range(chance.randrange(1, 20))]
        if poison >= 0:
            prompt[chance.randrange(len(prompt))] = poison
        sampling = SamplingParams(max_tokens=chance.randrange(1, 25), ignore_eos=True)
        return Client(prompt, sampling, seed=chance.randrange(5))

    # -- faults

    def faults(self) -> list[Callable[[], None]]:
        return [
            self.kill_worker,
            self.kill_worker,
            self.kill_core,
            self.kill_spare,
            self.kill_frontend,
            self.stop,
            self.pause,
            self.break_step,
            self.break_message,
            self.break_message,
            self.poison,
            self.plan_restart,
        ]

    def victim(self) -> object:
        role = self.chance.choice([Role.WORKER, Role.WORKER, Role.CORE])
        rank = self.chance.randrange(self.cluster.tp_size) if role is Role.WORKER else -1
        return self.cluster.find(role, rank)

    def kill_worker(self) -> None:
        self.kill(Role.WORKER, self.chance.randrange(self.cluster.tp_size))

    def kill_core(self) -> None:
        self.kill(Role.CORE)

    def kill_core_outright(self) -> None:
        """From outside, whatever the seed says."""
        core = self.cluster.find(Role.CORE)
        if core is not None:
            self.cluster.kill(core)

    def kill_spare(self) -> None:
        self.kill(Role.WORKER)

    def kill_frontend(self) -> None:
        self.kill(Role.FRONTEND)

    def kill(self, role: Role, rank: int = -1) -> None:
        process = self.cluster.find(role, rank)
        self.told.append(f"{self.cluster.clock.now:.2f} kill {role} {rank}")
        if process is not None:
            is_crash = self.chance.random() < 0.2
            self.num_blamed += is_crash
            self.cluster.kill(process, is_crash=is_crash)

    def stop(self) -> None:
        role = self.chance.choice(list(Role))
        rank = self.chance.randrange(self.cluster.tp_size) if role is Role.WORKER else -1
        process = self.cluster.find(role, rank)
        self.told.append(f"{self.cluster.clock.now:.2f} stop {role} {rank}")
        if process is not None and process.stopped_at is None:
            process.stopped_at = self.cluster.clock.now

    def pause(self) -> None:
        process = self.cluster.find(Role.CORE)
        if process is not None and process.stopped_at is None:
            self.told.append(f"{self.cluster.clock.now:.2f} pause core")
            process.stopped_at = self.cluster.clock.now
            self.at(2.0, process.go_on)

    def break_step(self) -> None:
        self.told.append(f"{self.cluster.clock.now:.2f} break a step")
        self.num_blamed += 1
        self.cluster.step_faults.append(self.chance.choice(["nan", "exception", "shape"]))

    def break_message(self) -> None:
        fault = (self.chance.choice(["drop", "duplicate", "delay"]), self.chance.choice(MESSAGES))
        self.told.append(f"{self.cluster.clock.now:.2f} {fault}")
        self.cluster.message_faults.armed.append(fault)

    def poison(self) -> None:
        client = self.draw_client(poison=self.chance.choice([POISON, CORE_POISON]))
        self.told.append(f"{self.cluster.clock.now:.2f} poison {client.prompt}")
        self.poisonous.append(client)
        self.cluster.submit(client)

    def plan_restart(self) -> None:
        name = self.chance.choice(["worker 0", "core"])
        number, actions = self.cluster.policy.restart(name, self.cluster.clock.now)
        self.told.append(f"{self.cluster.clock.now:.2f} planned restart of {name}: {number}")
        self.cluster.obey(actions)

    # -- the oracle

    def judge(self) -> None:
        cluster = self.cluster
        story = "\n".join(self.told + cluster.notes[-20:])
        if cluster.end is not None:
            assert cluster.end.code != 0, story
            return
        for client in cluster.clients:
            assert not client.is_open, f"never ends: {client}\n{story}"
            if client.is_broken or client.is_refused:
                continue
            assert len(client.finishes) == 1, f"{client}\n{story}"
            if client.finishes == [FinishReason.ENGINE_FAULT]:
                is_unlucky = self.num_blamed + len(self.poisonous) >= 2  # there alone at both
                assert client in self.poisonous or is_unlucky, f"without guilt: {client}\n{story}"
                continue
            assert client not in self.poisonous, f"{client}\n{story}"
            assert client.ids == expected(client), f"{client}\n{story}"


@pytest.mark.parametrize("seed", range(12))
def test_a_search_for_what_kills_workers_outlives_core(seed: int) -> None:
    """Core is killed after some of the crashes of workers, in the recovery or soon after it."""
    schedule = Schedule(seed, WIDE_LIMITS, num_blocks=100)
    cluster, chance = schedule.cluster, schedule.chance
    schedule.run(0)
    others = [schedule.draw_client() for _ in range(15)]
    poison = schedule.draw_client(poison=POISON)
    schedule.poisonous.append(poison)
    for client in chance.sample([*others, poison], 16):
        cluster.submit(client)
    deadly = chance.choice([(1, 3), (2, 4), (3, 5)])  # no rung of the ladder is met too often
    begun = cluster.clock.now
    num_seen = 0
    for tick in range(round(LIMIT_S / LOOK_S)):
        cluster.run(begun + tick * LOOK_S)
        num_crashes = sum(note.endswith(" crashed") for note in cluster.notes)
        if num_crashes > num_seen and num_crashes in deadly:
            cluster.clock.after(chance.uniform(0.0, 0.3), schedule.kill_core_outright)
        num_seen = num_crashes
    schedule.judge()
    assert poison.finishes == [FinishReason.ENGINE_FAULT], cluster.notes
    assert all(client.ids == expected(client) for client in others)
    assert num_seen <= MAX_CRASHES, cluster.notes


@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize("role", [Role.WORKER, Role.CORE])
def test_one_fault_is_one_death_however_long_the_dead_take(role: Role, fault: str) -> None:
    for seed in range(40):
        schedule = Schedule(seed, max_restarts=1)
        cluster = schedule.cluster
        schedule.run(0)
        for _ in range(4):
            cluster.submit(schedule.draw_client())

        def strike(cluster: Cluster = cluster) -> None:
            victim = cluster.find(role, cluster.tp_size - 1 if role is Role.WORKER else -1)
            assert victim is not None
            if fault == "kill":
                cluster.kill(victim)
            else:
                victim.stopped_at = cluster.clock.now

        schedule.at(0.02, strike)
        cluster.run(cluster.clock.now + LIMIT_S)
        schedule.judge()
        assert cluster.policy.state is State.READY, f"seed {seed}: {cluster.notes}"
        assert cluster.policy.formation.epoch == 1, f"seed {seed}: {cluster.notes}"


@pytest.mark.parametrize("num_faults", [0, 1, 2, 4])
def test_every_request_ends_once_and_right(num_faults: int) -> None:
    scale = float(os.environ.get("NVSERVE_TEST_SCALE", "0.1"))
    first = int(os.environ.get("NVSERVE_CHAOS_SEED", "0"))
    begun, num_ended = time.process_time(), 0
    count = max(20, round(10 * SEEDS * scale))
    for seed in range(first, first + count):
        schedule = Schedule(seed)
        try:
            schedule.run(num_faults)
            schedule.judge()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        num_ended += schedule.cluster.end is not None
    spent_s = time.process_time() - begun
    print(f"{count} schedules in {spent_s:.1f} s of CPU; {num_ended} gave up")
    assert num_ended <= count // 10
