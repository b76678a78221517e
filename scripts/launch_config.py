"""Flags and model folder -> Config; what cannot work is refused before anything starts.

Every refusal is one line that names the flag. Binds, starts and prints nothing.
"""

import re
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from nvserve.protocol.config import Config
from nvserve.scripts import listener
from nvserve.scripts.children import API_KEY_VARIABLE
from nvserve.scripts.device import has_gpu
from nvserve.scripts.exit_codes import ExitCode
from nvserve.scripts.model_facts import (
    DEMO_MODEL,
    DEMO_NAME,
    Model,
    ModelError,
    check_split,
    read_model,
)

# Flags whose name is not the field's own.
FLAGS: Final = {
    "tp_size": "--tp",
    "served_model_names": "--served-model-name",
    "num_spares": "--spares",
    "restart_window_s": "--restart-window",
    "hang_timeout_s": "--hang-timeout",
    "shutdown_timeout_s": "--shutdown-timeout",
    "request_timeout_s": "--request-timeout",
    "disable_auth": "--no-auth",
    "cors_origins": "--cors-origin",
}
NOT_UTF_8: Final = re.compile("[\ud800-\udfff]")  # what such bytes of a command line become
ORIGIN: Final = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+")  # as browsers send it


class UsageError(click.ClickException):
    """A wrong flag, model or combination: one line, exit status 2."""

    exit_code = ExitCode.USAGE


def build_config(path: Path | None, settings: dict[str, Any], *, has_key: bool) -> Config:
    """Resolve what is `auto`, check what only flags and model together can tell; UsageError."""
    try:
        model = read_model(path or DEMO_MODEL, needs_weights=settings["load_format"] != "dummy")
        if settings["tp_size"] > 0:
            check_split(model, settings["tp_size"])
    except ModelError as error:
        raise UsageError(str(error)) from error
    fields = dict(settings)
    _resolve(fields, model, is_demo=path is None)
    _check_encodable(fields)
    try:
        config = msgspec.convert(fields, Config)
    except msgspec.ValidationError as error:
        raise UsageError(_name_flag(str(error))) from error
    _check(config, has_key=has_key)
    return config


def _resolve(fields: dict[str, Any], model: Model, *, is_demo: bool) -> None:
    fields["model"] = str(model.path.resolve())
    fields["facts"] = msgspec.to_builtins(model.facts)
    default_name = DEMO_NAME if is_demo else model.path.resolve().name
    fields["served_model_names"] = list(fields["served_model_names"]) or [default_name]
    if fields["device"] == "auto":
        fields["device"] = "cuda" if has_gpu() else "cpu"
    if fields["dtype"] == "auto":
        fields["dtype"] = model.dtype if fields["device"] == "cuda" else "float32"
    if fields["max_num_batched_tokens"] is None:
        # Wide enough that a GPU works on prompts at its full rate; fewer, longer steps.
        fields["max_num_batched_tokens"] = 8192 if fields["device"] == "cuda" else 2048
    if fields["max_model_len"] is None:
        fields["max_model_len"] = model.facts.context_len
    zmq_port = fields.pop("zmq_port")
    if zmq_port is not None:
        host = f"[{fields['host']}]" if ":" in fields["host"] else fields["host"]
        fields["zmq_endpoint"] = f"tcp://{host}:{zmq_port or '*'}"


def _check_encodable(fields: dict[str, Any]) -> None:
    """Refuse names of other bytes than UTF-8: neither a message nor a response can hold them."""
    for field, value in sorted(fields.items()):
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str) and NOT_UTF_8.search(text):
                raise UsageError(f"{_flag_of(field)}: {text!r} is not UTF-8")


def _check(config: Config, *, has_key: bool) -> None:
    facts = config.facts
    if config.max_model_len > facts.context_len:
        raise UsageError(
            f"--max-model-len {config.max_model_len} is more than the model's context of "
            f"{facts.context_len} tokens"
        )
    if config.max_model_len < 2:
        raise UsageError("--max-model-len 1 leaves no room for a prompt and a token")
    if "" in config.served_model_names:
        raise UsageError("--served-model-name: a name must not be empty")
    for origin in config.cors_origins:
        if not ORIGIN.fullmatch(origin):
            raise UsageError(f"--cors-origin {origin}: neither scheme://host[:port] nor *")
    if config.num_kv_blocks == 1:
        raise UsageError("--num-kv-blocks 1 leaves none to use: the first one is scratch")
    if config.share_gpu and not config.num_kv_blocks:
        raise UsageError("--share-gpu needs --num-kv-blocks: ranks cannot measure side by side")
    if config.zmq_endpoint.rpartition(":")[2] == str(config.port):  # of any port it is "*"
        raise UsageError(f"--port and --zmq-port are both {config.port}: give two ports")
    if not listener.is_loopback(config.host) and not has_key and not config.disable_auth:
        raise UsageError(
            f"--host {config.host} can be reached from other machines: set an API key "
            f"({API_KEY_VARIABLE} or --api-key-file), or say --no-auth"
        )


def _name_flag(message: str) -> str:
    """msgspec's "... - at `$.tp_size`" as a sentence that names the flag."""
    text, _, place = message.partition(" - at `$.")
    field = place.rstrip("`").partition("[")[0].partition(".")[0]
    return f"{_flag_of(field)}: {text[:1].lower()}{text[1:]}"


def _flag_of(field: str) -> str:
    return FLAGS.get(field, "--" + field.replace("_", "-"))
