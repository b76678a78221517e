"""`nvserve bench throughput`: the offline workloads, through the processes that serve HTTP too.

First the mix of lengths, then plain decode steps by batch, beside the floor of the same run.
"""

import time
from random import Random
from typing import Any, Final

import click

from nvserve.scripts.bench import workloads
from nvserve.scripts.bench.engine import (
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
    generate_with,
    parse_numbers,
    started_engine,
    write_result,
)
from nvserve.scripts.bench.floors import Floors, measure_floors
from nvserve.scripts.bench.output_file import OutputFile
from nvserve.scripts.bench.own_process import NotMeasured

SPARE_TOKENS: Final = 16  # of the longest request
MIN_STEPS: Final = 8  # between the two lengths: fewer vanish in what two runs differ by anyway


@click.command(context_settings={"show_default": True})
@engine_flags
@click.option("--num-requests", type=click.IntRange(0), default=256, help="Of the mix; 0 = none.")
@click.option("--min-len", type=click.IntRange(1), default=100, help="Tokens, in and out.")
@click.option("--max-input-len", type=click.IntRange(1), default=1024)
@click.option("--max-output-len", type=click.IntRange(1), default=1024)
@click.option("--mix-rounds", type=click.IntRange(1), default=2, help="The first is cold.")
@click.option("--batches", default="1,8,32,128,256", help='Of the decode steps; "" = none.')
@click.option("--context", type=click.IntRange(1), default=workloads.CONTEXT, help="Before them.")
@click.option("--output-lens", default="16,144", help="Tokens of the two runs of a decode step.")
@click.option("--step-rounds", type=click.IntRange(1), default=3, help="The fastest counts.")
@click.option("--floor/--no-floor", default=True, help="Measure the GPU's floor first.")
@click.option("--output", type=OutputFile(), help="JSON of the result.")
def throughput(**flags: Any) -> None:
    """Measure offline throughput and the decode step by batch size."""
    options = EngineOptions.take(flags)
    batches = parse_numbers("--batches", flags["batches"]) if flags["batches"] else []
    check_batches(batches, options)
    for name in ("max_input_len", "max_output_len"):
        if flags["num_requests"] and flags["min_len"] > flags[name]:
            flag = "--" + name.replace("_", "-")
            raise click.UsageError(f"--min-len {flags['min_len']} is above {flag} {flags[name]}")
    short_len, long_len = parse_output_lens(flags["output_lens"])
    longest_mix = flags["max_input_len"] + flags["max_output_len"] if flags["num_requests"] else 0
    needed_len = max(longest_mix, flags["context"] + long_len) + SPARE_TOKENS
    check_length(options, needed_len)
    with bench_model(options) as model:
        bench_config(model, options, needed_len)  # what is wrong is told before any measurement
        result: dict[str, Any] = {
            "model": model.name,
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "tensor_parallel_size": options.tensor_parallel_size,
        }
        floors = find_floors(model, options, batches, flags) if flags["floor"] else None
        with started_engine(model, options, needed_len=needed_len) as engine:
            click.echo(f"{model.name}: ready after {engine.start_s:.1f} s")
            result |= {"start_s": engine.start_s, "start_details": engine.details}
            generate_with(engine.llm)([[5, 6, 7, 8]], [4], workloads.TEMPERATURE)
            if flags["num_requests"]:
                result["mix"] = _run_mix(engine, model, options.seed, flags)
            if batches:
                engine.settle()
                lens = (short_len, long_len)
                steps = _run_steps(engine, model, batches, lens, flags)
                result["steps"] = add_floors(steps, floors)
                click.echo(_steps_table(result["steps"]))
    if floors is not None:
        result |= {"gpu": floors.device, "copy_TBs": floors.copy_rate}
        result["stream_TBs"] = floors.stream_rate
    write_result(flags["output"], result)


def parse_output_lens(text: str) -> tuple[int, int]:
    """`16,144`: the short and the long run of a decode step."""
    numbers = parse_numbers("--output-lens", text)
    if len(numbers) != 2 or numbers[1] - numbers[0] < MIN_STEPS:
        raise click.BadParameter(
            f"{text!r} is not a shorter length and one longer by {MIN_STEPS} or more",
            param_hint=repr("--output-lens"),
        )
    return numbers[0], numbers[1]


