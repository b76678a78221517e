"""`nvserve restart`: replace a process of a running server, lose nothing, say the pause."""

import time

import click

from nvserve.scripts.finite_float import SECONDS
from nvserve.scripts.running import Refused, find_server, order, process_name

POLL_S = 0.05


@click.command(context_settings={"show_default": True})
@click.argument("process", nargs=-1, required=True)
@click.option("--port", type=int, default=None, help="Of the server, when several are running.")
@click.option("--timeout", "timeout_s", type=SECONDS, default=120.0, help="Seconds to wait.")
def restart(process: tuple[str, ...], port: int | None, timeout_s: float) -> None:
    """Restart PROCESS: `worker N`, `core` or `frontend`.

    The steps in flight finish first. A frontend's open streams get the launch's --shutdown-timeout
    to finish before it goes, while new requests get a 503; longer ones over HTTP end with an error.
    """
    directory = find_server(port)
    number = order(directory, {"command": "restart", "name": process_name(process)})["number"]
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        last = order(directory, {"command": "status"})["last_planned"]
        if last is not None and last["number"] >= number:
            click.echo(f"restarted {last['name']}; pause {last['pause_s']:.2f} s")
            return
        time.sleep(POLL_S)
    raise Refused(f"not done within {timeout_s:g} s; see `nvserve status`")
