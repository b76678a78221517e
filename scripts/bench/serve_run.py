"""Runs of `bench serve`: one at a fixed load, or one for each load of a sweep.

Sends requests and times them; what the times mean is in report.py.
"""

import asyncio
import gc
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import click
from tqdm import tqdm

from nvserve.scripts.bench import report
from nvserve.scripts.bench.datasets import Question, arrivals_s
from nvserve.scripts.bench.load import Answer, Pool, Target, run_load
from nvserve.scripts.bench.serve_options import ServeOptions

SHORT_LIMIT_S: Final = 30.0  # for a question that needs no model
RETRY_S: Final = 0.5  # while the server is not there yet
MAX_ERRORS_SHOWN: Final = 5


class ServeError(click.ClickException):
    """The server cannot be measured; one line."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """How requests arrive."""

    rate: float  # requests a second, infinite = all at once
    burstiness: float
    max_concurrency: int | None

    def describe(self) -> str:
        rate = "all at once" if math.isinf(self.rate) else f"{self.rate:g} req/s"
        limit = f", at most {self.max_concurrency}" if self.max_concurrency else ""
        return f"Serving benchmark: {rate}{limit}"


def loads_of(options: ServeOptions) -> list[Traffic]:
    """The loads to run, in order."""
    rate, burstiness, limit = options.request_rate, options.burstiness, options.max_concurrency
    if not options.sweep:
        return [Traffic(rate, burstiness, limit)]
    if options.sweep_over == "request-rate":
        return [Traffic(load, burstiness, limit) for load in options.sweep]
    return [Traffic(rate, burstiness, max(1, round(load))) for load in options.sweep]


def request_body(question: Question, model: str, *, is_chat: bool, fields: dict[str, Any]) -> bytes:
    """The JSON of one streamed request; ServeError for ids, which a chat cannot carry."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": question.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if not is_chat:
        body["prompt"] = question.prompt
    elif isinstance(question.prompt, str):
        body["messages"] = [{"role": "user", "content": question.prompt}]
    else:
        raise ServeError("a chat takes text: use /v1/completions for prompts of token ids")
    return json.dumps(body | fields, separators=(",", ":")).encode()


async def measure(
    target: Target, questions: Sequence[Question], options: ServeOptions
) -> list[report.Result]:
    """One result, or one for each load of the sweep; `questions` as ServeOptions draws them."""
    model = options.model or await _first_model(target, options.base_url)
    fields = options.body_fields()
    bodies = [
        request_body(question, model, is_chat=options.is_chat, fields=fields)
        for question in questions
    ]
    await _wait_until_ready(target, bodies[-1], options)
    results = []
    for place, traffic in enumerate(loads_of(options)):
        own = slice(place * options.num_prompts, (place + 1) * options.num_prompts)
        result: report.Result = {
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "backend": "openai-chat" if options.is_chat else "openai",
            "label": options.label,
            "model_id": model,
            "tokenizer_id": None,
            "num_prompts": options.num_prompts,
            "request_rate": "inf" if math.isinf(traffic.rate) else traffic.rate,
            "burstiness": traffic.burstiness,
            "max_concurrency": traffic.max_concurrency,
        }
        result |= await _run(target, questions[own], bodies[own], traffic, options)
        click.echo(report.format_report(result, traffic.describe()))
        results.append(result)
    return results


async def _run(
    target: Target,
    questions: Sequence[Question],
    bodies: Sequence[bytes],
    traffic: Traffic,
    options: ServeOptions,
) -> report.Result:
    arrivals = arrivals_s(len(bodies), traffic.rate, traffic.burstiness, Random(options.seed))
    pool = Pool(target, timeout_s=options.request_timeout, keep_events=options.save_detailed)
    is_hidden = True if options.disable_tqdm else None  # None: hidden unless on a terminal
    gc.collect()
    gc.freeze()  # a collection over the bodies would be a pause in every stream
    with pool, tqdm(total=len(bodies), unit="req", disable=is_hidden) as bar:
        answers, duration_s = await run_load(
            pool,
            bodies,
            arrivals,
            max_concurrency=traffic.max_concurrency,
            on_answer=lambda _: bar.update(),
        )
    gc.unfreeze()
    _show_errors(answers)
    input_lens = [question.num_prompt_tokens for question in questions]
    result = report.summarize(
        answers,
        input_lens,
        duration_s,
        metrics=options.percentile_metrics,
        percentiles=options.metric_percentiles,
        goodput_ms=options.goodput,
    )
    return result | (report.details(answers, input_lens) if options.save_detailed else {})


def _show_errors(answers: Sequence[Answer]) -> None:
    errors = [answer.error for answer in answers if answer.error]
    for error in errors[:MAX_ERRORS_SHOWN]:
        click.echo(f"failed: {error}", err=True)
    if len(errors) > MAX_ERRORS_SHOWN:
        click.echo(f"... and {len(errors) - MAX_ERRORS_SHOWN} more failed", err=True)


async def _first_model(target: Target, base_url: str) -> str:
    models = Target.parse(base_url, "/v1/models", target.api_key)
    with Pool(models, timeout_s=SHORT_LIMIT_S) as pool:
        answer = await pool.ask(b"", method="GET")
    if answer.error:
        raise ServeError(f"cannot list the models of {base_url}: {answer.error}")
    try:
        return str(json.loads(answer.body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ServeError(f"{base_url}/v1/models lists no model; name one by --model") from error


async def _wait_until_ready(target: Target, body: bytes, options: ServeOptions) -> None:
    """Send the request until it is answered, then as often as there are warm-ups."""
    deadline_s = time.monotonic() + options.ready_check_timeout_sec
    with Pool(target, timeout_s=options.request_timeout) as pool:
        answer = await pool.ask(body)
        while _may_recover(answer) and time.monotonic() < deadline_s:
            await asyncio.sleep(RETRY_S)
            answer = await pool.ask(body)
        if answer.error:
            raise ServeError(f"the first request failed: {answer.error}")
        if not answer.event_times:
            raise ServeError("the first answer was no event stream with choices")
        await asyncio.gather(*(pool.ask(body) for _ in range(options.num_warmups)))


def _may_recover(answer: Answer) -> bool:
    """The server may still be starting."""
    return answer.error.startswith(("no connection", "the connection was lost", "HTTP 503"))
