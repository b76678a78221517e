"""The words a launch says: its configuration first, endpoint and times once it is ready."""

import json
import shlex
from dataclasses import dataclass, field

from nvserve.protocol.config import Config
from nvserve.scripts.children import API_KEY_VARIABLE

EXAMPLE_PROMPT = "To be, or"


@dataclass(slots=True)
class StartTimes:
    """When what was ready (CLOCK_MONOTONIC), and the workers' own seconds by phase."""

    begun: float
    ready: dict[str, float] = field(default_factory=dict)  # by process name
    phases: dict[str, dict[str, float]] = field(default_factory=dict)  # by worker name
    attention_backend: str = ""
    zmq_endpoint: str = ""  # the door as it was opened, with its port


def describe_config(config: Config) -> list[str]:
    """What will be served and how, in a few lines; the API key is not part of a Config."""
    pool = f"{config.num_kv_blocks}" if config.num_kv_blocks else "measured"
    return [
        f"model {config.model} ({config.facts.architecture}), served as "
        + ", ".join(config.served_model_names),
        f"device {config.device}, {config.dtype}, tp {config.tp_size}, "
        f"weights {config.load_format}, spares {config.num_spares}",
        f"at most {config.max_model_len} tokens a request, {config.max_num_seqs} requests at once, "
        f"{config.max_num_batched_tokens} tokens a step",
        f"KV blocks of {config.block_size} tokens: {pool}; prefix caching "
        + ("on" if config.enable_prefix_caching else "off"),
    ]


def describe_start(
    config: Config,
    url: str,
    times: StartTimes,
    *,
    total_s: float,
    num_kv_blocks: int,
    needs_key: bool = False,
) -> tuple[str, list[str]]:
    """The line that announces the server, and the details below it."""
    line = f"nvserve is ready: {url}"
    body = json.dumps(
        {"model": config.served_model_names[0], "prompt": EXAMPLE_PROMPT, "max_tokens": 40}
    )
    key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if needs_key else ""
    parts = [f"{name} {at - times.begun:.1f}" for name, at in times.ready.items()]
    details = [
        f"  ready after {total_s:.1f} s; each process started after: {', '.join(parts)}",
        *(f"  {name}: {_seconds(phases)}" for name, phases in times.phases.items() if phases),
        f"  {num_kv_blocks} KV blocks of {config.block_size} tokens"
        + (f", attention by {times.attention_backend}" if times.attention_backend else ""),
        f"  curl {url}/v1/completions -H 'Content-Type: application/json'{key}"
        f" -d {shlex.quote(body)}",
    ]
    if times.zmq_endpoint:
        details.append(f"  ZMQ clients: {times.zmq_endpoint}")
    return line, details


def _seconds(phases: dict[str, float]) -> str:
    return ", ".join(f"{name} {length:.1f} s" for name, length in phases.items())
