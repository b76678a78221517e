"""The offline workloads: what is drawn, and the arithmetic, on an engine of known speed."""

from random import Random

import pytest

from nvserve.scripts.bench.workloads import (
    Prompts,
    draw_mix,
    draw_prompts,
    measure_decode_step,
    measure_mix,
    median_step_ms,
    shift_ids,
)


class FakeEngine:
    """Takes a fixed time per call, per prompt token and per decode step."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[Prompts, list[int], float]] = []
        self.noise = [0.0]

    def generate(self, prompts: Prompts, max_tokens: list[int], temperature: float) -> None:
        self.calls.append((prompts, max_tokens, temperature))
        self.now += 0.5 + 0.001 * sum(map(len, prompts)) + 0.004 * max(max_tokens)
        self.now += self.noise[len(self.calls) % len(self.noise)]

    def clock(self) -> float:
        return self.now


def test_the_default_mix_is_the_published_one() -> None:
    mix = draw_mix()
    assert len(mix.prompts) == 256
    assert (mix.num_input_tokens, mix.num_output_tokens) == (142_827, 133_966)
    assert mix.prompts[0][:4] == [6311, 6890, 663, 4242]
    assert mix == draw_mix()


def test_lengths_and_ids_of_a_small_mix_stay_in_their_ranges() -> None:
    mix = draw_mix(50, min_len=2, max_input_len=9, max_output_len=5, max_id=30, seed=1)
    assert {len(prompt) for prompt in mix.prompts} == set(range(2, 10))
    assert set(mix.output_lens) == set(range(2, 6))
    assert max(max(prompt) for prompt in mix.prompts) <= 30


def test_a_later_round_has_the_same_lengths_and_other_prompts() -> None:
    mix = draw_mix(5)
    later = shift_ids(mix, 1)
    assert list(map(len, later.prompts)) == list(map(len, mix.prompts))
    assert all(a != b for a, b in zip(mix.prompts, later.prompts, strict=True))


def test_a_mix_is_timed_as_a_whole_for_each_round() -> None:
    engine = FakeEngine()
    mix = draw_mix(4, min_len=10, max_input_len=10, max_output_len=10)
    settled_after: list[int] = []
    results = measure_mix(
        engine.generate,
        mix,
        clock=engine.clock,
        settle=lambda: settled_after.append(len(engine.calls)),
    )
    assert settled_after == [1]  # the first round comes right after the start
    assert [result.seconds for result in results] == pytest.approx([0.58, 0.58])
    assert results[0].output_rate == pytest.approx(40 / 0.58)
    assert results[0].total_rate == pytest.approx(80 / 0.58)
    assert engine.calls[0][0] != engine.calls[1][0]


def test_the_decode_step_is_what_the_longer_run_adds_and_noise_is_dropped() -> None:
    engine = FakeEngine()
    engine.noise = [0.0, 0.0, 0.3, 0.7, 0.1, 0.2]
    step_ms = measure_decode_step(
        engine.generate, 3, Random(1), output_lens=(4, 14), context=20, clock=engine.clock
    )
    assert step_ms == pytest.approx(4.0)
    assert [max_tokens for _, max_tokens, _ in engine.calls] == [[4] * 3, [14] * 3] * 3
    assert {len(p) for prompts, _, _ in engine.calls for p in prompts} == {20}
    assert len({tuple(p) for prompts, _, _ in engine.calls for p in prompts}) == 18


def test_drawn_prompts_have_the_asked_shape() -> None:
    prompts = draw_prompts(3, 5, Random(0), max_id=9)
    assert [len(prompt) for prompt in prompts] == [5, 5, 5]


def test_the_median_step_ignores_the_first_gaps_and_single_delays() -> None:
    steps = [9.0] * 4 + [0.01] * 40
    steps[30] = 5.0
    arrivals = [sum(steps[:count]) for count in range(len(steps) + 1)]
    assert median_step_ms(arrivals, num_skipped=4) == pytest.approx(10.0)


def test_the_median_step_is_right_when_tokens_arrive_a_few_at_a_time() -> None:
    arrivals = [0.02 * (count // 2) for count in range(60)]  # two at a time
    assert median_step_ms(arrivals) == pytest.approx(10.0)


def test_too_few_steps_have_no_median() -> None:
    assert median_step_ms([0.0, 1.0]) == 0.0
