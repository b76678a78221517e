"""Everything that needs several GPUs, in one run of a few minutes: right ids, sums, kills, steps.

    python -m nvserve.scripts.bench.several_gpus --tp 2 --output FILE

Each part is a process with a limit of its own, so that one that hangs or fails does not cost the
others; FILE is written after every part. The kills take the time that the others leave.
"""

import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import click

from nvserve.scripts.bench.engine import format_table, parse_numbers
from nvserve.scripts.bench.output_file import OutputFile
from nvserve.scripts.bench.part import Outcome, Part, Result, limits_s, run_part
from nvserve.scripts.finite_float import SECONDS

BENCH: Final = "nvserve.scripts.bench"
RESERVE_S: Final = 40.0  # of a part with faults: for the last one, the end of the load, the memory
WAIT_LIMIT_S: Final = 60.0  # for one recovery
MIB: Final = 1 << 20
ROWS: Final = "32"  # of the all-reduce that the table tells


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The flags, without the file's name."""

    tp: int
    device: str
    model: str
    big_model: str
    batches: str
    kills: int
    stops: int
    streams: int
    output_len: int
    num_prompts: int
    max_batch: int
    num_kv_blocks: int
    hang_timeout: float


# -- the parts -------------------------------------------------------------------------------------


def parts_of(options: Options) -> list[Part]:
    """In the order in which they run; the seconds are for 70B and 8B shapes on two GPUs."""
    return [
        Part("equal ids", 30, 80, lambda _: _equal_ids(options), tell_equal_ids),
        Part("all-reduce", 30, 70, lambda _: _all_reduce(options), tell_all_reduce),
        Part("step", 90, 190, lambda _: _latency(options), tell_latency),
        Part("recovery", 90, 600, lambda limit_s: _recovery(options, limit_s), tell_recovery),
        Part("recovery NCCL", 80, 150, lambda limit_s: _nccl(options, limit_s), tell_recovery),
    ]


def _words(flags: Mapping[str, object]) -> list[str]:
    return [text for flag, value in flags.items() for text in (flag, str(value))]


def _engine(options: Options, model: str) -> list[str]:
    """Flags of a benchmark that starts an engine."""
    flags = {
        "--model": model,
        "--tp": options.tp,
        "--device": options.device,
        "--num-kv-blocks": options.num_kv_blocks,
    }
    return _words(flags)


def _equal_ids(options: Options) -> list[str]:
    flags = {
        "--tp": options.tp,
        "--device": options.device,
        "--num-kv-blocks": options.num_kv_blocks,
        "--num-prompts": options.num_prompts,
        "--max-batch": options.max_batch,
    }
    return ["-m", f"{BENCH}.equal_ids", *_words(flags)]


def _all_reduce(options: Options) -> list[str]:
    return ["-m", f"{BENCH}.all_reduce", "--tp", str(options.tp)]


def _latency(options: Options) -> list[str]:
    batches = parse_numbers("--batches", options.batches)
    shape = ["--batches", options.batches, "--output-len", "96", "--max-num-seqs"]
    engine = _engine(options, options.big_model)
    return ["-m", "nvserve", "bench", "latency", *engine, *shape, str(max(batches))]


def _recovery(options: Options, limit_s: float) -> list[str]:
    flags = {
        "--kills": options.kills,
        "--stops": options.stops,
        "--streams": options.streams,
        "--output-len": options.output_len,
        "--hang-timeout": options.hang_timeout,
        "--wait-limit": WAIT_LIMIT_S,
        "--time-limit": max(limit_s / 2, limit_s - RESERVE_S),
    }
    engine = _engine(options, options.model)
    return ["-m", "nvserve", "bench", "recovery", *engine, *_words(flags)]


def _nccl(options: Options, limit_s: float) -> list[str]:
    """The same with fewer faults, and all sums through NCCL."""
    fewer = replace(options, kills=min(options.kills, 3), stops=min(options.stops, 1))
    return [*_recovery(fewer, limit_s), "--planned", "0", "--disable-custom-all-reduce"]


# -- what the table says of their results ----------------------------------------------------------


def tell_equal_ids(result: Result) -> str:
    return f"{result['num_answers']} answers, {result['num_differing']} differ"


def tell_all_reduce(result: Result) -> str:
    times = result["rows"][ROWS]
    ways = ", ".join(f"{way} {us:.1f}" for way, us in times.items())
    return f"{ROWS} rows, us: {ways}"


def tell_latency(result: Result) -> str:
    return "ms (/ floor): " + ", ".join(
        f"batch {batch} {_number(figures['total'])} ({_number(figures['total / floor'])})"
        for batch, figures in result["batches"].items()
    )


