"""The engine that the offline benchmarks measure: its flags, its model folder, its start.

Workloads reach it through `generate_with`, which also proves that every token asked for came.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from nvserve.frontend.client import ServerGone
from nvserve.frontend.client_session import RequestError
from nvserve.protocol.config import Config
from nvserve.protocol.progress import Phase
from nvserve.scripts.bench.model_shapes import SHAPES, ModelShape, write_model_folder
from nvserve.scripts.bench.workloads import MAX_ID, Generate, Prompts
from nvserve.scripts.control_socket import Reply
from nvserve.scripts.embedded import LaunchFailed
from nvserve.scripts.finite_float import FINITE
from nvserve.scripts.interrupts import raised_once
from nvserve.scripts.launch_config import UsageError, build_config
from nvserve.scripts.llm import LLM, SamplingParams
from nvserve.scripts.model_facts import DEMO_MODEL
from nvserve.scripts.running import find_server, order
from nvserve.workers.models.registry import read_config
from nvserve.workers.step_result import ModelRefused

REQUEST_LIMIT_S: Final = 3600.0  # for one workload
SETTLE_LIMIT_S: Final = 120.0  # all graphs of an 8B took 1.8 s
CALM: Final = Phase.WAITING.name.lower()  # and not PREPARING_AHEAD
AT_LEAST_1: Final = click.IntRange(1)
LOOK_S: Final = 0.02  # between looks at the launcher's status


class BenchError(click.ClickException):
    """The engine cannot be measured; one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The flags of an engine; the names are those of `LLM`."""

    model: str
    tensor_parallel_size: int
    device: str
    dtype: str
    load_format: str | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    num_kv_blocks: int
    gpu_memory_utilization: float
    enforce_eager: bool
    attention_backend: str
    seed: int
    is_verbose: bool

    @staticmethod
    def take(flags: dict[str, Any]) -> "EngineOptions":
        """Take the engine's flags out of a command's."""
        names = EngineOptions.__slots__
        return EngineOptions(**{name: flags.pop(name) for name in names})


@dataclass(frozen=True, slots=True)
class BenchModel:
    """The folder to serve."""

    name: str
    folder: Path
    shape: ModelShape
    load_format: str

    @property
    def max_id(self) -> int:
        """The largest id that prompts may hold."""
        return min(MAX_ID, self.shape.vocab_size - 1)


@dataclass(slots=True)
class Started:
    """A running engine and how long its start took."""

    llm: LLM
    start_s: float  # until it could be asked
    ready_s: float  # from starting the command to its ready line
    details: list[str] = field(default_factory=list)

    def settle(self) -> None:
        """Wait until no worker has a CUDA graph left to capture.

        They do so in calm moments, of which a benchmark leaves none.
        """
        directory = find_server(int(self.llm.announcement.url.rpartition(":")[2]))
        deadline_s = time.monotonic() + SETTLE_LIMIT_S
        while not are_calm(order(directory, {"command": "status"})):
            if time.monotonic() > deadline_s:
                raise BenchError(f"workers still prepare themselves after {SETTLE_LIMIT_S:g} s")
            time.sleep(LOOK_S)


def are_calm(status: Reply) -> bool:
    """Whether all workers wait for steps alone, as the launcher's status has it."""
    pages = [one["page"] for one in status["processes"] if one["rank"] >= 0]
    return bool(pages) and all(page is not None and page["phase"] == CALM for page in pages)


@dataclass(frozen=True, slots=True)
class FullBatch:
    """A batch while all of its requests decoded."""

    arrivals_s: list[float]  # of one request's tokens, one a step
    used: dict[str, float]  # how far each meter went meanwhile

    @property
    def num_steps(self) -> int:
        return len(self.arrivals_s) - 1


def engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Put the engine's flags on a click command."""
    for flag in reversed(FLAGS):
        command = flag(command)
    return command


