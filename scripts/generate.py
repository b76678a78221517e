"""`nvserve generate`: continue one prompt on the terminal, by an own server or a given one."""

import sys
from collections.abc import Iterable
from typing import Any

import click

from nvserve.scripts.client_http import RequestFailed, first_model, stream_completion
from nvserve.scripts.finite_float import FINITE
from nvserve.scripts.model_options import Chosen, model_options
from nvserve.scripts.own_server import endpoint_or_own


@click.command(context_settings={"show_default": True})
@click.argument("prompt")
@click.option("--max-tokens", type=int, default=200, help="Tokens to generate at most.")
@click.option("--temperature", type=FINITE, default=0.8, help="0 is greedy.")
@click.option("--top-p", type=FINITE, default=1.0, help="Share of probability to draw from.")
@click.option("--seed", type=int, default=None, help="Same seed, same text.  [default: random]")
@model_options
def generate(
    prompt: str,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
    chosen: Chosen,
) -> None:
    """Print PROMPT and what the model makes of it."""
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
    }
    if seed is not None:
        body["seed"] = seed
    try:
        with endpoint_or_own(chosen.endpoint, chosen.flags) as endpoint:
            body["model"] = first_model(endpoint)
            echo(prompt, stream_completion(endpoint, body))
    except RequestFailed as error:
        raise click.ClickException(str(error)) from error


def echo(prompt: str, pieces: Iterable[str]) -> None:
    """Print the prompt, once it has not been refused, and what continues it."""
    written = False
    try:
        for text in pieces:
            sys.stdout.write(text if written else prompt + text)
            sys.stdout.flush()
            written = True
    finally:
        if written:
            sys.stdout.write("\n")
