"""Turns the answers of a load run into the result keys of `vllm bench serve`, and into a table.

Pure: times in, numbers out. Percentiles interpolate linearly between the two nearest values.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from nvserve.scripts.bench.load import Answer

METRIC_NAMES: Final = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (without the first)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}
GOODPUT_METRICS: Final = ("ttft", "tpot", "e2el")

Result = dict[str, object]


class BadGoodput(ValueError):
    """A goodput objective that is not NAME:MILLISECONDS."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of one complete answer, in seconds."""

    ttft: float
    tpot: float  # 0 with fewer than two tokens
    e2el: float
    itls: list[float]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which `percent` % of the ascending values lie; 0 when there are none."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def latencies(answer: Answer) -> Latencies:
    """Of an answer with at least one event; its end is its last event with a choice."""
    times = answer.event_times
    ttft = times[0] - answer.start_s
    e2el = times[-1] - answer.start_s
    num_tokens = answer.num_output_tokens
    tpot = (e2el - ttft) / (num_tokens - 1) if num_tokens > 1 else 0.0
    itls = [later - earlier for earlier, later in pairwise(times)]
    return Latencies(ttft, tpot, e2el, itls)


def parse_goodput(text: Sequence[str]) -> dict[str, float]:
    """`["ttft:200", "tpot:50"]` as milliseconds by metric; BadGoodput names what is wrong."""
    objectives = {}
    for pair in text:
        name, _, limit = pair.partition(":")
        if name not in GOODPUT_METRICS:
            raise BadGoodput(f"{pair!r}: the metric must be one of {', '.join(GOODPUT_METRICS)}")
        try:
            objectives[name] = float(limit)
        except ValueError:
            raise BadGoodput(f"{pair!r} is not NAME:MILLISECONDS") from None
        if not 0 <= objectives[name] < math.inf:
            raise BadGoodput(f"{pair!r}: the limit must be a positive number of milliseconds")
    return objectives


def summarize(
    answers: Sequence[Answer],
    input_lens: Sequence[int],
    duration_s: float,
    *,
    metrics: Sequence[str] = tuple(METRIC_NAMES),
    percentiles: Sequence[float] = (50, 90, 99),
    goodput_ms: Mapping[str, float] | None = None,
) -> Result:
    """The result keys of `vllm bench serve`: counts, throughput, and each metric's statistics.

    `input_lens` holds prompt tokens by request; 0 takes the server's own count.
    """
    done = [answer for answer in answers if answer.is_complete and answer.event_times]
    measured = [latencies(answer) for answer in done]
    num_input = sum(
        known or answer.num_prompt_tokens
        for known, answer in zip(input_lens, answers, strict=True)
        if answer.is_complete and answer.event_times
    )
    num_output = sum(answer.num_output_tokens for answer in done)
    good = [m for m in measured if _meets(m, goodput_ms or {})]
    result: Result = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(answers) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "request_goodput": len(good) / duration_s if goodput_ms else None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": _busiest_second(done),
        "max_concurrent_requests": _most_at_once(done),
    }
    values_s = {
        "ttft": [m.ttft for m in measured],
        "tpot": [m.tpot for m, a in zip(measured, done, strict=True) if a.num_output_tokens > 1],
        "itl": [itl for m in measured for itl in m.itls],
        "e2el": [m.e2el for m in measured],
    }
    for name in metrics:
        result |= statistics_ms(name, values_s[name], percentiles)
    return result


def statistics_ms(
    name: str, values_s: Sequence[float], percentiles: Sequence[float]
) -> dict[str, object]:
    """Keys mean_, median_, std_ and pXX_<name>_ms of values in seconds."""
    ordered = sorted(value * 1000 for value in values_s)
    mean = math.fsum(ordered) / len(ordered) if ordered else 0.0
    squares = math.fsum((value - mean) ** 2 for value in ordered)
    return {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": percentile(ordered, 50),
        f"std_{name}_ms": math.sqrt(squares / len(ordered)) if ordered else 0.0,
        **{f"p{p:g}_{name}_ms": percentile(ordered, p) for p in percentiles},
    }


