"""The chart is well-formed SVG whose marks stand where the numbers say."""

import xml.etree.ElementTree as ET
from typing import Final

import pytest

from nvserve.scripts.bench.plot import Line, Panel, XAxis, draw_chart, nice_ticks
from nvserve.scripts.bench.report import Result
from nvserve.scripts.bench.serve import plot_sweep

SVG: Final = "{http://www.w3.org/2000/svg}"


def points_of(root: ET.Element) -> list[list[tuple[float, float]]]:
    texts = [line.get("points") or "" for line in root.iter(f"{SVG}polyline")]
    return [[(float(x), float(y)) for x, y in (p.split(",") for p in t.split())] for t in texts]


def test_special_characters_leave_the_document_well_formed() -> None:
    chart = draw_chart('<&"', [Panel("a<b", [Line("x&y", [(1, 1)])])], x_label="µ<")
    root = ET.fromstring(chart)
    assert root.tag == f"{SVG}svg"
    assert {'<&"', "a<b", "x&y", "µ<"} <= {text.text for text in root.iter(f"{SVG}text")}


def test_higher_values_stand_higher_and_equal_steps_are_equal_distances() -> None:
    root = ET.fromstring(
        draw_chart("t", [Panel("p", [Line("l", [(1, 0), (2, 5), (3, 10)])])], x_label="x")
    )
    ((x1, y1), (x2, y2), (x3, y3)) = points_of(root)[0]
    assert y1 > y2 > y3
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)


def test_loads_over_a_wide_range_get_a_logarithmic_axis() -> None:
    axis = XAxis([1, 4, 16, 64])
    assert axis.is_log
    gaps = [axis.pixel(b) - axis.pixel(a) for a, b in ((1, 4), (4, 16), (16, 64))]
    assert gaps == pytest.approx([gaps[0]] * 3)
    assert not XAxis([0, 64]).is_log


@pytest.mark.parametrize("high", [0.0003, 0.9, 1, 7, 99, 100, 12_345, 0])
def test_ticks_are_few_and_reach_the_highest_value(high: float) -> None:
    ticks = nice_ticks(high)
    assert ticks[0] == 0
    assert ticks[-1] >= high * (1 - 1e-9)
    assert 2 <= len(ticks) <= 6
    assert high == 0 or ticks[-2] < high


def test_a_chart_of_one_point_or_none_is_drawn() -> None:
    for lines in ([], [Line("l", [])], [Line("l", [(5, 0)])]):
        ET.fromstring(draw_chart("t", [Panel("p", lines)], x_label="x"))


def test_a_sweep_draws_the_reported_metrics_against_load_in_order() -> None:
    results: list[Result] = [
        {
            "model_id": "m",
            "request_rate": rate,
            "median_ttft_ms": rate * 10,
            "p50_ttft_ms": rate * 10,
            "p99_ttft_ms": rate * 20,
            "output_throughput": 100.0,
        }
        for rate in (4.0, 1.0, 2.0)
    ]
    root = ET.fromstring(plot_sweep(results, "request-rate"))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "Time to first token, ms" in texts
    assert not any("Inter-token" in (text or "") for text in texts)
    lines = points_of(root)
    assert len(lines) == 3  # median, p99, throughput
    assert all(line == sorted(line) for line in lines)
