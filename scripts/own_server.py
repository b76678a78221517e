"""A server of one's own for a terminal command: `nvserve launch` as a child, gone when it ends."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click

READY_LINE: Final = re.compile(r"nvserve is ready: (\S+)\n")
STOP_LIMIT_S: Final = 10.0


@contextmanager
def endpoint_or_own(endpoint: str | None, flags: list[str]) -> Iterator[str]:
    """The given endpoint, or that of a fresh server started with these launch flags."""
    if endpoint is not None:
        yield endpoint
        return
    command = [
        *[sys.executable, "-P", "-m", "nvserve", "launch"],
        *["--port", "0", "--spares", "0", "--shutdown-timeout", "1", "--quiet"],
        *["--parent-pid", str(os.getpid()), *flags],
    ]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,  # Ctrl-C is for us: it may only stop a reply
    )
    try:
        yield _wait_ready(process)
    finally:
        _stop(process)


def _wait_ready(process: "subprocess.Popen[str]") -> str:
    """Its URL. The launcher bounds its own start, so its output ends if the server cannot."""
    assert process.stdout is not None
    for line in process.stdout:
        found = READY_LINE.match(line)
        if found:
            return found.group(1)
    code = process.wait(STOP_LIMIT_S)
    raise click.exceptions.Exit(code or 1)  # it has said why


def _stop(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_LIMIT_S)
    finally:
        assert process.stdout is not None
        process.stdout.close()
