"""`nvserve launch`: flags -> Config (launch_config.py) -> supervisor. Loads no torch."""

import os
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from nvserve.protocol.child import die_with_parent
from nvserve.scripts import launch_dir, listener
from nvserve.scripts.children import API_KEY_VARIABLE
from nvserve.scripts.descriptors import TooFewDescriptors, check_limit
from nvserve.scripts.display import Display
from nvserve.scripts.finite_float import FINITE
from nvserve.scripts.launch_config import UsageError, build_config
from nvserve.scripts.outlet import Outlet
from nvserve.scripts.startup import describe_config
from nvserve.scripts.supervisor import Supervisor

MIN_API_KEY: Final = 8  # characters


def _load_defaults(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    """--config: a TOML or JSON file of flags without their dashes; the command line wins."""
    if path is None:
        return
    try:
        text = path.read_text()
        values = msgspec.json.decode(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise UsageError(f"--config {path}: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"--config {path}: not a table of flags")
    defaults: dict[str, Any] = {}
    for name, value in values.items():
        try:
            defaults |= _default_of(context.command, name.replace("_", "-"), value)
        except ValueError as error:
            raise UsageError(f"--config {path}: {name}: {error}") from error
    context.default_map = {**(context.default_map or {}), **defaults}


def _default_of(command: click.Command, name: str, value: Any) -> dict[str, Any]:
    """The value of one flag as the command line would give it; ValueError when it could not."""
    flag = f"--{name}"
    options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    for param in options:
        if param.name == "config" or flag not in param.opts + param.secondary_opts:
            continue
        if param.is_flag:
            if not isinstance(value, bool):
                raise ValueError(f"expected true or false, got {value!r}")
            return {str(param.name): value is (flag in param.opts)}
        values = value if param.multiple and isinstance(value, list) else [value]
        if any(isinstance(one, bool) or not isinstance(one, str | int | float) for one in values):
            raise ValueError(f"{value!r} is no value of {flag}")
        texts = [str(one) for one in values]
        return {str(param.name): texts if param.multiple else texts[0]}
    raise ValueError("there is no such flag")


def _refuse_key(context: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise UsageError(
            f"a key on the command line can be read by everybody on this machine: put it into "
            f"the environment variable {API_KEY_VARIABLE} or a file (--api-key-file)"
        )


@click.command(context_settings={"show_default": True})
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=_load_defaults,
    help="TOML or JSON file with any of these flags.",
)
@click.option("--model", help="Hugging Face model folder.  [default: the demo model]")
@click.option(
    "--served-model-name",
    "served_model_names",
    multiple=True,
    help="Name clients use; may be repeated.  [default: the folder's name]",
)
@click.option(
    "--tp",
    "--tensor-parallel-size",
    "tp_size",
    type=int,
    default=1,
    help="GPUs (worker processes) the model is split over.",
)
@click.option("--host", default="127.0.0.1", help="HTTP address.")
@click.option("--port", type=int, default=8000, help="HTTP port, 0 for any free one.")
@click.option(
    "--zmq-port",
    type=click.IntRange(0, 65535),
    default=None,
    help="Open the ZMQ client door at this port, 0 for any.  [default: closed]",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda", "sim"]),
    default="auto",
    help="auto: cuda when a GPU is visible.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    help="auto: float32 on CPU, the model's own on CUDA.",
)
@click.option(
    "--load-format",
    type=click.Choice(["auto", "dummy"]),
    default="auto",
    help="dummy: random weights.",
)
@click.option(
    "--max-model-len",
    type=int,
    default=None,
    help="Prompt and output tokens of one request.  [default: the model's context]",
)
@click.option("--max-num-seqs", type=int, default=256, help="Requests running at once.")
@click.option(
    "--max-num-batched-tokens",
    type=int,
    default=None,
    help="Token budget of a step.  [default: 8192 on CUDA, 2048 elsewhere]",
)
@click.option("--block-size", type=int, default=16, help="Tokens in a KV block.")
@click.option("--num-kv-blocks", type=int, default=0, help="Exact pool size, 0 to measure.")
@click.option(
    "--gpu-memory-utilization", type=FINITE, default=0.9, help="Share of the card to use."
)
@click.option(
    "--enable-prefix-caching/--no-enable-prefix-caching",
    default=True,
    help="Reuse KV blocks of equal prompt beginnings.",
)
@click.option("--enforce-eager", is_flag=True, help="No CUDA graphs.")
@click.option(
    "--disable-custom-all-reduce",
    is_flag=True,
    help="Sum over ranks through NCCL alone, not through each other's memory.",
)
@click.option(
    "--share-gpu",
    is_flag=True,
    help="Let ranks share GPUs when there are fewer than --tp; slow, needs --num-kv-blocks.",
)
@click.option(
    "--attention-backend",
    type=click.Choice(["", "fa3", "fa2", "triton", "torch"]),
    default="",
    help="Empty: the best one that works.",
)
@click.option("--max-queued-requests", type=int, default=1024, help="Waiting requests before 429.")
@click.option(
    "--request-timeout",
    "request_timeout_s",
    type=FINITE,
    default=0.0,
    help="Seconds a request may take by default, 0 for no limit.",
)
@click.option(
    "--shutdown-timeout",
    "shutdown_timeout_s",
    type=FINITE,
    default=30.0,
    help="Seconds running requests get after Ctrl-C or SIGTERM.",
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    default=None,
    help=f"File with the key clients must send; or set {API_KEY_VARIABLE}.",
)
@click.option("--api-key", expose_value=False, hidden=True, callback=_refuse_key)
@click.option(
    "--no-auth",
    "disable_auth",
    is_flag=True,
    help="Allow a --host other than loopback without a key.",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    help='Origin of web pages that may call the server, "*" for all; may be repeated.',
)
@click.option(
    "--tool-call-parser",
    type=click.Choice(["", "hermes", "llama3_json"]),
    default="",
    help="How the model writes tool calls; empty: only forced calls are parsed.",
)
@click.option(
    "--reasoning-parser",
    type=click.Choice(["", "think"]),
    default="",
    help="think: text between <think> and </think> is reasoning_content.",
)
@click.option(
    "--max-restarts",
    type=int,
    default=5,
    help="Unplanned deaths within --restart-window before giving up.",
)
@click.option("--restart-window", "restart_window_s", type=FINITE, default=60.0, help="Seconds.")
@click.option("--spares", "num_spares", type=int, default=1, help="Warm spare workers, 0 or 1.")
@click.option(
    "--hang-timeout",
    "hang_timeout_s",
    type=FINITE,
    default=5.0,
    help="Seconds of silence that count as a hang.",
)
@click.option("--sim-step-ms", type=FINITE, default=0.0, help="--device sim: fixed part of a step.")
@click.option("--sim-token-ms", type=FINITE, default=0.0, help="--device sim: part of each token.")
@click.option("--enable-faults", is_flag=True, help="Accept `nvserve fault`: for tests only.")
@click.option("--seed", type=int, default=0, help="Of dummy weights and of drawn request seeds.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    help="Of all processes.",
)
@click.option("--quiet", is_flag=True, hidden=True, help="Do not show the processes' own lines.")
@click.option("--parent-pid", type=int, default=None, hidden=True, help="Die with this process.")
def launch(
    *,
    model: str | None,
    api_key_file: Path | None,
    quiet: bool,
    parent_pid: int | None,
    **settings: Any,
) -> None:
    """Serve a model over HTTP (OpenAI-compatible) and ZeroMQ until Ctrl-C."""
    if parent_pid is not None:
        die_with_parent(parent_pid)
    if model == "":  # of a variable that is not set
        raise UsageError("--model is empty: give a folder, or leave it out for the demo model")
    api_key = _read_key(api_key_file)
    path = None if model is None else Path(model)
    config = build_config(path, settings, has_key=bool(api_key))
    try:
        check_limit(config)
        http = listener.listen(config.host, config.port)
        launch_dir.sweep()
        directory = launch_dir.LaunchDir()
    except (TooFewDescriptors, listener.ListenError, launch_dir.LaunchDirError) as error:
        raise click.ClickException(str(error)) from error
    outlet = Outlet()
    try:
        display = Display(outlet, is_quiet=quiet)
        for line in describe_config(config):
            display.note(line)
        supervisor = Supervisor(
            config, http=http, directory=directory, display=display, api_key=api_key
        )
        code = supervisor.run()
    finally:
        outlet.close()
    sys.exit(code)


def _read_key(path: Path | None) -> str:
    """The API key, or "" for none."""
    if path is None:
        key = os.environ.get(API_KEY_VARIABLE, "")
    else:
        try:
            key = path.read_text().strip()
        except (OSError, ValueError) as error:
            raise UsageError(f"--api-key-file {path}: {error}") from error
        if not key:
            raise UsageError(f"--api-key-file {path} is empty")
    if key and (len(key) < MIN_API_KEY or not key.isascii() or not key.isprintable()):
        raise UsageError(f"an API key needs {MIN_API_KEY} or more printable ASCII characters")
    return key
