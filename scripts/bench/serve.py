"""`nvserve bench serve`: load on a running OpenAI-compatible server, and what its clients felt.

Result keys as in `vllm bench serve` where both have them. Imports no torch.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from nvserve.scripts.bench import report
from nvserve.scripts.bench.datasets import BadDataset
from nvserve.scripts.bench.event_loop import run_on_uvloop
from nvserve.scripts.bench.load import BadTarget, Target
from nvserve.scripts.bench.plot import Line, Panel, draw_chart
from nvserve.scripts.bench.serve_options import ServeOptions, serve_flags
from nvserve.scripts.bench.serve_run import measure

API_KEY_VARIABLES: Final = ("NVSERVE_API_KEY", "OPENAI_API_KEY")


@click.command(context_settings={"show_default": True})
@serve_flags
def serve(**flags: Any) -> None:
    """Measure a running server: throughput, and latencies as its clients see them."""
    options = ServeOptions(**flags)
    options.check()
    try:
        target = Target.parse(options.base_url, options.endpoint, _api_key())
        questions = options.questions()
    except BadTarget as error:
        raise click.UsageError(f"--base-url: {error}") from error
    except BadDataset as error:
        raise click.UsageError(f"--dataset-path: {error}") from error
    results = run_on_uvloop(measure(target, questions, options))
    result = {"sweep": results} if options.sweep else results[0]
    for path in _result_paths(options, str(results[0]["model_id"])):
        path.write_text(json.dumps(result, indent=1) + "\n")
        click.echo(f"result: {path}")
    if options.plot:
        options.plot.write_text(plot_sweep(results, options.sweep_over))
        click.echo(f"plot: {options.plot}")
    if any(one["failed"] for one in results):
        sys.exit(1)


def _api_key() -> str:
    return next((os.environ[name] for name in API_KEY_VARIABLES if os.environ.get(name)), "")


def _result_paths(options: ServeOptions, model: str) -> list[Path]:
    paths = [options.output] if options.output else []
    if options.save_result:
        rate = f"{options.request_rate:g}qps"
        stamp = time.strftime("%Y%m%d-%H%M%S")
        rest = f"{rate}-{model.rsplit('/', 1)[-1]}-{stamp}"
        paths.append(options.result_path(rest))
    return paths


# -- the plot --------------------------------------------------------------------------------------


def plot_sweep(results: Sequence[report.Result], sweep_over: str) -> str:
    """SVG: a panel for each metric's median and percentiles against load, then throughput."""
    field = sweep_over.replace("-", "_")
    loads = [_number(result[field]) for result in results]
    panels = []
    for name, heading in report.METRIC_NAMES.items():
        labels = _statistics(results[0], name)
        if labels:
            panels.append(Panel(f"{heading}, ms", _lines(results, loads, labels)))
    throughput = {"output_throughput": "output tokens"}
    panels.append(Panel("Throughput, tokens a second", _lines(results, loads, throughput)))
    axis = "requests a second" if field == "request_rate" else "requests at once"
    return draw_chart(f"{results[0]['model_id']}: latency against load", panels, x_label=axis)


def _statistics(result: report.Result, name: str) -> dict[str, str]:
    """Labels of a metric's median and higher percentiles by result key; none if not reported."""
    end = f"_{name}_ms"
    if f"median{end}" not in result:
        return {}
    found = [key.removesuffix(end) for key in result if key.endswith(end)]
    wanted = [one for one in found if one[0] == "p" and one[1:2].isdigit() and one != "p50"]
    return {f"median{end}": "median"} | {one + end: one for one in wanted}


def _lines(
    results: Sequence[report.Result], loads: Sequence[float], labels: dict[str, str]
) -> list[Line]:
    def points(key: str) -> list[tuple[float, float]]:
        values = [_number(result[key]) for result in results]
        return sorted(zip(loads, values, strict=True))

    return [Line(label, points(key)) for key, label in labels.items()]


def _number(value: object) -> float:
    assert isinstance(value, int | float | str), f"{value!r} is no number"
    return float(value)
