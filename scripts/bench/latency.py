"""`nvserve bench latency`: where the time of one decode step goes, beside the GPU's floor.

Four measurements: the GPU's floor; the sampling tail alone; core's loop around real workers with a
clock between its parts (rig.py); and the whole engine, by what its client sees and by the CPU time
of each process.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

import click

from nvserve.protocol.config import Config
from nvserve.scripts.bench import workloads
from nvserve.scripts.bench.cpu_time import child_pids, cpu_s
from nvserve.scripts.bench.engine import (
    BenchError,
    BenchModel,
    EngineOptions,
    Started,
    bench_config,
    bench_model,
    check_batches,
    check_length,
    decode_full_batch,
    engine_flags,
    format_table,
    parse_numbers,
    started_engine,
    write_result,
)
from nvserve.scripts.bench.floors import Floors, measure_floors
from nvserve.scripts.bench.output_file import OutputFile
from nvserve.scripts.bench.own_process import NotMeasured
from nvserve.scripts.bench.rig import Rig, RigFailed, StepTimes
from nvserve.scripts.bench.sampling_tail import measure_sampling

SPARE_TOKENS: Final = 16  # of the longest request
NUM_SKIPPED: Final = 4  # steps after the last prompt, while run-ahead fills
MIN_OUTPUT_LEN: Final = NUM_SKIPPED + workloads.WINDOW + 2  # for one window to be left of it

Figures = dict[str, float | None]

# What each line of the table is; the figures are medians over the steps, in milliseconds.
PARTS: Final[dict[str, str]] = {
    "scheduler": "plan and commit, in core",
    "message": "encode and send the step, in core",
    "graph launch": "worker's host: delta, replay of the graph; none on a CPU: it is the step",
    "forward": "the device's time of a step less sampling, which is in the same graph",
    "sampling": "the plain tail alone, on random logits of this vocabulary and batch",
    "streaming": "CPU time of the frontend",
    "total": "interval of a request's tokens at the client; parts overlap: under their sum",
    "floor": "projections in one graph and KV bytes, in the same run",
    "total / floor": "",
}
FURTHER: Final[dict[str, str]] = {
    "emit": "encode the new tokens for the frontend, in core",
    "exchange": "message hops, result copy and polls for it: answer - device's time, run alone",
    "step, core": "interval of steps with run-ahead, without a frontend",
    "idle": "of the device: step, core - forward - sampling; 0 when all else hides",
    "core CPU": "CPU time of core",
    "worker CPU": "CPU time of rank 0, polling for the GPU included",
}


@click.command(context_settings={"show_default": True})
@engine_flags
@click.option("--batches", default="1,8,32,128,256", help="Requests that decode together.")
@click.option("--context", type=click.IntRange(1), default=workloads.CONTEXT, help="Prompt tokens.")
@click.option(
    "--output-len", type=click.IntRange(MIN_OUTPUT_LEN), default=144, help="Tokens of a request."
)
@click.option("--floor/--no-floor", default=True, help="Measure the GPU's floor first.")
@click.option("--output", type=OutputFile(), help="JSON of the result.")
def latency(**flags: Any) -> None:
    """Take one decode step apart, by batch size."""
    options = EngineOptions.take(flags)
    batches = parse_numbers("--batches", flags["batches"])
    check_batches(batches, options)
    context, output_len = flags["context"], flags["output_len"]
    needed_len = context + output_len + SPARE_TOKENS
    check_length(options, needed_len)
    table: dict[int, Figures] = {batch: {} for batch in batches}
    with bench_model(options) as model:
        config = bench_config(model, options, needed_len)
        floors = None
        if flags["floor"]:
            floors = _measure_floors(model, config, batches, context + output_len // 2)
        for batch, sampling_ms in _measure_sampling(model, config, batches).items():
            table[batch]["sampling"] = sampling_ms
        draw = _drawer(model, context)
        backend = _measure_rig(config, table, draw, output_len)
        with started_engine(model, options, needed_len=needed_len) as engine:
            engine.settle()
            for batch, figures in table.items():
                figures |= _measure_engine(engine, draw(batch), output_len)
    for batch, figures in table.items():
        figures |= _with_floor(figures, floors, batch)
    click.echo(_format(model.name, backend, table))
    result: dict[str, Any] = {
        "model": model.name,
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "tensor_parallel_size": options.tensor_parallel_size,
        "device": config.device,
        "attention_backend": backend,
        "context": context,
        "output_len": output_len,
        "unit": "ms",
        "meaning": PARTS | FURTHER,
        "batches": table,
    }
    write_result(flags["output"], result)


def _drawer(model: BenchModel, context: int) -> Callable[[int], workloads.Prompts]:
    """Fresh prompts for a batch at each call, so that no prefix cache helps."""
    rng = Random(1)
    return lambda batch: workloads.draw_prompts(batch, context, rng, model.max_id)


# -- the parts -------------------------------------------------------------------------------------


def _measure_floors(
    model: BenchModel, config: Config, batches: list[int], context: int
) -> Floors | None:
    """None where there is no floor, with the reason printed."""
    try:
        return measure_floors(model.shape, batches, context=context, tp_size=config.tp_size)
    except NotMeasured as reason:
        click.echo(f"no floor: {reason}")
        return None


def _measure_sampling(
    model: BenchModel, config: Config, batches: list[int]
) -> dict[int, float | None]:
    """By batch; None where the device does not sample."""
    if config.device == "sim":
        return dict.fromkeys(batches)
    try:
        found = measure_sampling(
            model.shape,
            batches,
            device=config.device,
            dtype=config.dtype,
            tp_size=config.tp_size,
        )
    except NotMeasured as reason:
        raise BenchError(f"the sampling tail: {reason}") from reason
    return {**found}


def _measure_rig(
    config: Config,
    table: dict[int, Figures],
    draw: Callable[[int], workloads.Prompts],
    output_len: int,
) -> str:
    """Fill in what core's loop sees; the attention backend of the workers."""
    try:
        with Rig(config) as rig:
            rig.run(draw(1), 8, temperature=workloads.TEMPERATURE, is_overlapped=True)  # warm-up
            for batch, figures in table.items():
                runs = [
                    rig.run(
                        draw(batch),
                        output_len,
                        temperature=workloads.TEMPERATURE,
                        is_overlapped=is_overlapped,
                    )[NUM_SKIPPED:]
                    for is_overlapped in (False, True)
                ]
                figures |= rig_figures(
                    single=runs[0], overlapped=runs[1], sampling_ms=figures["sampling"]
                )
            return rig.attention_backend
    except RigFailed as error:
        raise BenchError(str(error)) from error