FLAGS: Final = (
    click.option("--model", default="demo", help=f"Folder, demo, or a shape: {', '.join(SHAPES)}."),
    click.option(
        "--tp",
        "tensor_parallel_size",
        type=AT_LEAST_1,
        default=1,
        help="Processes to split it over.",
    ),
    click.option("--device", type=click.Choice(["auto", "cpu", "cuda", "sim"]), default="auto"),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
    ),
    click.option(
        "--load-format", type=click.Choice(["auto", "dummy"]), help="[default: shapes dummy]"
    ),
    click.option("--max-model-len", type=AT_LEAST_1, help="[default: what the workload needs]"),
    click.option("--max-num-seqs", type=AT_LEAST_1, default=256, help="Requests running at once."),
    click.option("--max-num-batched-tokens", type=AT_LEAST_1, help="Token budget of a step."),
    click.option(
        "--num-kv-blocks",
        type=click.IntRange(0),
        default=0,
        help="Exact pool size, 0 to measure.",
    ),
    click.option(
        "--gpu-memory-utilization", type=FINITE, default=0.9, help="Share of the card to use."
    ),
    click.option("--enforce-eager", is_flag=True, help="No CUDA graphs."),
    click.option(
        "--attention-backend",
        type=click.Choice(["", "fa3", "fa2", "triton", "torch"]),
        default="",
        help="Empty: the best one that works.",
    ),
    click.option("--seed", default=0, help="Of dummy weights and of the workload."),
    click.option("--verbose", "is_verbose", is_flag=True, help="Show the engine's own lines."),
)


def parse_numbers(flag: str, text: str) -> list[int]:
    """`1,8,32` as positive integers; click.BadParameter otherwise."""
    try:
        numbers = [int(part) for part in text.split(",") if part]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise click.BadParameter(
            f"{text!r} is not a list of positive integers", param_hint=repr(flag)
        )
    return numbers


def check_batches(batches: Sequence[int], options: EngineOptions) -> None:
    """Refuse a batch whose requests could not all run at once: its step would be another's."""
    largest = max(batches, default=0)
    if largest > options.max_num_seqs:
        raise click.UsageError(
            f"--batches {largest}: at most {options.max_num_seqs} run at once (--max-num-seqs)"
        )


def check_length(options: EngineOptions, needed_len: int) -> None:
    """Refuse a limit that the workload's requests would exceed."""
    if options.max_model_len is not None and options.max_model_len < needed_len:
        raise click.UsageError(
            f"--max-model-len {options.max_model_len}: the workload needs {needed_len}"
        )


@contextmanager
def bench_model(options: EngineOptions) -> Iterator[BenchModel]:
    """The folder of --model; a shape's folder is written for the time of the benchmark.

    Inside, Ctrl-C is a KeyboardInterrupt, once: what is there can be put away.
    """
    with raised_once():
        if options.model in SHAPES:
            with tempfile.TemporaryDirectory(prefix="nvserve-bench-") as scratch:
                shape = SHAPES[options.model]
                folder = write_model_folder(shape, Path(scratch) / options.model)
                yield BenchModel(options.model, folder, shape, options.load_format or "dummy")
            return
        folder = DEMO_MODEL if options.model == "demo" else Path(options.model)
        shape = _read_shape(options.model, folder)
        yield BenchModel(options.model, folder, shape, options.load_format or "auto")


def _read_shape(name: str, folder: Path) -> ModelShape:
    """As the engine reads it; UsageError for a folder that it would refuse too."""
    if not folder.is_dir():
        known = ", ".join(SHAPES)
        raise UsageError(f"--model {name}: no model folder, and none of {known}")
    try:
        return ModelShape.of(read_config(folder))
    except ModelRefused as error:
        raise UsageError(f"--model {name}: {error}") from error


def bench_config(model: BenchModel, options: EngineOptions, needed_len: int) -> Config:
    """The configuration that an engine with these options gets; UsageError if there is none."""
    context_len = model.shape.context_len
    if options.max_model_len is None and needed_len > context_len:
        raise UsageError(
            f"the workload needs {needed_len} tokens, the context of {model.name} has {context_len}"
        )
    settings: dict[str, Any] = {
        "tp_size": options.tensor_parallel_size,
        "device": options.device,
        "dtype": options.dtype,
        "load_format": model.load_format,
        "max_model_len": options.max_model_len or needed_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "num_kv_blocks": options.num_kv_blocks,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "enforce_eager": options.enforce_eager,
        "attention_backend": options.attention_backend,
        "seed": options.seed,
        "host": "127.0.0.1",
        "served_model_names": [],
        "zmq_port": None,
        "log_level": "warning",
    }
    return build_config(model.folder, settings, has_key=False)


