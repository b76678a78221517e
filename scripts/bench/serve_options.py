"""The flags of `bench serve`, spelled as in `vllm bench serve` where both have them, and checked.

Turns a command line into one ServeOptions; sends nothing.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import click

from nvserve.scripts.bench import datasets, report
from nvserve.scripts.bench.output_file import OutputFile, why_unusable
from nvserve.scripts.finite_float import FINITE, SECONDS, FiniteFloat

RANDOM_LEN_HELP: Final = "Tokens, for --dataset-name random."


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """One command line; the field names are those of the flags."""

    base_url: str
    endpoint: str
    model: str | None
    dataset_name: Literal["random", "sharegpt", "custom"]
    dataset_path: Path | None
    num_prompts: int
    random_input_len: int
    random_output_len: int
    random_range_ratio: float
    random_max_id: int
    output_len: int
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    num_warmups: int
    ignore_eos: bool | None
    temperature: float | None
    extra_body: dict[str, Any]
    seed: int
    percentile_metrics: list[str]
    metric_percentiles: list[float]
    goodput: dict[str, float]  # milliseconds by metric
    sweep: list[float]
    sweep_over: Literal["request-rate", "max-concurrency"]
    plot: Path | None
    output: Path | None
    save_result: bool
    result_dir: Path
    save_detailed: bool
    label: str
    request_timeout: float
    ready_check_timeout_sec: float
    disable_tqdm: bool

    @property
    def is_chat(self) -> bool:
        return "chat" in self.endpoint

    def check(self) -> None:
        """Refuse combinations that single flags cannot see."""
        if self.plot and not self.sweep:
            raise click.UsageError("--plot draws latency against load, so it needs --sweep")
        if self.dataset_name == "random" and self.dataset_path is not None:
            raise click.UsageError("--dataset-path needs --dataset-name sharegpt or custom")
        if self.dataset_name != "random" and self.dataset_path is None:
            raise click.UsageError(f"--dataset-name {self.dataset_name} needs --dataset-path")
        if not (self.request_rate > 0 and self.burstiness > 0):
            raise click.UsageError("--request-rate and --burstiness must be positive")
        if self.sweep and self._given_load() is not None:
            raise click.UsageError(f"--{self.sweep_over} is what --sweep sets: give only one")
        if math.inf in self.sweep and (self.plot or self.sweep_over == "max-concurrency"):
            raise click.UsageError("--sweep: inf is a request rate alone, and not to be plotted")
        if self.sweep_over == "max-concurrency" and any(one % 1 for one in self.sweep):
            raise click.UsageError("--sweep: requests at once are whole numbers")
        if self.save_detailed and not (self.output or self.save_result):
            raise click.UsageError("--save-detailed needs --output or --save-result")
        if self.result_dir != Path() and not self.save_result:
            raise click.UsageError("--result-dir needs --save-result")
        if self.save_result and (reason := why_unusable(self.result_path(""))):
            raise click.UsageError(f"--result-dir: {reason}")

    def _given_load(self) -> float | None:
        """The load of the kind that --sweep sets, if it was given on its own."""
        if self.sweep_over == "max-concurrency":
            return self.max_concurrency
        return None if math.isinf(self.request_rate) else self.request_rate

    def result_path(self, rest: str) -> Path:
        """The file in --result-dir that --save-result asks for."""
        return self.result_dir / f"{self.label}-{rest}.json"

    def questions(self) -> list[datasets.Question]:
        """The prompts of each load behind each other, then one to warm up; raises BadDataset.

        None is sent twice, or it would be in the server's prefix cache; but for a file with fewer.
        """
        count = self.num_prompts * max(1, len(self.sweep)) + 1
        if self.dataset_path is not None:
            return datasets.read_questions(
                self.dataset_path, count, output_len=self.output_len, seed=self.seed
            )
        return datasets.random_questions(
            count,
            input_len=self.random_input_len,
            output_len=self.random_output_len,
            range_ratio=self.random_range_ratio,
            max_id=self.random_max_id,
            seed=self.seed,
        )

    def body_fields(self) -> dict[str, Any]:
        """What every request carries beside its prompt and length."""
        ignore_eos = self.ignore_eos
        if ignore_eos is None:
            ignore_eos = self.dataset_name == "random"
        fields: dict[str, Any] = {"ignore_eos": True} if ignore_eos else {}
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        return fields | self.extra_body


def _numbers(context: click.Context, param: click.Parameter, value: str) -> list[float]:
    try:
        numbers = [float(part) for part in value.split(",") if part]
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers") from None
    if value and not numbers:
        raise click.BadParameter(f"{value!r} holds no number")
    if not all(number > 0 for number in numbers):
        raise click.BadParameter("every number must be positive")
    return numbers


def _percentiles(context: click.Context, param: click.Parameter, value: str) -> list[float]:
    numbers = _numbers(context, param, value)
    if not all(number <= 100 for number in numbers):
        raise click.BadParameter("a percentile is at most 100")
    return numbers


def _metrics(context: click.Context, param: click.Parameter, value: str) -> list[str]:
    names = [part.strip() for part in value.split(",") if part.strip()]
    unknown = [name for name in names if name not in report.METRIC_NAMES]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(report.METRIC_NAMES)}")
    return names


def _goodput(
    context: click.Context, param: click.Parameter, value: tuple[str, ...]
) -> dict[str, float]:
    try:
        return report.parse_goodput([pair for text in value for pair in text.split()])
    except report.BadGoodput as error:
        raise click.BadParameter(str(error)) from None


def _object(context: click.Context, param: click.Parameter, value: str) -> dict[str, Any]:
    try:
        parsed = json.loads(value)
    except ValueError as error:
        raise click.BadParameter(f"is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise click.BadParameter("must be a JSON object")
    return parsed


def serve_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Put every flag on a click command."""
    for flag in reversed(FLAGS):
        command = flag(command)
    return command