def rig_figures(
    *,
    single: Sequence[StepTimes],
    overlapped: Sequence[StepTimes],
    sampling_ms: float | None,
) -> Figures:
    """Medians from steps that ran alone and steps that ran ahead; None without such steps.

    Forward is what sampling leaves of the device's time: all of it where that is unknown.
    """

    def median(steps: Sequence[StepTimes], value: Callable[[StepTimes], float]) -> float | None:
        return statistics.median(map(value, steps)) if steps else None

    step_ms = median(overlapped, lambda step: step.interval_ms)
    device_ms = median(overlapped, lambda step: step.device_ms)
    idle_ms = forward_ms = None
    if step_ms is not None and device_ms is not None:
        idle_ms = max(0.0, step_ms - device_ms)
        forward_ms = max(0.0, device_ms - (sampling_ms or 0.0))
    return {
        "scheduler": median(overlapped, lambda step: step.plan_ms + step.commit_ms),
        "message": median(overlapped, lambda step: step.send_ms),
        "graph launch": median(overlapped, lambda step: step.launch_ms) or None,
        "forward": forward_ms,
        "emit": median(overlapped, lambda step: step.emit_ms),
        "exchange": median(single, lambda step: step.answer_ms - step.device_ms),
        "step, core": step_ms,
        "idle": idle_ms,
    }


def _measure_engine(engine: Started, prompts: workloads.Prompts, output_len: int) -> Figures:
    """What the client sees, and each process's CPU time a decode step."""
    pids = child_pids(engine.llm.announcement.url)
    full = decode_full_batch(
        engine.llm,
        prompts,
        output_len,
        workloads.TEMPERATURE,
        read_meters=lambda: {name: cpu_s(pid) for name, pid in pids.items()},
    )
    cpu_ms: Figures = {
        name: used_s / full.num_steps * 1000 if full.num_steps > 0 else None
        for name, used_s in full.used.items()
    }
    return {
        "streaming": cpu_ms.get("frontend"),
        "core CPU": cpu_ms.get("core"),
        "worker CPU": cpu_ms.get("worker 0"),
        "total": workloads.median_step_ms(full.arrivals_s, NUM_SKIPPED) or None,
    }


def _with_floor(figures: Figures, floors: Floors | None, batch: int) -> Figures:
    if floors is None:
        return {"floor": None, "total / floor": None}
    floor_ms = floors.steps[batch].floor_ms
    total_ms = figures["total"]
    return {"floor": floor_ms, "total / floor": total_ms and total_ms / floor_ms}


def _format(name: str, backend: str, table: dict[int, Figures]) -> str:
    heading = f"one decode step of {name}, ms by batch" + (f" ({backend})" if backend else "")
    rows = [
        [line, *(figures[line] for figures in table.values()), meaning]
        for line, meaning in (PARTS | FURTHER).items()
    ]
    lines = format_table(["", *map(str, table), "what it is"], rows).splitlines()
    lines.insert(1 + len(PARTS), "")
    return "\n".join([heading, *lines])
