"""`nvserve bench startup`: from the command to a server that answers, second by second."""

import re
import statistics
import time
from pathlib import Path
from typing import Any, Final

import click

from nvserve.scripts.bench.engine import (
    BenchModel,
    EngineOptions,
    bench_config,
    bench_model,
    engine_flags,
    format_table,
    generate_with,
    started_engine,
    write_result,
)
from nvserve.scripts.bench.output_file import OutputFile

PROCESSES_LINE: Final = re.compile(r"\s*ready after [\d.]+ s; each process started after: (.*)$")
PHASES_LINE: Final = re.compile(r"\s*(\w+(?: \d+)?): (\w.* s)$")
PHASE: Final = re.compile(r"([\w -]+?) ([\d.]+) s(?:, |$)")
PROCESS: Final = re.compile(r"([\w -]+?) ([\d.]+)(?:, |$)")
DEFAULT_LEN: Final = 4096


@click.command(context_settings={"show_default": True})
@engine_flags
@click.option("--num-rounds", type=click.IntRange(1), default=3, help="Starts to time.")
@click.option("--output", type=OutputFile(), help="JSON of the result.")
def startup(num_rounds: int, output: Path | None, **flags: Any) -> None:
    """Time starts of the engine, by phase; the first may read files from a cold disk."""
    options = EngineOptions.take(flags)
    rounds = []
    with bench_model(options) as model:
        needed_len = min(DEFAULT_LEN, model.shape.context_len)
        bench_config(model, options, needed_len)  # refuses what is wrong
        for number in range(num_rounds):
            rounds.append(_time_start(model, options, needed_len))
            click.echo(f"start {number}: ready after {rounds[-1]['ready']:.2f} s")
    click.echo(_table(rounds))
    result = {
        "model": model.name,
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "median_ready_s": statistics.median(one["ready"] for one in rounds),
        "rounds": rounds,
    }
    write_result(output, result)


def _time_start(model: BenchModel, options: EngineOptions, needed_len: int) -> dict[str, float]:
    """Seconds by phase of one start; `ready` is from the command to the ready line."""
    with started_engine(model, options, needed_len=needed_len) as engine:
        begun_s = time.perf_counter()
        generate_with(engine.llm)([[5, 6, 7, 8]], [1], 0.0)
        first_s = time.perf_counter() - begun_s
        return {
            "ready": engine.ready_s,
            "first request": first_s,
            **parse_details(engine.details),
        }


def parse_details(details: list[str]) -> dict[str, float]:
    """The seconds that the launcher tells with its ready line, by process and phase."""
    seconds: dict[str, float] = {}
    for line in details:
        if processes := PROCESSES_LINE.match(line):
            for name, value in PROCESS.findall(processes.group(1)):
                seconds[f"{name} started"] = float(value)
        elif phases := PHASES_LINE.match(line):
            for name, value in PHASE.findall(phases.group(2)):
                seconds[f"{phases.group(1)}: {name}"] = float(value)
    return seconds


def _table(rounds: list[dict[str, float]]) -> str:
    names = list(dict.fromkeys(name for one in rounds for name in one))
    headings = ["seconds", *(f"start {number}" for number in range(len(rounds)))]
    return format_table(headings, [[name, *(one.get(name) for one in rounds)] for name in names])
