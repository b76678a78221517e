"""A server of one's own for a terminal command: a launch that is gone when the command ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click

from nvserve.scripts.embedded import EmbeddedLaunch, LaunchFailed, Words
from nvserve.scripts.interrupts import raised_once

START_LIMIT_S: Final = 4000.0  # the launcher bounds its own start, and earlier


@contextmanager
def endpoint_or_own(endpoint: str | None, flags: list[str]) -> Iterator[str]:
    """The given endpoint, or that of a fresh server started with these launch flags.

    Inside, Ctrl-C is a KeyboardInterrupt, once.
    """
    with raised_once():
        if endpoint is not None:
            yield endpoint
            return
        own = ["--spares", "0", "--shutdown-timeout", "1", "--quiet"]
        launch = EmbeddedLaunch([*own, *flags], words=Words.SHOWN)
        try:
            yield _wait_ready(launch)
        finally:
            launch.stop()


def _wait_ready(launch: EmbeddedLaunch) -> str:
    """Its URL; if it cannot start, this command ends as it did."""
    try:
        return launch.wait_ready(START_LIMIT_S).url
    except LaunchFailed as error:
        if launch.exit_code is None:
            raise click.ClickException(str(error)) from error
        raise click.exceptions.Exit(launch.exit_code or 1) from error  # it has said why