def details(answers: Sequence[Answer], input_lens: Sequence[int]) -> Result:
    """The per-request columns, failed requests included; times in seconds."""
    measured = [latencies(a) if a.event_times else Latencies(0.0, 0.0, 0.0, []) for a in answers]
    return {
        "input_lens": [
            known or answer.num_prompt_tokens
            for known, answer in zip(input_lens, answers, strict=True)
        ],
        "output_lens": [answer.num_output_tokens for answer in answers],
        "ttfts": [m.ttft for m in measured],
        "itls": [m.itls for m in measured],
        "latencies": [m.e2el for m in measured],
        "start_times": [answer.start_s for answer in answers],
        "queue_times": [answer.queue_s for answer in answers],
        "generated_texts": [text_of(answer) for answer in answers],
        "errors": [answer.error for answer in answers],
    }


def text_of(answer: Answer) -> str:
    """The text of a completion or chat answer whose events were kept; of a broken one, so far."""
    return "".join(map(_piece_of, answer.events))


def _piece_of(event: bytes) -> str:
    """The text of one event; empty where there is none, as in usage, an error or half an event."""
    try:
        choice = json.loads(event)["choices"][0]
        text = choice["text"] if "text" in choice else choice["delta"]["content"]
    except (ValueError, LookupError, TypeError):
        return ""
    return text if isinstance(text, str) else ""


def _meets(measured: Latencies, limits_ms: Mapping[str, float]) -> bool:
    values_s = {"ttft": measured.ttft, "tpot": measured.tpot, "e2el": measured.e2el}
    return all(values_s[name] * 1000 <= limit for name, limit in limits_ms.items())


def _busiest_second(answers: Sequence[Answer]) -> float:
    """The most events in any whole second since the first request."""
    if not answers:
        return 0.0
    start_s = min(answer.start_s for answer in answers)
    seconds: dict[int, int] = {}
    for answer in answers:
        for time_s in answer.event_times:
            second = int(time_s - start_s)
            seconds[second] = seconds.get(second, 0) + 1
    return float(max(seconds.values()))


def _most_at_once(answers: Sequence[Answer]) -> int:
    """The most requests open at one time, each from its start to its last event."""
    changes = [(answer.start_s, 1) for answer in answers]
    changes += [(answer.event_times[-1], -1) for answer in answers]
    most = now = 0
    for _, change in sorted(changes):  # at a tie the end comes before the start
        now += change
        most = max(most, now)
    return most


# -- the table -------------------------------------------------------------------------------------

_ROWS: Final = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "duration": "Benchmark duration (s)",
    "total_input_tokens": "Total input tokens",
    "total_output_tokens": "Total output tokens",
    "request_throughput": "Request throughput (req/s)",
    "request_goodput": "Request goodput (req/s)",
    "output_throughput": "Output token throughput (tok/s)",
    "total_token_throughput": "Total token throughput (tok/s)",
    "max_output_tokens_per_s": "Busiest second (events/s)",
    "max_concurrent_requests": "Most requests at once",
}


def format_report(result: Mapping[str, object], title: str = "Serving benchmark") -> str:
    """A table for people, one line a figure."""
    lines = [f" {title} ".center(56, "=")]
    for key, label in _ROWS.items():
        if result.get(key) is not None:
            lines.append(_row(label, result[key]))
    for name, heading in METRIC_NAMES.items():
        keys = [key for key in result if key.endswith(f"_{name}_ms")]
        if keys:
            lines.append(f" {heading} ".center(56, "-"))
        lines += [_row(_label(key, name), result[key]) for key in keys]
    lines.append("=" * 56)
    return "\n".join(lines)


def _label(key: str, name: str) -> str:
    return f"{key.removesuffix(f'_{name}_ms').capitalize()} {name.upper()} (ms)"


def _row(label: str, value: object) -> str:
    return (
        f"{label + ':':<42} {value:>13,.2f}"
        if isinstance(value, float)
        else (f"{label + ':':<42} {value!s:>13}")
    )
