"""Finds the running server that a command is meant for, and speaks with its launcher."""

from pathlib import Path

import click

from nvserve.scripts import launch_dir
from nvserve.scripts.control_socket import Reply, Request, ask
from nvserve.scripts.exit_codes import ExitCode

ANSWER_LIMIT_S = 5.0


class Refused(click.ClickException):
    """The launcher says no, or there is none."""

    exit_code = ExitCode.ERROR


def find_server(port: int | None) -> Path:
    """The launch directory of the only server of this user, or of the one at `port`."""
    found = []
    silent = []
    for directory in launch_dir.find_all():
        try:
            url = ask(directory, {"command": "status"}, ANSWER_LIMIT_S)["url"]
        except TimeoutError:
            silent.append(directory)
            continue
        except (OSError, ValueError):  # a stale directory: its launcher is gone
            continue
        if port is None or url.endswith(f":{port}"):
            found.append(directory)
    if silent and not found:
        raise Refused(f"the launcher of {silent[0]} does not answer: is it stopped?")
    if not found:
        raise Refused("no server of yours is running" + (f" at port {port}" if port else ""))
    if len(found) > 1:
        raise Refused(f"{len(found)} servers of yours are running: choose one with --port")
    return found[0]


def order(directory: Path, request: Request) -> Reply:
    """The launcher's answer; Refused when it is an error or there is none in time."""
    try:
        reply = ask(directory, request, ANSWER_LIMIT_S)
    except (OSError, ValueError) as error:
        raise Refused(f"the launcher does not answer: {error}") from error
    if "error" in reply:
        raise Refused(reply["error"])
    return reply


def process_name(words: tuple[str, ...]) -> str:
    """`worker 1`, `worker1`, `core` ... as the launcher calls it."""
    name = " ".join(words)
    return f"worker {name[6:].strip()}" if name.startswith("worker") else name
