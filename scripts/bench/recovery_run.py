"""A run of `bench recovery` at a server that is there: references, load, strikes, judgement.

Starts and ends nothing but requests; what it finds is told by recovery.py.
"""

import asyncio
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import click

from nvserve.frontend.client import AsyncClient
from nvserve.frontend.client_session import RequestError
from nvserve.protocol.config import Config
from nvserve.scripts.bench import workloads
from nvserve.scripts.bench.gpu_memory import read_gpu_memory
from nvserve.scripts.bench.own_process import NotMeasured
from nvserve.scripts.bench.recovery_faults import NotRecovered, Server, schedule, strike
from nvserve.scripts.bench.recovery_load import Load, take_references
from nvserve.scripts.bench.recovery_report import Fault, Reference, Verdict, clearest, judge
from nvserve.scripts.embedded import EmbeddedLaunch

LOST_LIMIT_S: Final = 10.0  # for requests at a server that did not survive a fault
INTERRUPTED: Final = "interrupted"


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
    min_gap: float = 0.0  # of all references, between the two best log-probabilities
    gpu_memory: dict[str, list[int]] = field(default_factory=dict)  # bytes by GPU
    server_words: list[str] = field(default_factory=list)  # its last lines


def is_exact(config: Config) -> bool:
    """Rounding changes no greedy id that is clear: none may differ."""
    return config.dtype == "float32"


class Run:
    """One server from its first request to the judgement of its last one."""

    def __init__(
        self, config: Config, options: RecoveryOptions, launch: EmbeddedLaunch, api_key: str
    ) -> None:
        self._config: Final = config
        self._options: Final = options
        self._launch: Final = launch
        self._api_key: Final = api_key
        self.findings: Final = Findings()

    async def whole(self, prompts: workloads.Prompts, deadline_s: float) -> None:
        """References, faults, the end of the load.

        A server that is lost and Ctrl-C are shortfalls: `findings` hold what was found by then.
        """
        limit_s = self._options.wait_limit
        try:
            with cancelled_by_interrupt():
                server = Server.of(self._launch, has_spare=self._options.spare)
                endpoint = self._launch.announcement.zmq_endpoint
                async with AsyncClient(endpoint, api_key=self._api_key) as client:
                    await server.settle(limit_s)
                    references = await self._references(client, prompts)
                    await self._read_memory("before")
                    await self._strike_all(server, client, references, deadline_s)
                if not self.findings.shortfall:
                    await server.settle(limit_s)
                    await self._read_memory("after")
        except NotRecovered as error:
            self.findings.shortfall = self.findings.shortfall or str(error)
        except asyncio.CancelledError:
            self.findings.shortfall = INTERRUPTED

    async def _references(
        self, client: AsyncClient, prompts: Sequence[list[int]]
    ) -> list[Reference]:
        limit_s = self._options.wait_limit
        try:
            found = await take_references(client, prompts, self._options.output_len, limit_s)
        except (RequestError, ConnectionError, TimeoutError) as error:
            raise NotRecovered(f"no references: {error or type(error).__name__}") from error
        if is_exact(self._config):
            found = clearest(found, self._options.streams)
        self.findings.min_gap = min(min(reference.gaps) for reference in found)
        return found

    async def _read_memory(self, when: str) -> None:
        if self._config.device != "cuda":
            return
        num_gpus = 1 if self._options.share_gpu else self._config.tp_size
        try:
            self.findings.gpu_memory[when] = await asyncio.to_thread(read_gpu_memory, num_gpus)
        except NotMeasured as reason:
            click.echo(f"no GPU memory: {reason}")

    async def _strike_all(
        self,
        server: Server,
        client: AsyncClient,
        references: Sequence[Reference],
        deadline_s: float,
    ) -> None:
        """Every fault there is time for, under load, and the judgement of what ended."""
        findings = self.findings
        async with Load(client, references) as load:
            try:
                await self._strike_each(server, load, deadline_s)
                limit_s = LOST_LIMIT_S if findings.shortfall else self._options.wait_limit
                await load.finish(limit_s)
            finally:
                findings.verdict = judge(load.judgeable(), references, findings.faults)

    async def _strike_each(self, server: Server, load: Load, deadline_s: float) -> None:
        """The first fault that is not survived is the last one."""
        options, findings = self._options, self.findings
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


@contextmanager
def cancelled_by_interrupt() -> Iterator[None]:
    """Inside, Ctrl-C cancels the present task, once; not where the parent has it ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield
        return
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None, "inside a coroutine there is a task"
    loop.add_signal_handler(signal.SIGINT, lambda: task.cancelling() or task.cancel())
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