def tell_recovery(result: Result) -> str:
    """Faults, seconds until the streams went on, and what became of requests and memory."""
    told = []
    for kind, lines in result["seconds"].items():
        resumed = lines["resumed"]
        told.append(f"{resumed['num']} {kind} p95 {resumed['p95']:.2f} max {resumed['max']:.2f} s")
    requests = result["requests"]
    if requests is not None:
        told.append(f"lost {requests['num_lost']}/{requests['num']}")
        beyond = requests["num_differing_beyond_near_ties"]
        told.append(f"differing {requests['num_differing']} ({beyond} beyond ties)")
    if result["num_left_out"]:
        told.append(f"{result['num_left_out']} faults left out")
    memory = result["gpu_memory_bytes"] or {}
    if {"before", "after"} <= memory.keys():
        pairs = zip(memory["before"], memory["after"], strict=True)
        grown = "/".join(f"{(after - before) / MIB:+.0f}" for before, after in pairs)
        told.append(f"memory {grown} MiB")
    return ", ".join([result["failure"].partition("\n")[0], *told] if result["failure"] else told)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


# -- the run ---------------------------------------------------------------------------------------


def run_parts(
    parts: Sequence[Part], output: Path, about: dict[str, Any], deadline_s: float
) -> dict[str, Outcome]:
    """All of them, each with its share of the time to `deadline_s` (time.monotonic)."""
    outcomes: dict[str, Outcome] = {}
    for number, part in enumerate(parts):
        limit_s = limits_s(part, list(parts[number + 1 :]), deadline_s - time.monotonic())
        outcome = run_part(part, limit_s) if limit_s else Outcome("skipped: no time was left")
        outcomes[part.name] = outcome
        told = {name: asdict(one) for name, one in outcomes.items()}
        write_whole(output, about | {"parts": told})
        click.echo(f"{part.name}: {outcome.state} after {outcome.seconds:.0f} s", err=True)
    return outcomes


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Replace the file: who reads it, or ends this run, finds one version or the other."""
    fresh = path.with_name(f"{path.name}.part")
    fresh.write_text(json.dumps(content, indent=1) + "\n")
    fresh.replace(path)


@click.command(context_settings={"show_default": True})
@click.option("--tp", type=click.IntRange(2), default=2, help="GPUs.")
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    default="cuda",
    help="cpu to try the script out.",
)
@click.option("--model", default="llama-8b", help="Of the kills.")
@click.option("--big-model", default="llama-70b", help="Of the decode step.")
@click.option("--batches", default="1,32,128", help="Of the decode step.")
@click.option("--kills", type=click.IntRange(0), default=10, help="Of each rank.")
@click.option("--stops", type=click.IntRange(0), default=3, help="Of each rank.")
@click.option("--streams", type=click.IntRange(1), default=16, help="Under the kills.")
@click.option("--output-len", type=click.IntRange(1), default=512, help="Tokens of their requests.")
@click.option("--num-prompts", type=click.IntRange(1), default=20, help="Of the equal ids.")
@click.option("--max-batch", type=click.IntRange(1), default=17, help="Of the equal ids.")
@click.option(
    "--num-kv-blocks", type=click.IntRange(0), default=0, help="Exact pool size, 0 to measure."
)
@click.option(
    "--hang-timeout",
    type=SECONDS,
    default=6.0,
    help="Of the servers: graphs are captured anew.",
)
@click.option("--parts", "names", default="", help="Only these, such as: step,recovery.")
@click.option("--budget", "budget_s", type=SECONDS, default=480.0, help="Seconds for everything.")
@click.option("--output", type=OutputFile(), required=True, help="JSON.")
def main(*, names: str, budget_s: float, output: Path, **flags: Any) -> None:
    """Run all parts within the budget; exit status 1 if one is not ok."""
    deadline_s = time.monotonic() + budget_s
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the part's end too
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell script
        signal.signal(signal.SIGINT, signal.default_int_handler)  # parts shall have Ctrl-C
    options = Options(**flags)
    parse_numbers("--batches", options.batches)  # told before other parts take their minutes
    parts = parts_of(options)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = set(wanted) - {part.name for part in parts}
    if unknown:
        known = "; ".join(part.name for part in parts)
        text = f"{', '.join(sorted(unknown))}: none of {known}"
        raise click.BadParameter(text, param_hint="'--parts'")
    parts = [part for part in parts if part.name in wanted or not wanted]
    about = {"date": time.strftime("%Y%m%d-%H%M%S"), "budget_s": budget_s, **asdict(options)}
    outcomes = run_parts(parts, output, about, deadline_s)
    rows = [
        [part.name, outcome.state, outcome.seconds, outcome.summary(part)]
        for part, outcome in zip(parts, outcomes.values(), strict=True)
    ]
    click.echo(format_table(["part", "state", "seconds", "result"], rows))
    click.echo(f"result: {output}")
    if any(outcome.state != "ok" for outcome in outcomes.values()):
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    main()
