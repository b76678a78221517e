"""The `nvserve` command: one click group whose sub-commands are imported only when they run."""

import importlib
import io
import os
import sys
from collections.abc import Callable
from typing import Any, Final

import click

import nvserve
from nvserve.scripts.entry import FAREWELL, INTERRUPTED
from nvserve.scripts.interrupts import raised_once

# name -> (module, command in it, one line of help)
COMMANDS: Final[dict[str, tuple[str, str, str]]] = {
    "launch": ("nvserve.scripts.launch", "launch", "Serve a model over HTTP and ZeroMQ."),
    "generate": ("nvserve.scripts.generate", "generate", "Continue one prompt on the terminal."),
    "chat": ("nvserve.scripts.chat", "chat", "Talk to a model on the terminal."),
    "status": ("nvserve.scripts.status", "status", "Show the running servers' processes."),
    "restart": ("nvserve.scripts.restart", "restart", "Replace a process, losing nothing."),
    "fault": ("nvserve.scripts.fault", "fault", "Make a process of a test server misbehave."),
}
BENCHMARKS: Final[dict[str, tuple[str, str, str]]] = {
    "scheduler": (
        "nvserve.scripts.bench.scheduler",
        "scheduler",
        "Cost of planning, without a GPU.",
    ),
    "frontend": (
        "nvserve.scripts.bench.frontend",
        "frontend",
        "Tokens streamed per second by the control path alone.",
    ),
    "serve": ("nvserve.scripts.bench.serve", "serve", "Load on a running server, over HTTP."),
    "throughput": (
        "nvserve.scripts.bench.throughput",
        "throughput",
        "Offline throughput and the decode step by batch size.",
    ),
    "latency": ("nvserve.scripts.bench.latency", "latency", "One decode step, taken apart."),
    "startup": ("nvserve.scripts.bench.startup", "startup", "Launch to ready, by phase."),
    "recovery": (
        "nvserve.scripts.bench.recovery",
        "recovery",
        "Workers killed and stopped under load.",
    ),
}


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one when it is called."""

    def __init__(
        self,
        name: str,
        lazy: dict[str, tuple[str, str, str]],
        text: str,
        callback: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(name=name, help=text, no_args_is_help=True, callback=callback)
        self._lazy: Final = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self._lazy, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return super().get_command(ctx, cmd_name)
        module, attribute, _ = self._lazy[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Ctrl-C of a command that lets it through is the end, and no error of anybody."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(FAREWELL, nl=False, err=True)
            ctx.exit(INTERRUPTED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing any."""
        rows = [(name, text) for name, (_, _, text) in self._lazy.items()]
        for name in super().list_commands(ctx):
            command = super().get_command(ctx, name)
            rows.append((name, command.get_short_help_str() if command else ""))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def put_away_at_interrupts() -> None:
    """A benchmark has servers and folders of its own: Ctrl-C lets it end them."""
    click.get_current_context().with_resource(raised_once())


group = LazyGroup("nvserve", COMMANDS, nvserve.__doc__ or "")
group.add_command(
    LazyGroup("bench", BENCHMARKS, "Measure parts of nvserve.", put_away_at_interrupts)
)


@group.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import PackageNotFoundError  # 20 ms that only this command needs
    from importlib.metadata import version as installed_version

    try:
        click.echo(installed_version("nvserve"))
    except PackageNotFoundError:
        click.echo("not installed (running from a checkout)")


def main() -> None:
    """Run the command line."""
    prepare_streams()
    group(prog_name="nvserve")


def prepare_streams() -> None:
    """Open what the parent has closed of 0, 1 and 2, lest a socket gets such a number."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model's text in a terminal of few letters