FLAGS: Final = (
    click.option("--base-url", default="http://127.0.0.1:8000", help="Of the server."),
    click.option("--endpoint", default="/v1/completions", help="Or /v1/chat/completions."),
    click.option("--model", default=None, help="Name to ask for.  [default: the server's first]"),
    click.option(
        "--dataset-name",
        type=click.Choice(["random", "sharegpt", "custom"]),
        default="random",
        help="random: token ids; the others read --dataset-path.",
    ),
    click.option("--dataset-path", type=click.Path(path_type=Path), help="JSON list or lines."),
    click.option("--num-prompts", type=click.IntRange(1), default=1000),
    click.option("--random-input-len", type=click.IntRange(1), default=1024, help=RANDOM_LEN_HELP),
    click.option("--random-output-len", type=click.IntRange(1), default=128, help=RANDOM_LEN_HELP),
    click.option(
        "--random-range-ratio",
        type=FiniteFloat(0, 1, max_open=True),
        default=0.0,
        help="Lengths vary by this share.",
    ),
    click.option(
        "--random-max-id",
        type=click.IntRange(1),
        default=datasets.DEFAULT_MAX_ID,
        help="Random ids are below it.",
    ),
    click.option("--output-len", type=click.IntRange(1), default=128, help="For data from a file."),
    click.option("--request-rate", type=float, default=math.inf, help="Requests a second."),
    click.option("--burstiness", type=float, default=1.0, help="1 = Poisson, less = in bursts."),
    click.option("--max-concurrency", type=click.IntRange(1), help="Requests at once."),
    click.option("--num-warmups", type=click.IntRange(0), default=1, help="Before the run."),
    click.option(
        "--ignore-eos/--no-ignore-eos",
        default=None,
        help="Ask for exactly the output length.  [default: for random]",
    ),
    click.option("--temperature", type=FINITE, default=None, help="[default: the server's own]"),
    click.option("--extra-body", default="{}", callback=_object, help="JSON for every request."),
    click.option("--seed", type=int, default=0, help="Of prompts, lengths and arrival times."),
    click.option("--percentile-metrics", default="ttft,tpot,itl,e2el", callback=_metrics),
    click.option("--metric-percentiles", default="50,90,99", callback=_percentiles),
    click.option("--goodput", multiple=True, callback=_goodput, help="Such as ttft:200 (ms)."),
    click.option("--sweep", default="", callback=_numbers, help="Loads to try, such as 1,2,4,8."),
    click.option(
        "--sweep-over",
        type=click.Choice(["request-rate", "max-concurrency"]),
        default="request-rate",
        help="What --sweep sets.",
    ),
    click.option("--plot", type=OutputFile(), help="SVG of latency against load."),
    click.option("--output", type=OutputFile(), help="JSON of the result."),
    click.option("--save-result", is_flag=True, help="Write JSON under a name of its own."),
    click.option("--result-dir", type=click.Path(path_type=Path), default=Path(), help="For it."),
    click.option("--save-detailed", is_flag=True, help="Also each request's times and lengths."),
    click.option("--label", default="nvserve", help="Kept in the result."),
    click.option("--request-timeout", type=SECONDS, default=600.0, help="Seconds for one answer."),
    click.option(
        "--ready-check-timeout-sec", type=FiniteFloat(0), default=60.0, help="For the server."
    ),
    click.option("--disable-tqdm", is_flag=True, help="No progress bar."),
)
