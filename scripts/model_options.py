"""The flags that `generate` and `chat` share: where a server is, or how to start one."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from nvserve.scripts.address_option import Address


@dataclass(frozen=True, slots=True)
class Chosen:
    """A running server's endpoint, or None and the launch flags of one to start."""

    endpoint: str | None
    flags: list[str]


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flags to a command, which gets them as `chosen`."""

    @click.option(
        "--endpoint", type=Address(), help="Of a running server, such as http://127.0.0.1:8000."
    )
    @click.option("--model", help="Model folder to serve.  [default: the demo model]")
    @click.option("--tp", type=int, help="Processes to split it over.  [default: 1]")
    @click.option("--device", help="auto, cpu or cuda.  [default: auto]")
    @click.option("--dtype", help="auto, float32, bfloat16 or float16.  [default: auto]")
    @functools.wraps(command)
    def with_chosen(endpoint: str | None, **rest: Any) -> None:
        names = ("model", "tp", "device", "dtype")
        given = {name: rest.pop(name) for name in names}
        flags = [
            part
            for name, value in given.items()
            if value is not None
            for part in (f"--{name}", str(value))
        ]
        if endpoint is not None and flags:
            raise click.UsageError(f"{flags[0]} is for a new server, not for --endpoint")
        command(chosen=Chosen(endpoint, flags), **rest)

    return with_chosen
