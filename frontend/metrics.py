"""Prometheus metrics: what the frontend observed, core's counters and the launcher's restarts.

Names, labels and buckets are vLLM's under `nvserve:`; of the served names, `model_name` is the
first. Histograms are fed as tokens go out; everything else is read only when scraped. What core
counts comes from one snapshot, so at every scrape the requests accepted are those that ended, run
or wait.
"""

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from nvserve.frontend.histogram import Histogram
from nvserve.protocol.control import Condition
from nvserve.protocol.messages import CoreStats, FinishReason

if TYPE_CHECKING:
    from nvserve.frontend.generation import Generation

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"

disable_created_metrics()  # type: ignore[no-untyped-call]  # no `_created` series, as in vLLM

_REGISTRY: Final = CollectorRegistry()
_SECONDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_GAP_SECONDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3),
    *(0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_TOKENS: Final = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))


_TTFT: Final = Histogram("nvserve:time_to_first_token_seconds", "Arrival to first token.", _SECONDS)
_GAP: Final = Histogram(
    "nvserve:inter_token_latency_seconds", "Between a choice's tokens.", _GAP_SECONDS
)
_E2E: Final = Histogram("nvserve:e2e_request_latency_seconds", "Arrival to last token.", _SECONDS)
_TPOT: Final = Histogram(
    "nvserve:request_time_per_output_token_seconds",
    "Mean gap of one request's tokens.",
    _GAP_SECONDS,
)
_PROMPT: Final = Histogram("nvserve:request_prompt_tokens", "Prompt tokens of one choice.", _TOKENS)
_OUTPUT: Final = Histogram(
    "nvserve:request_generation_tokens", "Output tokens of one choice.", _TOKENS
)
_HISTOGRAMS: Final = (_TTFT, _GAP, _E2E, _TPOT, _PROMPT, _OUTPUT)


class RequestMetrics:
    """The times of one client request."""

    __slots__ = ("_arrival", "_first", "_last")

    def __init__(self, num_choices: int) -> None:
        self._arrival = time.monotonic()
        self._first = 0.0
        self._last = [0.0] * num_choices  # when each put out tokens

    def note_tokens(self, choice_index: int) -> None:
        """A choice put out tokens."""
        now = time.monotonic()
        last = self._last[choice_index]
        self._last[choice_index] = now
        if last:
            _GAP.observe(now - last)
        elif not self._first:
            self._first = now
            _TTFT.observe(now - self._arrival)

    def note_finish(self, generation: "Generation") -> None:
        """Every choice is complete."""
        now = time.monotonic()
        _E2E.observe(now - self._arrival)
        longest = max(choice.num_output_tokens for choice in generation.choices)
        if longest > 1:
            _TPOT.observe((now - self._first) / (longest - 1))
        for choice in generation.choices:
            _PROMPT.observe(choice.num_prompt_tokens)
            _OUTPUT.observe(choice.num_output_tokens)


class Sources:
    """Where a scrape reads the rest."""

    def __init__(
        self,
        *,
        model_name: str,
        stats: Callable[[], CoreStats | None],
        last_step_age_s: Callable[[], float | None],
        condition: Callable[[], Condition],
        own_totals: Callable[[], dict[str, int]],
        num_open: Callable[[], int],
    ) -> None:
        self._labels: Final = {"model_name": model_name}
        self._stats: Final = stats
        self._last_step_age_s: Final = last_step_age_s
        self._condition: Final = condition
        self._own_totals: Final = own_totals
        self._num_open: Final = num_open

    def collect(self) -> Iterable[Metric]:
        """Called by the registry at each scrape."""
        stats, labels = self._stats(), self._labels
        if stats is not None:
            yield from _core_gauges(stats, labels)
            age_s = self._last_step_age_s() or 0.0
            text = "Since the last committed step."
            yield _gauge("last_step_age_seconds", text, age_s, labels)
            yield from _core_totals(stats, labels)
        yield from _restarts(self._condition(), labels)
        yield _gauge("frontend_open_requests", "Requests in the journal.", self._num_open(), labels)
        for name, value in self._own_totals().items():
            yield _counter(name, f"Frontend: {name}.", value, labels)
        for histogram in _HISTOGRAMS:
            yield histogram.family(labels)


def register(sources: Sources) -> None:
    """Read these at each scrape, once per process."""
    _REGISTRY.register(sources)


def exposition() -> bytes:
    """All metrics as text."""
    return generate_latest(_REGISTRY)


Labels = dict[str, str]


def _gauge(name: str, text: str, value: float, labels: Labels) -> Metric:
    family = GaugeMetricFamily(f"nvserve:{name}", text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, text: str, value: float, labels: Labels) -> Metric:
    family = CounterMetricFamily(f"nvserve:{name}", text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _core_gauges(stats: CoreStats, labels: Labels) -> Iterable[Metric]:
    used = stats.num_blocks - stats.num_free_blocks
    for name, text, value in (
        ("num_requests_running", "Requests holding a slot.", stats.num_running),
        ("num_requests_waiting", "Requests waiting for one.", stats.num_waiting),
        ("kv_cache_usage_perc", "Share of KV blocks in use.", used / max(stats.num_blocks, 1)),
        ("num_kv_blocks", "Usable KV blocks.", stats.num_blocks),
        ("num_free_kv_blocks", "KV blocks no request owns.", stats.num_free_blocks),
        ("epoch", "Life of the worker group.", stats.epoch),
    ):
        yield _gauge(name, text, value, labels)


def _core_totals(stats: CoreStats, labels: Labels) -> Iterable[Metric]:
    for name, text, value in (
        ("requests_accepted", "Requests taken.", stats.accepted_total),
        ("requests_refused", "Requests not taken.", stats.refused_total),
        ("requests_recovered", "Replays after a death.", stats.recovered_total),
        ("num_preemptions", "Preemptions.", stats.preempted_total),
        ("prompt_tokens", "Prompt tokens.", stats.prompt_tokens_total),
        ("generation_tokens", "Generated tokens.", stats.generated_tokens_total),
        ("prefix_cache_queries", "Tokens looked up.", stats.prefix_queries_total),
        ("prefix_cache_hits", "Tokens found.", stats.prefix_hits_total),
        ("core_dropped_messages", "Useless messages.", stats.dropped_total),
    ):
        yield _counter(name, text, value, labels)
    finished = CounterMetricFamily(
        "nvserve:request_success",
        "Ended requests by reason.",
        labels=[*labels, "finished_reason"],
    )
    for reason, total in zip(FinishReason, stats.finished_totals, strict=False):
        if reason:
            finished.add_metric([*labels.values(), reason.name.lower()], total)
    yield finished


def _restarts(condition: Condition, labels: Labels) -> Iterable[Metric]:
    for role, total in (
        ("worker", condition.worker_restarts_total),
        ("core", condition.core_restarts_total),
        ("frontend", condition.frontend_restarts_total),
    ):
        yield _counter(f"{role}_restarts", f"Restarts of a {role}.", total, labels)
    recovery = GaugeMetricFamily(
        "nvserve:recovery_seconds", "The last recovery, by phase.", labels=[*labels, "phase"]
    )
    for phase, seconds in condition.recovery_seconds.items():
        recovery.add_metric([*labels.values(), phase], seconds)
    yield recovery
