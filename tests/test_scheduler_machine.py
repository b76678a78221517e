"""The scheduler with a fake worker as a state machine; hypothesis shrinks what it breaks."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from model_check.cases import make_limits
from model_check.world import World

from nvserve.protocol.messages import FinishReason, StepFailed

LONGEST = 20


class SchedulerMachine(RuleBasedStateMachine):
    """Every rule is something that can happen to core; the world checks what comes out."""

    @initialize(
        budget=st.sampled_from([1, 7, 16]),
        has_prefix_cache=st.booleans(),
        num_blocks=st.integers(LONGEST // 2 + 1, 30),
        tp_size=st.integers(1, 2),
    )
    def start(self, budget: int, has_prefix_cache: bool, num_blocks: int, tp_size: int) -> None:
        limits = make_limits(
            max_num_batched_tokens=budget,
            has_prefix_cache=has_prefix_cache,
            max_model_len=LONGEST,
            block_size=2,
            max_num_seqs=3,
            max_bypasses=2,
        )
        self.world = World(limits, num_blocks=num_blocks, tp_size=tp_size)

    @rule(
        length=st.integers(1, LONGEST - 1),
        token=st.integers(2, 3),
        max_tokens=st.integers(0, LONGEST),
        priority=st.integers(-1, 1),
        has_grammar=st.booleans(),
        strikes=st.sampled_from([0, 0, 0, 1]),
        timeout_s=st.sampled_from([0.0, 0.0, 1.0, 2.0]),
    )
    def submit(
        self,
        length: int,
        token: int,
        max_tokens: int,
        priority: int,
        has_grammar: bool,
        strikes: int,
        timeout_s: float,
    ) -> None:
        self.world.submit(
            [token] * length,
            max_tokens=max_tokens,
            priority=priority,
            strikes=strikes,
            deadline=self.world.now + timeout_s if timeout_s else 0.0,
            grammar="every third" if has_grammar else "",
        )

    @rule(count=st.integers(1, 6))
    def advance(self, count: int) -> None:
        for _ in range(count):
            self.world.send()
            self.world.send()
            self.world.work()
            for rank in range(self.world.tp_size):
                self.world.deliver(rank)

    @rule()
    def plan(self) -> None:
        self.world.send()

    @rule()
    def work(self) -> None:
        self.world.work()

    @rule(rank=st.integers(0, 1))
    def deliver(self, rank: int) -> None:
        self.world.deliver(rank % self.world.tp_size)

    @rule(back=st.integers(0, 5), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    def end(self, back: int, reason: FinishReason) -> None:
        self.world.end(self.world.next_id - back, reason)

    @rule(is_blamed=st.booleans())
    def start_epoch(self, is_blamed: bool) -> None:
        self.world.start_epoch(is_blamed=is_blamed)

    @precondition(lambda self: self.world.scheduler.ledger is not None)
    @rule(is_peer_lost=st.booleans())
    def break_epoch(self, is_peer_lost: bool) -> None:
        assert self.world.scheduler.ledger is not None
        step = self.world.scheduler.ledger.num_committed
        self.world.break_epoch(step, is_peer_lost=is_peer_lost)

    @precondition(lambda self: self.world.scheduler.ledger is None)
    @rule(back=st.integers(0, 1))
    def report_late(self, back: int) -> None:
        failed = StepFailed(self.world.epoch - back, 0, 0, "late")
        self.world.scheduler.report(failed, self.world.now)
        self.world.flush()

    @rule(seconds=st.sampled_from([0.5, 1.5]))
    def expire(self, seconds: float) -> None:
        self.world.expire(seconds)

    @rule(length=st.integers(1, LONGEST - 1))
    def compile_too_long(self, length: int) -> None:
        submit = self.world.make_submit(
            [2] * length, grammar="every third", deadline=self.world.now
        )
        self.world.expire(0.5, [submit])

    @rule(has_epoch=st.booleans())
    def restart_core(self, has_epoch: bool) -> None:
        self.world.restart_core(has_epoch=has_epoch)

    @rule()
    def restart_frontend(self) -> None:
        self.world.restart_frontend()

    @rule(is_blocked=st.booleans())
    def block_frontend(self, is_blocked: bool) -> None:
        self.world.is_frontend_blocked = is_blocked
        self.world.flush()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.is_frontend_blocked = False
            self.world.flush()
            if self.world.scheduler.ledger is None:
                self.world.start_epoch()
            self.world.run()
            self.world.flush()
            assert not self.world.journal, "a request has no final emit"


SchedulerMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSchedulerMachine = SchedulerMachine.TestCase
