"""The offline workloads every figure is measured on: a mix of lengths, and plain decode steps.

An engine is one function `generate(prompts, max_tokens, temperature)` that returns when all
requests are complete. Draws the prompts and does the arithmetic; starts nothing.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

Prompts = list[list[int]]
Generate = Callable[[Prompts, list[int], float], None]
Clock = Callable[[], float]

TEMPERATURE: Final = 0.6
MAX_ID: Final = 10_000  # inclusive; ids of the prompts
BATCHES: Final = (1, 8, 32, 128, 256)
OUTPUT_LENS: Final = (16, 144)  # of the two runs whose difference is the decode steps
CONTEXT: Final = 256  # prompt tokens before the steps
WINDOW: Final = 8  # steps


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests of mixed lengths, sent all at once."""

    prompts: Prompts
    output_lens: list[int]

    @property
    def num_input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


@dataclass(frozen=True, slots=True)
class MixResult:
    """One round of a mix."""

    seconds: float
    num_input_tokens: int
    num_output_tokens: int

    @property
    def output_rate(self) -> float:
        """Output tokens a second."""
        return self.num_output_tokens / self.seconds

    @property
    def total_rate(self) -> float:
        """Input and output tokens a second."""
        return (self.num_input_tokens + self.num_output_tokens) / self.seconds


def draw_mix(
    num_requests: int = 256,
    *,
    min_len: int = 100,
    max_input_len: int = 1024,
    max_output_len: int = 1024,
    max_id: int = MAX_ID,
    seed: int = 0,
) -> Mix:
    """By default nano-vllm's published benchmark: 256 requests, 100 to 1024 tokens in and out."""
    rng = Random(seed)
    prompts = [
        [rng.randint(0, max_id) for _ in range(rng.randint(min_len, max_input_len))]
        for _ in range(num_requests)
    ]
    return Mix(prompts, [rng.randint(min_len, max_output_len) for _ in range(num_requests)])


def shift_ids(mix: Mix, round_index: int, max_id: int = MAX_ID) -> Mix:
    """The same lengths with other ids, so that a later round finds nothing in a prefix cache."""
    shift = 17 * round_index
    prompts = [[(token_id + shift) % max_id for token_id in prompt] for prompt in mix.prompts]
    return Mix(prompts, mix.output_lens)


def measure_mix(
    generate: Generate,
    mix: Mix,
    *,
    num_rounds: int = 2,
    max_id: int = MAX_ID,
    clock: Clock = time.perf_counter,
    settle: Callable[[], None] = lambda: None,
) -> list[MixResult]:
    """Rounds of the mix: the first right away, each other one after settle()."""
    results = []
    for round_index in range(num_rounds):
        if round_index > 0:
            settle()
        shifted = shift_ids(mix, round_index, max_id)
        begun_s = clock()
        generate(shifted.prompts, shifted.output_lens, TEMPERATURE)
        elapsed_s = clock() - begun_s
        results.append(MixResult(elapsed_s, mix.num_input_tokens, mix.num_output_tokens))
    return results


def measure_decode_step(
    generate: Generate,
    batch: int,
    rng: Random,
    *,
    output_lens: tuple[int, int] = OUTPUT_LENS,
    context: int = CONTEXT,
    num_rounds: int = 3,
    max_id: int = MAX_ID,
    clock: Clock = time.perf_counter,
) -> float:
    """Milliseconds of one decode step: what the further tokens of the longer run cost, each.

    The fastest of `num_rounds` counts for either length, so prompts and start-up cancel out.
    """
    fastest_s = dict.fromkeys(output_lens, float("inf"))
    for _ in range(num_rounds):
        for output_len in output_lens:
            prompts = draw_prompts(batch, context, rng, max_id)
            begun_s = clock()
            generate(prompts, [output_len] * batch, TEMPERATURE)
            fastest_s[output_len] = min(fastest_s[output_len], clock() - begun_s)
    short, long = output_lens
    return (fastest_s[long] - fastest_s[short]) / (long - short) * 1000


def draw_prompts(batch: int, context: int, rng: Random, max_id: int = MAX_ID) -> Prompts:
    """`batch` prompts of `context` random ids each."""
    return [[rng.randint(0, max_id) for _ in range(context)] for _ in range(batch)]


def median_step_ms(arrivals_s: Sequence[float], num_skipped: int = 4) -> float:
    """The median time of a step, from when a request's tokens arrive while the batch is full.

    Taken over windows of WINDOW steps, since tokens may arrive a few at a time. The first
    `num_skipped` steps may still hold other requests' prompts and do not count; 0 when too few are
    left.
    """
    counted = arrivals_s[num_skipped:]
    windows = [later - earlier for earlier, later in zip(counted, counted[WINDOW:], strict=False)]
    return statistics.median(windows) / WINDOW * 1000 if windows else 0.0
