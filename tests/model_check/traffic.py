"""Seeded random traffic over a World: everything that can happen, in any order, with any lag."""

import random
from collections.abc import Callable

from model_check.fake_worker import next_token
from model_check.world import World
from nvserve.protocol.messages import FinishReason, ModelOutput, StepDone, unpack_ids

PREFIXES = [[2] * 24, [3] * 24, [2] * 8 + [4] * 16]  # shared, so that prefix hits are common


class Traffic:
    """Draws one event after another; each leaves the world checked."""

    def __init__(self, world: World, seed: int, *, max_live: int = 9) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.max_live = max_live
        self.events: list[tuple[Callable[[], None], int]] = [
            (self.submit, 12),
            (self.plan, 40),
            (self.work, 32),
            (self.deliver, 40),
            (self.end, 2),
            (self.wait, 1),
            (self.repeat_submit, 1),
            (self.repeat_report, 1),
            (self.block_frontend, 1),
        ]
        self.faults: list[Callable[[], object]] = [
            world.start_epoch,
            world.restart_core,
            world.restart_frontend,
            world.fail_step,
        ]
        self.last_report: ModelOutput | StepDone | None = None

    def run(self, num_steps: int, *, fault_rate: float = 0.002) -> None:
        """Events until so many steps were planned; then let everything end."""
        world = self.world
        events = [event for event, _ in self.events]
        weights = [weight for _, weight in self.events]
        end = world.num_steps + num_steps
        for count in range(100 * num_steps):
            if world.num_steps >= end:
                break
            if self.random.random() < fault_rate:
                self.fault()
            else:
                self.random.choices(events, weights)[0]()
            if count % 4 == 0:
                world.scheduler.check()
        else:
            raise AssertionError(f"only {world.num_steps} steps in {100 * num_steps} events")
        self.finish()

    def finish(self) -> None:
        """No more requests: all there are must end, and leave nothing behind."""
        world = self.world
        world.is_frontend_blocked = False
        world.flush()
        world.run()
        world.flush()
        assert not world.journal, f"never finished: {world.journal}"
        assert world.scheduler.batch is not None
        pool = world.scheduler.batch.tables.pool
        assert pool.num_free == pool.num_usable

    # -- events

    def submit(self) -> None:
        draw = self.random
        if len(self.world.journal) >= self.max_live:
            return
        prompt = draw.choice(PREFIXES)[: draw.randrange(1, 25)]
        if self.world.closed and draw.random() < 0.3:  # the next turn of a conversation
            prompt = self.conversation()
        prompt = prompt + [draw.randrange(5, 20) for _ in range(draw.choice([0, 0, 1, 3, 8]))]
        max_tokens = draw.choice([0, 1, 2, 5, 12, 20, 40])
        seed = draw.randrange(3)
        self.world.submit(
            prompt,
            seed=seed,
            priority=draw.choice([0, 0, 0, 0, -1, 1]),
            deadline=self.world.now + draw.random() if draw.random() < 0.05 else 0.0,
            salt=draw.choice(["", "", "", "x"]),
            max_tokens=max_tokens,
            min_tokens=draw.choice([0, 0, min(3, max_tokens)]),
            ignore_eos=draw.random() < 0.7,
            stop_token_ids=[draw.randrange(97)] if draw.random() < 0.2 else [],
            logprobs=draw.choice([-1, -1, -1, 0, 2]),
            prompt_logprobs=draw.choice([-1] * 9 + [0, 1]) if max_tokens else -1,
            presence_penalty=draw.choice([0.0, 0.0, 0.5]),
            bad_words=self.bad_words(prompt, seed) if draw.random() < 0.15 else [],
            grammar="every third" if draw.random() < 0.15 else "",
        )

    def bad_words(self, prompt: list[int], seed: int) -> list[list[int]]:
        """Words the model would say, one of them begun by the prompt."""
        text = list(prompt)
        for _ in range(8):
            text.append(next_token(text, seed, self.world.limits.vocab_size))
        output = text[len(prompt) :]
        return [text[len(prompt) - 1 : len(prompt) + 1], output[2:4], output[4:7]]

    def conversation(self) -> list[int]:
        """Prompt and output of one of the last requests that ended."""
        recent = list(self.world.closed.values())[-8:]
        entry = self.random.choice(recent)
        return (unpack_ids(entry.submit.prompt) + entry.emitted)[:40]

    def plan(self) -> None:
        self.world.send()

    def work(self) -> None:
        self.world.work()

    def deliver(self) -> None:
        rank = self.random.randrange(self.world.tp_size)
        if self.world.reports[rank]:
            self.last_report = self.world.reports[rank][0]
        self.world.deliver(rank)

    def end(self) -> None:
        request_id = self.random.randrange(max(0, self.world.next_id - 12), self.world.next_id + 2)
        self.world.end(request_id, self.random.choice([FinishReason.ABORT, FinishReason.STOP]))

    def wait(self) -> None:
        self.world.expire(self.random.random() * 0.2)

    def repeat_submit(self) -> None:
        for entry in list(self.world.journal.values())[:1]:
            if entry.submit.request_id in self.world.scheduler.requests:
                self.world.scheduler.submit(entry.submit, self.world.matcher(entry.submit))
                self.world.flush()

    def repeat_report(self) -> None:
        """A report that was delivered before, perhaps in an epoch that is over."""
        report = self.last_report
        if report is None:
            return
        dropped = self.world.scheduler.counters.dropped
        assert self.world.scheduler.report(report, self.world.now) is None
        assert self.world.scheduler.counters.dropped == dropped + 1

    def block_frontend(self) -> None:
        self.world.is_frontend_blocked = not self.world.is_frontend_blocked
        self.world.flush()

    def fault(self) -> None:
        fault = self.random.choice(self.faults)
        if fault == self.world.restart_core:
            self.last_report = None  # a new core cannot know that it was taken before
        fault()