@contextmanager
def started_engine(
    model: BenchModel, options: EngineOptions, *, needed_len: int
) -> Iterator[Started]:
    """An engine whose requests may be `needed_len` tokens long; gone afterwards."""
    begun_s = time.perf_counter()
    try:
        llm = LLM(
            model.folder,
            tensor_parallel_size=options.tensor_parallel_size,
            device=options.device,
            dtype=options.dtype,
            load_format=model.load_format,
            max_model_len=options.max_model_len or needed_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            num_kv_blocks=options.num_kv_blocks,
            gpu_memory_utilization=options.gpu_memory_utilization,
            enforce_eager=options.enforce_eager,
            attention_backend=options.attention_backend,
            seed=options.seed,
            is_verbose=options.is_verbose,
        )
    except LaunchFailed as error:
        raise BenchError(str(error)) from error
    with llm:
        start_s = time.perf_counter() - begun_s
        told = llm.announcement
        try:
            yield Started(llm, start_s, told.start_s, told.details)
        except (RequestError, ServerGone) as error:  # too few blocks, or the engine has ended
            raise BenchError(str(error)) from error


def generate_with(llm: LLM) -> Generate:
    """The engine as the workloads call it; an answer of another length is a BenchError."""

    def generate(prompts: Prompts, max_tokens: list[int], temperature: float) -> None:
        params = [
            SamplingParams(max_tokens=count, ignore_eos=True, temperature=temperature)
            for count in max_tokens
        ]
        answers = llm.generate(prompts, params, limit_s=REQUEST_LIMIT_S)
        for answer, count in zip(answers, max_tokens, strict=True):
            if len(answer.outputs[0].token_ids) != count:
                got = len(answer.outputs[0].token_ids)
                raise BenchError(f"a request for {count} tokens got {got}")

    return generate


def decode_full_batch(
    llm: LLM,
    prompts: Prompts,
    output_len: int,
    temperature: float,
    read_meters: Callable[[], dict[str, float]] = dict,
) -> FullBatch:
    """Answer the prompts, and watch the time in which all of them are decoding.

    Requests start in order, so it begins with the last one's first token and ends with the first
    request.
    """
    fields: dict[str, Any] = {
        "max_tokens": output_len,
        "ignore_eos": True,
        "temperature": temperature,
    }
    requests = [llm.client.submit(prompt, **fields) for prompt in prompts]
    arrivals_s: list[float] = []
    begun: dict[str, float] = {}
    ended: dict[str, float] = {}
    for piece in llm.client.pieces(requests[-1], REQUEST_LIMIT_S):
        if len(requests) > 1 and requests[0].is_over:
            ended = ended or read_meters()
            continue
        # Steps are counted from the first piece on, whose tokens count as one; where tokens come
        # faster than they are sent, a piece has several.
        num_tokens = len(piece.token_ids) if arrivals_s else 1
        arrivals_s += [time.perf_counter()] * num_tokens
        begun = begun or read_meters()
    ended = ended or read_meters()
    for request in requests:
        llm.client.result(request, REQUEST_LIMIT_S)
    return FullBatch(arrivals_s, {name: ended[name] - start for name, start in begun.items()})


def write_result(path: Path | None, result: dict[str, Any]) -> None:
    """Write the JSON of a benchmark, if it was asked for."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")
        click.echo(f"result: {path}")


def format_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns, numbers to the right; floats with three decimals, None as a dash."""
    cells = [list(headings), *([_cell(value) for value in row] for row in rows)]
    columns = []
    for column in range(len(headings)):
        texts = [row[column] for row in cells]
        width = max(map(len, texts))
        is_text = any(isinstance(row[column], str) for row in rows)
        columns.append([text.ljust(width) if is_text else text.rjust(width) for text in texts])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
