"""`nvserve bench scheduler`: what a decode step costs core, without sockets and without workers.

A steady batch decodes with two steps in flight; timed are plan, encoding the step, committing its
output (decoded from bytes) and encoding the emits. CPU time, so a busy machine matters little.
"""

import gc
import json
import statistics
import time
import zlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from nvserve.core.limits import Limits
from nvserve.core.replies import Replies, Reply
from nvserve.core.scheduler import Scheduler
from nvserve.protocol.codec import decode_from_worker, encode
from nvserve.protocol.messages import Hello, ModelOutput, Submit, pack_ids
from nvserve.protocol.sampling import SamplingParams
from nvserve.scripts.bench.output_file import OutputFile

CASES: Final = [(32, 128), (32, 8192), (256, 128), (256, 8192)]  # requests, prompt tokens each
TARGETS_MS: Final = {32: 0.1, 256: 0.4}  # median of a step by requests
MAX_UNCHANGED_BYTES: Final = 64
BLOCK_SIZE: Final = 16
VOCAB_SIZE: Final = 32_000
PROMPT_BUDGET: Final = 8192  # tokens of a step
WARM_UP_STEPS: Final = 50


@dataclass(frozen=True, slots=True)
class Sample:
    """One step, CPU milliseconds by part, and the size of its message."""

    plan_ms: float
    encode_ms: float
    commit_ms: float
    emit_ms: float
    num_bytes: int
    is_unchanged: bool

    @property
    def total_ms(self) -> float:
        return self.plan_ms + self.encode_ms + self.commit_ms + self.emit_ms


