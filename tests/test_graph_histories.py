"""Random histories of core and worker: answers and KV stay those of each request alone.

Requests share prefixes, end at block borders, are aborted, preempted and asked again; graphs are
captured in idle and busy moments, epochs end in the middle. CI's seeds are fixed; a larger
NVSERVE_TEST_SCALE runs proportionally more.
"""

import os
import random
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Final

import msgspec
import pytest
import torch
from history_rig import (
    KINDS,
    MAX_NEW,
    MAX_SEQS,
    VOCAB,
    Joint,
    Output,
    RecordingPool,
    Reference,
    Rig,
    make_limits,
    read_kv,
    submit,
    use_graphs,
)

from nvserve.core.errors import EpochFault
from nvserve.core.request import Request
from nvserve.core.scheduler import Scheduler
from nvserve.protocol.messages import FinishReason, Submit

NUM_SEEDS: Final = 12  # for each block size
SCALE: Final = float(os.environ.get("NVSERVE_TEST_SCALE", "0.1"))
MAX_TURNS: Final = 5000  # of one wave; none takes a tenth of that
LONGEST: Final = 48  # prompt
BORDERS: Final = (-1, 0, 1)


@dataclass
class Asked:
    """A request of a history, and what it must answer."""

    message: Submit
    prompt: list[int]
    kind: str
    alone: Output  # of MAX_NEW tokens
    expected: list[int]
    finish: FinishReason
    emitted: list[int]  # before it came: it is the replay of a core that died
    is_aborted: bool = False


