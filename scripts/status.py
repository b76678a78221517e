"""`nvserve status`: what the launchers of this user say about themselves."""

import json
import time

import click

from nvserve.scripts import launch_dir
from nvserve.scripts.control_socket import Reply, ask
from nvserve.scripts.exit_codes import ExitCode

ANSWER_LIMIT_S = 5.0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def status(as_json: bool) -> None:
    """Show every running server of yours: state, epoch, restarts and processes."""
    num_found = num_silent = 0
    for directory in launch_dir.find_all():
        try:
            reply = ask(directory, {"command": "status"}, ANSWER_LIMIT_S)
        except TimeoutError:
            num_silent += 1
            click.echo(f"the launcher of {directory} does not answer: is it stopped?", err=True)
            continue
        except (OSError, ValueError):  # a stale directory: its launcher is gone
            continue
        num_found += 1
        if as_json:
            click.echo(json.dumps(reply | {"directory": str(directory)}))
        else:
            _print(reply)
    if not num_found:
        if not num_silent:
            click.echo("no server of yours is running", err=True)
        raise click.exceptions.Exit(ExitCode.ERROR)


def _print(reply: Reply) -> None:
    reason = f" ({reply['reason']})" if reply["reason"] else ""
    restarts = ", ".join(f"{name} {count}" for name, count in reply["restarts"].items())
    click.echo(f"{reply['url']}  {reply['state']}{reason}  {reply['model']}")
    click.echo(
        f"  epoch {reply['epoch']}, {reply['num_kv_blocks']} KV blocks, restarts: {restarts}"
    )
    if reply["recovery_seconds"]:
        phases = dict(reply["recovery_seconds"])
        total_s = phases.pop("total")
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
        click.echo(f"  the last recovery took {total_s:.2f} s ({parts})")
    now = time.monotonic()
    for process in reply["processes"]:
        page = process["page"]
        text = "no sign of life yet"
        if page is not None:
            age_s = now - page["time_s"]
            text = f"{page['phase']}, step {page['step']}, {age_s:.1f} s ago"
        click.echo(
            f"  {process['name']:<10} pid {process['pid']:<8} life {process['life']}  {text}"
        )
