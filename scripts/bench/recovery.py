"""`nvserve bench recovery`: workers killed and stopped under load, and what the streams felt.

Launches a server of its own, notes each stream's ids undisturbed, then strikes one rank after the
other. Fails when a request is lost, or when ids differ in float32.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import click

from nvserve.frontend.client import AsyncClient
from nvserve.frontend.client_session import RequestError
from nvserve.protocol.config import Config
from nvserve.scripts.bench import workloads
from nvserve.scripts.bench.engine import (
    BenchError,
    BenchModel,
    EngineOptions,
    bench_config,
    bench_model,
    engine_flags,
    write_result,
)
from nvserve.scripts.bench.gpu_memory import read_gpu_memory
from nvserve.scripts.bench.own_process import NotMeasured
from nvserve.scripts.bench.recovery_faults import NotRecovered, Server, schedule, strike
from nvserve.scripts.bench.recovery_load import Load, take_references
from nvserve.scripts.bench.recovery_report import (
    Fault,
    Reference,
    Verdict,
    format_spreads,
    format_verdict,
    judge,
    summarize,
    verdict_json,
)
from nvserve.scripts.embedded import EmbeddedLaunch, LaunchFailed, Words

START_LIMIT_S: Final = 1800.0
SPARE_TOKENS: Final = 16  # of the longest request
ENOUGH_RESTARTS: Final = 1_000_000
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryOptions:
    """What to do to the server; the field names are those of the flags."""

    kills: int
    stops: int
    planned: int
    streams: int
    context: int
    output_len: int
    spare: bool
    hang_timeout: float
    wait_limit: float
    time_limit: float
    disable_custom_all_reduce: bool
    share_gpu: bool
    output: Path | None


@dataclass(slots=True)
class Findings:
    """What a run has found so far."""

    faults: list[Fault] = field(default_factory=list)
    num_left_out: int = 0  # faults there was no time for
    shortfall: str = ""  # why the run ended early, empty if it did not
    verdict: Verdict | None = None
    gpu_memory: dict[str, list[int]] = field(default_factory=dict)  # bytes by GPU


@click.command(context_settings={"show_default": True})
@engine_flags
@click.option("--kills", type=click.IntRange(0), default=10, help="SIGKILLs of each rank.")
@click.option("--stops", type=click.IntRange(0), default=3, help="SIGSTOPs of each rank.")
@click.option("--planned", type=click.IntRange(0), default=1, help="Planned restarts of each.")
@click.option("--streams", type=click.IntRange(1), default=16, help="Requests at any time.")
@click.option("--context", type=click.IntRange(1), default=64, help="Prompt tokens.")
@click.option("--output-len", type=click.IntRange(1), default=512, help="Tokens of a request.")
@click.option("--spare/--no-spare", default=True, help="Wait for a warm one before each fault.")
@click.option("--hang-timeout", type=float, default=5.0, help="Of the server.")
@click.option("--wait-limit", type=float, default=120.0, help="Seconds for one recovery.")
@click.option("--time-limit", type=float, default=0.0, help="No new fault after it; 0 for none.")
@click.option("--disable-custom-all-reduce", is_flag=True, help="Of the server.")
@click.option("--share-gpu", is_flag=True, help="Of the server; needs --num-kv-blocks.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON of the result.")
def recovery(**flags: Any) -> None:
    """Kill and stop each rank of a server under load; exit status 1 if a request is lost."""
    begun_s = time.monotonic()
    engine = EngineOptions.take(flags)
    options = RecoveryOptions(**flags)
    deadline_s = begun_s + options.time_limit if options.time_limit else float("inf")
    with bench_model(engine) as model:
        needed_len = options.context + options.output_len + SPARE_TOKENS
        config = bench_config(model, engine, needed_len)
        prompts = workloads.draw_prompts(
            options.streams, options.context, Random(engine.seed), model.max_id
        )
        api_key = secrets.token_hex(16)  # other users of this machine can reach the port
        words = Words.COPIED if engine.is_verbose else Words.KEPT
        launch = EmbeddedLaunch(launch_flags(config, model, options), api_key=api_key, words=words)
        try:
            announcement = launch.wait_ready(START_LIMIT_S)
            click.echo(f"{model.name}: ready after {announcement.start_s:.1f} s")
            run = Run(config, options, launch, api_key)
            findings = asyncio.run(run.whole(prompts, deadline_s))
        except LaunchFailed as error:
            raise BenchError(str(error)) from error
        finally:
            launch.stop()
    complaint = _complaint(findings, config)
    _print(findings, complaint)
    write_result(options.output, _result(findings, complaint, model, config, options))
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


class Run:
    """One server from its first request to the judgement of its last one."""

    def __init__(
        self, config: Config, options: RecoveryOptions, launch: EmbeddedLaunch, api_key: str
    ) -> None:
        self._config: Final = config
        self._options: Final = options
        self._launch: Final = launch
        self._api_key: Final = api_key
        self._findings: Final = Findings()

    async def whole(self, prompts: workloads.Prompts, deadline_s: float) -> Findings:
        """References, faults, the end of the load; a server that is lost is a shortfall."""
        limit_s, options = self._options.wait_limit, self._options
        try:
            server = Server.of(self._launch, has_spare=options.spare)
            async with AsyncExitStack() as stack:
                endpoint = self._launch.announcement.zmq_endpoint
                client = AsyncClient(endpoint, api_key=self._api_key)
                await stack.enter_async_context(client)
                await server.settle(limit_s)
                references = await self._references(client, prompts)
                await self._read_memory("before")
                load = await stack.enter_async_context(Load(client, references))
                await self._strike_all(server, load, deadline_s)
                rides = await load.finish(limit_s)
                self._findings.verdict = judge(rides, references, self._findings.faults)
            if not self._findings.shortfall:
                await server.settle(limit_s)
                await self._read_memory("after")
        except NotRecovered as error:
            self._findings.shortfall = self._findings.shortfall or str(error)
        return self._findings

    async def _references(
        self, client: AsyncClient, prompts: Sequence[list[int]]
    ) -> list[Reference]:
        limit_s = self._options.wait_limit
        try:
            return await take_references(client, prompts, self._options.output_len, limit_s)
        except (RequestError, ConnectionError, TimeoutError) as error:
            raise NotRecovered(f"no references: {error or type(error).__name__}") from error

    async def _read_memory(self, when: str) -> None:
        if self._config.device != "cuda":
            return
        num_gpus = 1 if self._options.share_gpu else self._config.tp_size
        try:
            self._findings.gpu_memory[when] = await asyncio.to_thread(read_gpu_memory, num_gpus)
        except NotMeasured as reason:
            click.echo(f"no GPU memory: {reason}")

    async def _strike_all(self, server: Server, load: Load, deadline_s: float) -> None:
        """Every fault there is time for; the first one that is not survived is the last one."""
        options, findings = self._options, self._findings
        counts = {"kill": options.kills, "stop": options.stops, "planned": options.planned}
        strikes = schedule(counts, self._config.tp_size)
        for number, (kind, rank) in enumerate(strikes):
            if time.monotonic() > deadline_s:
                findings.num_left_out = len(strikes) - number
                click.echo(f"{findings.num_left_out} faults left out: the time is over")
                return
            try:
                fault = await strike(server, load, kind, rank, options.wait_limit)
            except NotRecovered as error:
                findings.shortfall = f"{kind} worker {rank}: {error}"
                return
            findings.faults.append(fault)
            click.echo(f"{number + 1}/{len(strikes)} {fault.describe()}")


# -- the account -----------------------------------------------------------------------------------


def _complaint(findings: Findings, config: Config) -> str:
    """Why the exit status is 1; empty when it is 0."""
    parts = [findings.shortfall] if findings.shortfall else []
    if findings.verdict is not None:
        parts.append(findings.verdict.complaint(is_exact=config.dtype == "float32"))
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
        "seconds": summarize(findings.faults),
        "requests": None if findings.verdict is None else verdict_json(findings.verdict),
        "gpu_memory_bytes": findings.gpu_memory or None,
        "num_left_out": findings.num_left_out,
        "faults": [asdict(fault) for fault in findings.faults],
    }