class Asking:
    """Draws requests: of a few prompts, again and again, and of every kind."""

    def __init__(self, draw: random.Random, reference: Reference, block_size: int) -> None:
        self._draw = draw
        self._reference = reference
        self._block_size = block_size
        self._prompts = self._make_prompts()

    def _make_prompts(self) -> list[list[int]]:
        """Of lengths around borders; some begin alike, some go on where others end."""
        draw, size = self._draw, self._block_size
        bases = [random.Random(base).choices(range(VOCAB), k=LONGEST) for base in range(3)]
        bases[1][: 2 * size] = bases[0][: 2 * size]
        bases[2][: size + 2] = bases[0][: size + 2]
        prompts = []
        for _ in range(draw.randint(2, 4)):
            num_blocks = draw.choice([0, 1, 2, 3, 5, LONGEST // size])
            length = max(1, num_blocks * size + draw.choice(BORDERS))
            prompts.append(draw.choice(bases)[: min(length, LONGEST)])
        for prompt in prompts[:2]:
            answered = self._reference.greedy(prompt)
            more = (prompt + answered)[: draw.choice([len(prompt) + 1, len(prompt) + size + 1])]
            if draw.random() < 0.5:
                prompts.append(more[:LONGEST])
        return prompts

    def ask(self, request_id: int) -> Asked:
        draw, reference = self._draw, self._reference
        prompt, kind = draw.choice(self._prompts), draw.choice([*["greedy"] * 8, *KINDS])
        seed = draw.randrange(2) if kind.startswith(("warm", "top")) else 0
        alone = reference.output(prompt, kind, seed)
        max_tokens, stops = self._draw_end(prompt, alone.tokens)
        ends = [index for index, token in enumerate(alone.tokens[:max_tokens]) if token in stops]
        expected = alone.tokens[: min(ends) + 1 if ends else max_tokens]
        is_replay = draw.random() < 0.1 and kind != "scores"
        emitted = expected[: draw.randrange(len(expected))] if is_replay else []
        sampling = msgspec.structs.replace(
            reference.sampling(prompt, kind), max_tokens=max_tokens, stop_token_ids=stops
        )
        priority = draw.choice([0, 0, 0, 1])
        message = submit(request_id, prompt, sampling, seed, emitted, priority=priority)
        finish = FinishReason.STOP if ends else FinishReason.LENGTH
        return Asked(message, prompt, kind, alone, expected, finish, emitted)

    def _draw_end(self, prompt: list[int], tokens: list[int]) -> tuple[int, list[int]]:
        """max_tokens, often up to a border, and perhaps a token to stop at."""
        draw, size = self._draw, self._block_size
        max_tokens = max(draw.randint(1, MAX_NEW), draw.randint(1, MAX_NEW))
        if draw.random() < 0.6:
            border = (len(prompt) + max_tokens) // size * size + draw.choice((*BORDERS, 1))
            max_tokens = min(MAX_NEW, max(1, border - len(prompt)))
        return max_tokens, [draw.choice(tokens)] if draw.random() < 0.25 else []


class Audit:
    """Holds what core believes of blocks against what is in them, at any time."""

    def __init__(self, joint: Joint, reference: Reference) -> None:
        self._joint = joint
        self._reference = reference
        self._block_size = joint.device.block_size
        self._known: dict[bytes, tuple[list[int], int]] = {}  # hash -> tokens, index of the block
        self.num_findable = 0

    def learn(self, tokens: list[int]) -> None:
        """Know the hashes of the blocks of these tokens."""
        hashes: list[bytes] = []
        hasher = self._joint.scheduler._hasher
        assert hasher is not None
        hasher.extend(hashes, array("i", tokens), len(tokens) // self._block_size, "")
        for index, digest in enumerate(hashes):
            self._known.setdefault(digest, (tokens, index))

    def check(self, asked: dict[int, Asked]) -> None:
        """Blocks that may be shared, and those of who runs."""
        batch = self._joint.scheduler.batch
        if batch is None or self._joint.scheduler.ledger is None:
            return
        blocks, expected = list[int](), list[torch.Tensor]()
        size = self._block_size
        for digest, block in batch.tables._cache._block_of.items():
            tokens, index = self._known[digest]
            blocks.append(block)
            expected.append(self._reference.kv(tokens)[index * size : (index + 1) * size])
        if blocks:
            found = read_kv(self._joint.runner, blocks)
            self._compare(found, torch.cat(expected), f"findable blocks {blocks}")
        for request in batch.running.values():
            self._check_running(request, asked[request.request_id])
        self.num_findable += len(blocks)

    def _check_running(self, request: Request, asked: Asked) -> None:
        whole = asked.prompt + asked.alone.tokens
        assert request.tokens.tolist() == whole[: len(request.tokens)], asked
        found = read_kv(self._joint.runner, request.blocks)[: request.num_committed]
        expected = self._reference.kv(whole)[: request.num_committed]
        self._compare(found, expected, f"request {request.request_id}")

    def _compare(self, found: torch.Tensor, expected: torch.Tensor, whose: str) -> None:
        is_wrong = ~torch.isclose(found, expected, rtol=1e-3, atol=1e-3).all(dim=1)
        assert not is_wrong.any(), f"{whose}: KV of tokens {is_wrong.nonzero().flatten().tolist()}"


class History:
    """One seed's requests, limits, graphs and order of events."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self._draw = draw = random.Random(seed)
        self._asking = Asking(draw, rig.reference, rig.device.block_size)
        max_blocks = -(-(LONGEST + MAX_NEW - 1) // rig.device.block_size)  # of one request
        self._num_blocks = 1 + max_blocks + draw.choice([0, 0, 1, 2, max_blocks])
        limits = make_limits(
            rig.device,
            max_num_seqs=draw.choice([1, 3, MAX_SEQS, MAX_SEQS]),
            max_num_batched_tokens=draw.choice([2, 7, 16, 33, 64, 256]),
            max_bypasses=draw.choice([0, 3, 32]),
        )
        self._joint = Joint(rig.device, limits, self._num_blocks)
        self._runner = self._joint.runner
        self._runner.drop_graphs()
        self._pool = RecordingPool(draw, draw.choice([0.0, 0.1, 1.0]))
        self._audit = Audit(self._joint, rig.reference)
        self._asked: dict[int, Asked] = {}
        self._num_blamed = 0
        self.counts: Counter[str] = Counter()

    @property
    def _scheduler(self) -> Scheduler:
        return self._joint.scheduler

    def run(self) -> None:
        """Waves of requests, with idle moments between them."""
        for _ in range(self._draw.randint(2, 8)):
            self._begin_graphs()
            self._run_wave(self._draw.randint(1, 6))
            if self._draw.random() < 0.8:
                self._drain()
            for _ in range(self._draw.randrange(4)):
                self._capture()
            self._check()
        self._drain()
        self._check_end()
        self._runner.drop_graphs()

    def _begin_graphs(self) -> None:
        """Now and then as after a start, with some of the buckets captured, or with none ever."""
        if self._draw.random() < 0.5 and self._runner.graphs is not None:
            return
        self._runner.drop_graphs()
        if self._draw.random() < 0.9:
            use_graphs(self._runner, self._pool)
            for _ in range(self._draw.choice([0, 1, 1, 5, 7, 9])):
                self._runner.capture_next()

    def _run_wave(self, num_to_ask: int) -> None:
        draw, joint = self._draw, self._joint
        weights = {
            self._ask: draw.choice([0.1, 1.0, 5.0]),
            self._plan: draw.choice([1.0, 5.0]),
            self._launch: draw.choice([1.0, 5.0]),
            self._report: draw.choice([1.0, 5.0]),
            self._capture: draw.choice([0.0, 0.1, 0.5]),
            self._abort: draw.choice([0.0, 0.0, 0.05]),
            self._end_epoch: draw.choice([0.0, 0.0, 0.02]),
            self._begin_epoch: 0.5,
            self._check: 0.05,
        }
        last = len(self._asked) + num_to_ask
        for _ in range(MAX_TURNS):
            if len(self._asked) == last and not self._scheduler.requests:
                return
            has_epoch = self._scheduler.ledger is not None
            may = {
                self._ask: len(self._asked) < last,
                self._launch: bool(joint.steps),
                self._report: bool(joint.reports),
                self._abort: bool(self._scheduler.requests),
                self._end_epoch: has_epoch,
                self._begin_epoch: not has_epoch,
            }
            events = [event for event in weights if may.get(event, True)]
            (event,) = draw.choices(events, [weights[event] for event in events])
            event()
            self._scheduler.check()
        raise AssertionError(f"still there: {self._scheduler.requests}")

    # -- events

    def _ask(self) -> None:
        request_id = len(self._asked) + 1
        asked = self._asked[request_id] = self._asking.ask(request_id)
        self._audit.learn(asked.prompt + asked.alone.tokens)
        self._joint.submit(asked.message, asked.emitted)

    def _plan(self) -> None:
        self._joint.plan()

    def _launch(self) -> None:
        num_replays = self._pool.num_replays
        self._joint.launch()
        self.counts["replays"] += self._pool.num_replays - num_replays
        batch = self._runner.batch
        assert not batch.lengths[batch.scratch], "scratch grew"
        assert (batch.rows[len(batch.decoding) :] == batch.scratch).all()

    def _report(self) -> None:
        self._joint.report()

    def _capture(self) -> None:
        """No step is launched, but the decode list may be anyone's."""
        num_graphs = len(self._pool.graphs)
        self._runner.capture_next()
        if len(self._pool.graphs) > num_graphs:
            self.counts["captures with rows"] += bool(self._runner.batch.decoding)
            self._check()

    def _abort(self) -> None:
        request_id = self._draw.choice(list(self._scheduler.requests))
        self._asked[request_id].is_aborted = True
        self._scheduler.end([request_id], FinishReason.ABORT)
        self._joint.collect()
        self.counts["aborts"] += 1

    def _end_epoch(self) -> None:
        """At once or not; until the next begins the worker goes on with the steps it got."""
        is_blamed = self._draw.random() < 0.3
        self._num_blamed += is_blamed
        if self._draw.random() < 0.5:
            self._scheduler.fail_epoch(EpochFault(0, 0, "drawn", is_blamed=is_blamed))
        else:
            self._joint.begin_epoch(is_blamed=is_blamed)
        self._joint.collect()
        self.counts["epochs"] += 1

    def _begin_epoch(self) -> None:
        self._joint.begin_epoch()

    def _drain(self) -> None:
        if self._scheduler.ledger is None:
            self._begin_epoch()
        while self._joint.steps or self._joint.reports or self._joint.plan():
            if self._joint.reports:
                self._report()
            else:
                self._launch()

    # -- checks

    def _check(self) -> None:
        self._audit.check(self._asked)

    def _check_end(self) -> None:
        self._check()
        batch, counters = self._scheduler.batch, self._scheduler.counters
        assert batch is not None
        pool = batch.tables.pool
        assert pool.num_free == pool.num_usable == self._num_blocks - 1
        for request_id, asked in self._asked.items():
            self._check_output(asked, self._joint.outputs[request_id])
        counters.note_cache(batch.tables)
        self.counts["preemptions"] += counters.preempted
        self.counts["hit tokens"] += counters.hit_tokens
        self.counts["findable blocks"] += self._audit.num_findable
        self.counts["requests"] += len(self._asked)

    def _check_output(self, asked: Asked, output: Output) -> None:
        assert not output.is_refused, asked
        assert output.tokens == asked.expected[: len(output.tokens)], asked
        chosen = asked.alone.chosen[len(asked.emitted) : len(output.tokens)]
        assert output.chosen == pytest.approx(chosen, abs=1e-3), asked
        scores = asked.alone.scores[: len(output.scores)]
        assert output.scores == pytest.approx(scores, abs=1e-3), asked
        if output.finish is asked.finish:
            assert output.tokens == asked.expected, asked
            assert len(output.scores) == len(asked.alone.scores), asked
            return
        is_condemned = output.finish is FinishReason.ENGINE_FAULT and self._num_blamed > 1
        is_aborted = output.finish is FinishReason.ABORT and asked.is_aborted
        assert is_condemned or is_aborted, (asked, output)


def run_history(rig: Rig, seed: int) -> Counter[str]:
    history = History(rig, seed)
    try:
        history.run()
    except BaseException as error:
        error.add_note(f"seed {seed}, blocks of {rig.device.block_size}")
        raise
    return history.counts


@pytest.fixture(scope="module", params=[4, 8])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("rig"), request.param)


def test_every_request_answers_what_it_does_alone(rig: Rig) -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        counts += run_history(rig, seed)
    for what in ("replays", "captures with rows", "preemptions", "hit tokens", "aborts", "epochs"):
        assert counts[what] > 0, f"no history had {what}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(SCALE <= 0.1, reason="CI runs the first seeds only")
def test_every_request_of_many_histories_answers_what_it_does_alone(rig: Rig) -> None:
    for seed in range(NUM_SEEDS, int(1000 * SCALE)):
        run_history(rig, seed)
