"""The result keys: exact numbers from known times, beside numpy's percentiles."""

from random import Random

import numpy as np
import pytest

from nvserve.scripts.bench import report
from nvserve.scripts.bench.load import Answer

# Keys `vllm bench serve` writes for a streamed run, its four metrics and p50,p90,p99 asked for.
COUNT_KEYS = {
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
}
STATISTICS = ("mean", "median", "std", "p50", "p90", "p99")
DETAIL_KEYS = {
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "latencies",
    "start_times",
    "queue_times",
    "generated_texts",
    "errors",
}


def answer(start_s: float, *times: float, num_tokens: int | None = None) -> Answer:
    return Answer(
        start_s=start_s,
        event_times=list(times),
        num_output_tokens=len(times) if num_tokens is None else num_tokens,
    )


def test_the_keys_are_those_of_vllm_bench_serve() -> None:
    answers = [answer(0.0, 1.0, 2.0)]
    result = report.summarize(answers, [7], 2.0) | report.details(answers, [7])
    expected = {f"{s}_{name}_ms" for s in STATISTICS for name in ("ttft", "tpot", "itl", "e2el")}
    assert set(result) == COUNT_KEYS | expected | DETAIL_KEYS


def test_latencies_of_known_times() -> None:
    measured = report.latencies(answer(1.0, 1.5, 1.75, 2.5))
    assert measured == report.Latencies(ttft=0.5, tpot=0.5, e2el=1.5, itls=[0.25, 0.75])


def test_an_event_of_several_tokens_lowers_the_time_per_token_not_the_gaps() -> None:
    measured = report.latencies(answer(0.0, 1.0, 3.0, num_tokens=5))
    assert measured.tpot == 0.5
    assert measured.itls == [2.0]


def test_counts_and_throughput_leave_failed_requests_out() -> None:
    failed = Answer(error="HTTP 500", event_times=[1.0], num_output_tokens=9)
    answers = [answer(0.0, 1.0, 2.0), failed, answer(0.5, 1.0, 3.0, 4.0)]
    result = report.summarize(answers, [10, 20, 30], 4.0)
    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (40, 5)
    assert result["request_throughput"] == 0.5
    assert result["output_throughput"] == 1.25
    assert result["total_token_throughput"] == 11.25
    assert result["mean_ttft_ms"] == 750.0
    assert result["max_concurrent_requests"] == 2
    assert result["max_output_tokens_per_s"] == 2.0


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    answers = [answer(0.0, 0.1, 0.2), answer(0.0, 0.1, 0.9), answer(0.0, 0.5, 0.55)]
    limits = report.parse_goodput(["ttft:200", "tpot:300"])
    assert report.summarize(answers, [1] * 3, 2.0, goodput_ms=limits)["request_goodput"] == 0.5
    assert report.summarize(answers, [1] * 3, 2.0)["request_goodput"] is None


def test_a_single_token_answer_has_no_time_per_token() -> None:
    result = report.summarize([answer(0.0, 1.0), answer(0.0, 1.0, 1.5)], [1, 1], 2.0)
    assert result["mean_tpot_ms"] == 500.0


def test_the_servers_own_count_is_used_where_the_prompt_was_text() -> None:
    one = answer(0.0, 1.0)
    one.num_prompt_tokens = 12
    assert report.summarize([one], [0], 1.0)["total_input_tokens"] == 12


@pytest.mark.parametrize("size", [1, 2, 10, 101])
def test_percentiles_equal_those_of_numpy(size: int) -> None:
    values = [Random(size).random() for _ in range(size)]
    statistics = report.statistics_ms("itl", values, (25, 50, 90, 99.9))
    in_ms = np.array(values) * 1000
    for percent in (25, 50, 90, 99.9):
        expected = np.percentile(in_ms, percent)
        assert statistics[f"p{percent:g}_itl_ms"] == pytest.approx(expected, rel=1e-12)
    assert statistics["std_itl_ms"] == pytest.approx(np.std(in_ms), rel=1e-9, abs=1e-9)
    assert statistics["mean_itl_ms"] == pytest.approx(np.mean(in_ms), rel=1e-12)


def test_a_run_without_success_is_all_zeros() -> None:
    result = report.summarize([Answer(error="x")], [5], 1.0)
    assert result["failed"] == 1
    assert all(not value for key, value in result.items() if key.endswith("_ms"))


@pytest.mark.parametrize("text", ["itl:5", "ttft", "ttft:fast", "tpot:-1", "e2el:nan", "ttft:inf"])
def test_a_wrong_goodput_objective_is_refused(text: str) -> None:
    with pytest.raises(report.BadGoodput, match=text.split(":", maxsplit=1)[0]):
        report.parse_goodput([text])


def test_the_table_names_every_reported_metric_once() -> None:
    result = report.summarize([answer(0.0, 1.0, 2.0)], [7], 2.0, metrics=["ttft", "itl"])
    table = report.format_report(result)
    assert table.count("P99 TTFT (ms):") == table.count("P99 ITL (ms):") == 1
    assert "TPOT" not in table
    assert "goodput" not in table


def test_kept_events_become_the_generated_text() -> None:
    events = [b'{"choices":[{"text":"To "}]}', b'{"choices":[{"delta":{"content":"be"}}]}']
    assert report.text_of(Answer(events=events)) == "To be"


@pytest.mark.parametrize(
    "last", [b'{"error":{"message":"no"}}', b'{"choices":[],"usage":{}}', b"{]", b"null", b'{"']
)
def test_a_broken_answer_has_the_text_that_came(last: bytes) -> None:
    broken = Answer(error="it broke", event_times=[1.0, 2.0])
    broken.events = [b'{"choices":[{"text":"To "}]}', b'{"choices":[{"text":null}]}', last]
    assert report.details([broken], [3])["generated_texts"] == ["To "]