def find_floors(
    model: BenchModel, options: EngineOptions, batches: list[int], flags: dict[str, Any]
) -> Floors | None:
    """The floors of this GPU at the run's mean context, or None, with the reason printed."""
    if not batches:
        return None
    short_len, long_len = parse_output_lens(flags["output_lens"])
    context = flags["context"] + (short_len + long_len) // 2
    try:
        return measure_floors(
            model.shape, batches, context=context, tp_size=options.tensor_parallel_size
        )
    except NotMeasured as reason:
        click.echo(f"no floor: {reason}")
        return None


def _run_mix(
    engine: Started, model: BenchModel, seed: int, flags: dict[str, Any]
) -> list[dict[str, float]]:
    mix = workloads.draw_mix(
        flags["num_requests"],
        min_len=flags["min_len"],
        max_input_len=flags["max_input_len"],
        max_output_len=flags["max_output_len"],
        max_id=model.max_id,
        seed=seed,
    )
    click.echo(
        f"mix: {len(mix.prompts)} requests, {mix.num_input_tokens} tokens in, "
        f"{mix.num_output_tokens} out"
    )
    rounds = workloads.measure_mix(
        generate_with(engine.llm),
        mix,
        num_rounds=flags["mix_rounds"],
        max_id=model.max_id,
        settle=engine.settle,
    )
    for number, one in enumerate(rounds):
        click.echo(
            f"  round {number}: {one.seconds:.2f} s, {one.output_rate:,.0f} output tokens a "
            f"second, {one.total_rate:,.0f} in all"
        )
    return [
        {"s": one.seconds, "out_tok_s": one.output_rate, "all_tok_s": one.total_rate}
        for one in rounds
    ]


def _run_steps(
    engine: Started,
    model: BenchModel,
    batches: list[int],
    output_lens: tuple[int, int],
    flags: dict[str, Any],
) -> dict[int, dict[str, float | None]]:
    """Both figures of a step by batch: by difference of two runs, and the median interval.

    None where the requests never decoded all at once, or the two runs differ by noise alone.
    """
    rng = Random(1)
    steps: dict[int, dict[str, float | None]] = {}
    for batch in batches:
        step_ms = workloads.measure_decode_step(
            generate_with(engine.llm),
            batch,
            rng,
            output_lens=output_lens,
            context=flags["context"],
            num_rounds=flags["step_rounds"],
            max_id=model.max_id,
        )
        prompts = workloads.draw_prompts(batch, flags["context"], rng, model.max_id)
        full = decode_full_batch(engine.llm, prompts, output_lens[1], workloads.TEMPERATURE)
        if full.num_steps < 1:
            click.echo(
                f"batch {batch}: its requests never ran all at once; more KV blocks may help"
            )
        steps[batch] = {
            "step_ms": step_ms if step_ms > 0 and full.num_steps > 0 else None,
            "median_step_ms": workloads.median_step_ms(full.arrivals_s) or None,
        }
    return steps


def add_floors(
    steps: dict[int, dict[str, float | None]], floors: Floors | None
) -> dict[int, dict[str, float | None]]:
    """Each batch's figures with its floor and their ratio; None where there is no floor."""
    whole = {}
    for batch, figures in steps.items():
        floor = floors.steps[batch] if floors is not None else None
        step_ms = figures["step_ms"]
        whole[batch] = figures | {
            "bytes_ms": floor.bytes_ms if floor else None,
            "floor_ms": floor.floor_ms if floor else None,
            "loaded_floor_ms": floor.loaded_floor_ms if floor else None,
            "ratio": step_ms / floor.floor_ms if floor and step_ms is not None else None,
            "loaded_ratio": step_ms / floor.loaded_floor_ms if floor and step_ms else None,
        }
    return whole


def _steps_table(steps: dict[int, dict[str, float | None]]) -> str:
    fields = ("step_ms", "median_step_ms", "bytes_ms", "floor_ms", "ratio", "loaded_ratio")
    headings = ["batch", "step ms", "median ms", "bytes ms", "floor ms", "step / floor"]
    headings.append("/ under load")
    rows = [[batch, *(figures[name] for name in fields)] for batch, figures in steps.items()]
    return format_table(headings, rows)
