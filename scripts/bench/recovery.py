"""`nvserve bench recovery`: workers killed and stopped under load, and what the streams felt.

Launches a server of its own, notes each stream's ids undisturbed, then strikes one rank after the
other. Fails when a request is lost, or when ids differ in float32.
"""

import asyncio
import secrets
import time
from dataclasses import asdict
from random import Random
from typing import Any, Final

import click

from nvserve.protocol.config import Config
from nvserve.scripts.bench import workloads
from nvserve.scripts.bench.engine import (
    BenchError,
    BenchModel,
    EngineOptions,
    bench_config,
    bench_model,
    check_length,
    engine_flags,
    write_result,
)
from nvserve.scripts.bench.output_file import OutputFile
from nvserve.scripts.bench.recovery_report import (
    format_spreads,
    format_verdict,
    summarize,
    verdict_json,
)
from nvserve.scripts.bench.recovery_run import (
    INTERRUPTED,
    Findings,
    RecoveryOptions,
    Run,
    is_exact,
)
from nvserve.scripts.embedded import EmbeddedLaunch, LaunchFailed, Words
from nvserve.scripts.exit_codes import ExitCode
from nvserve.scripts.finite_float import SECONDS, FiniteFloat

START_LIMIT_S: Final = 1800.0
SPARE_TOKENS: Final = 16  # of the longest request
CANDIDATES: Final = 2  # prompts tried for each stream, where the clearest answers are taken
ENOUGH_RESTARTS: Final = 1_000_000
MIB: Final = 1 << 20


@click.command(context_settings={"show_default": True})
@engine_flags
@click.option("--kills", type=click.IntRange(0), default=10, help="SIGKILLs of each rank.")
@click.option("--stops", type=click.IntRange(0), default=3, help="SIGSTOPs of each rank.")
@click.option("--planned", type=click.IntRange(0), default=1, help="Planned restarts of each.")
@click.option("--streams", type=click.IntRange(1), default=16, help="Requests at any time.")
@click.option("--context", type=click.IntRange(1), default=64, help="Prompt tokens.")
@click.option("--output-len", type=click.IntRange(1), default=512, help="Tokens of a request.")
@click.option("--spare/--no-spare", default=True, help="Wait for a warm one before each fault.")
@click.option("--hang-timeout", type=SECONDS, default=5.0, help="Of the server.")
@click.option("--wait-limit", type=SECONDS, default=120.0, help="Seconds for one recovery.")
@click.option(
    "--time-limit", type=FiniteFloat(0), default=0.0, help="No new fault after it; 0 for none."
)
@click.option("--disable-custom-all-reduce", is_flag=True, help="Of the server.")
@click.option("--share-gpu", is_flag=True, help="Of the server; needs --num-kv-blocks.")
@click.option("--output", type=OutputFile(), help="JSON of the result.")
def recovery(**flags: Any) -> None:
    """Kill and stop each rank of a server under load; exit status 1 if a request is lost."""
    begun_s = time.monotonic()
    engine = EngineOptions.take(flags)
    options = RecoveryOptions(**flags)
    deadline_s = begun_s + options.time_limit if options.time_limit else float("inf")
    needed_len = options.context + options.output_len + SPARE_TOKENS
    check_length(engine, needed_len)
    if options.share_gpu and not engine.num_kv_blocks:
        raise click.UsageError("--share-gpu needs --num-kv-blocks")
    with bench_model(engine) as model:
        config = bench_config(model, engine, needed_len)
        num_prompts = options.streams * (CANDIDATES if is_exact(config) else 1)
        rng = Random(engine.seed)
        prompts = workloads.draw_prompts(num_prompts, options.context, rng, model.max_id)
        api_key = secrets.token_hex(16)  # other users of this machine can reach the port
        words = Words.COPIED if engine.is_verbose else Words.KEPT
        launch = EmbeddedLaunch(launch_flags(config, model, options), api_key=api_key, words=words)
        run = Run(config, options, launch, api_key)
        try:
            announcement = launch.wait_ready(START_LIMIT_S)
            click.echo(f"{model.name}: ready after {announcement.start_s:.1f} s")
            asyncio.run(run.whole(prompts, deadline_s))
        except LaunchFailed as error:
            raise BenchError(str(error)) from error
        except KeyboardInterrupt:
            run.findings.shortfall = INTERRUPTED
        finally:
            launch.stop()
        run.findings.server_words = launch.last_words().splitlines()
    complaint = _complaint(run.findings, config)
    _print(run.findings, complaint)
    write_result(options.output, _result(run.findings, complaint, model, config, options))
    if run.findings.shortfall == INTERRUPTED:
        raise click.exceptions.Exit(ExitCode.INTERRUPTED)
    if complaint:
        raise click.exceptions.Exit(1)