class Bench:
    """A scheduler in the middle of a steady batch, and workers that answer at once."""

    def __init__(self, *, num_requests: int, num_prompt: int, num_steps: int) -> None:
        max_tokens = num_steps + 2 * WARM_UP_STEPS + num_prompt * num_requests // PROMPT_BUDGET
        max_model_len = num_prompt + max_tokens
        limits = Limits(
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            max_num_seqs=num_requests,
            max_num_batched_tokens=PROMPT_BUDGET,
            max_queued_requests=num_requests,
            block_size=BLOCK_SIZE,
            eos_token_ids=frozenset({0}),
        )
        num_blocks = num_requests * (max_model_len // BLOCK_SIZE + 4)
        self._replies: Final = Replies(core_life=0)
        self._replies.restart(0)
        self._scheduler: Final = Scheduler(limits, self._replies, hash_key=b"bench")
        self._scheduler.start_epoch(epoch=0, tp_size=1, num_kv_blocks=num_blocks)
        for number in range(num_requests):
            self._scheduler.submit(_make_submit(number, num_prompt, max_tokens))
        self._answers: Final[deque[bytes]] = deque()  # of steps in flight
        step = self._scheduler.plan()
        assert step is not None
        self._answer(step.step)

    def warm_up(self) -> None:
        """Until everybody decodes and the tables have grown a while."""
        while len(self._scheduler.waiting) or self._num_rows() < len(self._scheduler.requests):
            self.step()
        for _ in range(WARM_UP_STEPS):
            self.step()

    def step(self) -> Sample:
        """Plan the next step while one is in flight, then commit that one."""
        clock = time.process_time
        start = clock()
        output = self._scheduler.plan()
        planned = clock()
        assert output is not None
        frame = encode(output)
        encoded = clock()
        self._answer(output.step)
        resumed = clock()
        message = decode_from_worker(self._answers.popleft())
        assert not isinstance(message, Hello)
        broken = self._scheduler.report(message, 0.0)
        committed = clock()
        self._replies.flush(_send)
        emitted = clock()
        assert broken is None, broken
        return Sample(
            plan_ms=1e3 * (planned - start),
            encode_ms=1e3 * (encoded - planned),
            commit_ms=1e3 * (committed - resumed),
            emit_ms=1e3 * (emitted - committed),
            num_bytes=len(frame),
            is_unchanged=output.tables is None and output.chunks is None,
        )

    def _num_rows(self) -> int:
        assert self._scheduler.batch is not None
        return len(self._scheduler.batch.decoding)

    def _answer(self, number: int) -> None:
        assert self._scheduler.ledger is not None
        step = self._scheduler.ledger.find(number)
        assert step is not None
        tokens = pack_ids([1 + (7 * number + row) % 1000 for row in range(len(step.rows))])
        self._answers.append(
            encode(ModelOutput(0, number, tokens, checksum=zlib.crc32(tokens), forward_ms=1.0))
        )


def _send(reply: Reply) -> bool:
    return len(encode(reply)) > 0


def _make_submit(number: int, num_prompt: int, max_tokens: int) -> Submit:
    return Submit(
        frontend_life=0,
        core_life=0,
        request_id=number,
        prompt=pack_ids([1 + (number + position) % 1000 for position in range(num_prompt)]),
        emitted=b"",
        sampling=SamplingParams(max_tokens=max_tokens),
        seed=number,
        arrival=float(number),
    )


def measure(num_requests: int, num_prompt: int, num_steps: int) -> dict[str, float]:
    """One case: times in milliseconds of CPU a step, sizes in bytes a step."""
    bench = Bench(num_requests=num_requests, num_prompt=num_prompt, num_steps=num_steps)
    bench.warm_up()
    gc.collect()
    gc.freeze()  # the core process does so as well, but collects nothing before
    samples = [bench.step() for _ in range(num_steps)]
    gc.unfreeze()
    unchanged = [sample.num_bytes for sample in samples if sample.is_unchanged]
    return {
        "requests": num_requests,
        "prompt_tokens": num_prompt,
        "median_ms": statistics.median(sample.total_ms for sample in samples),
        "mean_ms": statistics.fmean(sample.total_ms for sample in samples),
        "plan_ms": statistics.median(sample.plan_ms for sample in samples),
        "encode_ms": statistics.median(sample.encode_ms for sample in samples),
        "commit_ms": statistics.median(sample.commit_ms for sample in samples),
        "emit_ms": statistics.median(sample.emit_ms for sample in samples),
        "target_ms": TARGETS_MS.get(num_requests, 0.0),
        "unchanged_share": len(unchanged) / len(samples),
        "unchanged_bytes": max(unchanged, default=0),
        "mean_bytes": statistics.fmean(sample.num_bytes for sample in samples),
    }


COLUMNS: Final = {  # heading: field, format
    "requests": ("requests", "d"),
    "prompt": ("prompt_tokens", "d"),
    "median ms": ("median_ms", ".3f"),
    "mean ms": ("mean_ms", ".3f"),
    "target ms": ("target_ms", ".1f"),
    "plan": ("plan_ms", ".3f"),
    "encode": ("encode_ms", ".3f"),
    "commit": ("commit_ms", ".3f"),
    "emit": ("emit_ms", ".3f"),
    "unchanged": ("unchanged_share", ".0%"),
    "bytes": ("unchanged_bytes", "d"),
    "mean bytes": ("mean_bytes", ".0f"),
}


@click.command()
@click.option("--steps", default=1000, show_default=True, type=click.IntRange(min=1))
@click.option("--output", type=OutputFile(), help="Write JSON here.")
def scheduler(steps: int, output: Path | None) -> None:
    """Core's cost of a decode step: plan, encode, commit, emit (CPU milliseconds)."""
    click.echo("  ".join(f"{heading:>10}" for heading in COLUMNS))
    results = []
    for num_requests, num_prompt in CASES:
        result = measure(num_requests, num_prompt, steps)
        results.append(result)
        cells = (format(result[field], form) for field, form in COLUMNS.values())
        click.echo("  ".join(f"{cell:>10}" for cell in cells))
    click.echo(f"an unchanged step must fit into {MAX_UNCHANGED_BYTES} bytes")
    if output is not None:
        output.write_text(json.dumps({"steps": steps, "cases": results}, indent=2) + "\n")