def launch_flags(config: Config, model: BenchModel, options: RecoveryOptions) -> list[str]:
    """Of a server with this configuration that survives any number of faults."""
    values = {
        "--model": model.folder,
        "--tp": config.tp_size,
        "--device": config.device,
        "--dtype": config.dtype,
        "--load-format": config.load_format,
        "--max-model-len": config.max_model_len,
        "--max-num-seqs": config.max_num_seqs,
        "--max-num-batched-tokens": config.max_num_batched_tokens,
        "--num-kv-blocks": config.num_kv_blocks,
        "--gpu-memory-utilization": config.gpu_memory_utilization,
        "--seed": config.seed,
        "--spares": int(options.spare),
        "--hang-timeout": options.hang_timeout,
        "--max-restarts": ENOUGH_RESTARTS,
        "--log-level": "warning",
        "--shutdown-timeout": 1,
    }
    flags = [text for flag, value in values.items() for text in (flag, str(value))]
    flags += ["--attention-backend", config.attention_backend] if config.attention_backend else []
    flags += ["--enforce-eager"] if config.enforce_eager else []
    flags += ["--disable-custom-all-reduce"] if options.disable_custom_all_reduce else []
    return flags + (["--share-gpu"] if options.share_gpu else [])


# -- the account -----------------------------------------------------------------------------------


def _complaint(findings: Findings, config: Config) -> str:
    """Why the exit status is 1; empty when it is 0."""
    parts = [findings.shortfall] if findings.shortfall else []
    if findings.verdict is not None:
        parts.append(findings.verdict.complaint(is_exact=is_exact(config)))
    return ", ".join(part for part in parts if part)


def _print(findings: Findings, complaint: str) -> None:
    if findings.faults:
        click.echo(format_spreads(summarize(findings.faults)))
    if findings.verdict is not None:
        click.echo(format_verdict(findings.verdict, findings.faults))
    for when, used in findings.gpu_memory.items():
        sizes = ", ".join(f"{one / MIB:.0f}" for one in used)
        click.echo(f"GPU memory {when} the faults, MiB: {sizes}")
    click.echo(f"failed: {complaint}" if complaint else "passed")


def _result(
    findings: Findings,
    complaint: str,
    model: BenchModel,
    config: Config,
    options: RecoveryOptions,
) -> dict[str, Any]:
    """Everything raw, and the figures of the table."""
    return {
        "model": model.name,
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "tensor_parallel_size": config.tp_size,
        "device": config.device,
        "dtype": config.dtype,
        "streams": options.streams,
        "context": options.context,
        "output_len": options.output_len,
        "has_spare": options.spare,
        "hang_timeout_s": options.hang_timeout,
        "failure": complaint,
        "min_gap": findings.min_gap,
        "seconds": summarize(findings.faults),
        "requests": None if findings.verdict is None else verdict_json(findings.verdict),
        "gpu_memory_bytes": findings.gpu_memory or None,
        "num_left_out": findings.num_left_out,
        "faults": [asdict(fault) for fault in findings.faults],
        "server_words": findings.server_words,
    }
