"""What a decoder is made of, in numbers, and how far tensor parallelism may cut it.

Knows names of config.json fields that all families share; the families add their own.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvserve.workers.step_result import ModelRefused


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base, and how its frequencies are scaled for longer contexts."""

    theta: float
    kind: str = "default"  # default, linear or llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3 only, like the two below
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class DecoderConfig:
    """One dense decoder-only transformer."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    is_tied: bool  # the head reads the embedding's weights
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model folder; ModelRefused says what is wrong with it."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelRefused(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelRefused(f"{path} holds no JSON object")
    return content


def read_shared(fields: dict[str, Any]) -> dict[str, Any]:
    """The arguments of DecoderConfig that every family spells alike."""
    if fields.get("quantization_config"):
        raise ModelRefused("quantized checkpoints are not supported")
    if fields.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelRefused(f"hidden_act {fields['hidden_act']!r} is not supported, only silu")
    num_heads = _positive(fields, "num_attention_heads")
    hidden_size = _positive(fields, "hidden_size")
    return {
        "architecture": fields["architectures"][0],
        "vocab_size": _positive(fields, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": _positive(fields, "intermediate_size"),
        "num_layers": _positive(fields, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": _positive(fields, "num_key_value_heads", num_heads),
        "head_dim": _positive(fields, "head_dim", hidden_size // num_heads),
        "norm_eps": float(fields.get("rms_norm_eps", 1e-6)),
        "rope": read_rope(fields),
        "is_tied": bool(fields.get("tie_word_embeddings", False)),
    }


def _positive(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or value <= 0:
        raise ModelRefused(f"config.json: {name} must be a positive integer, not {value!r}")
    return value


def read_rope(fields: dict[str, Any]) -> RopeConfig:
    """Rotary settings, from rope_parameters (transformers 5) or rope_theta and rope_scaling."""
    scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or fields.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    partial = fields.get("partial_rotary_factor") or scaling.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelRefused("rotary embedding of a part of each head is not supported")
    if kind not in ("default", "linear", "llama3"):
        raise ModelRefused(f"rope scaling {kind!r} is not supported: default, linear or llama3 are")
    if kind == "default":
        return RopeConfig(theta)
    try:
        factor = float(scaling["factor"])
        if kind == "linear":
            return RopeConfig(theta, kind, factor)
        return RopeConfig(
            theta,
            kind,
            factor,
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_position=int(scaling["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ModelRefused(f"config.json: rope scaling {kind!r} lacks {error}") from error


def check_parallel(config: DecoderConfig, tp_size: int) -> None:
    """Refuse a tensor-parallel size that does not divide this model; before anything is loaded."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % kv_heads:
        raise ModelRefused(f"{kv_heads} KV heads do not divide {heads} query heads")
    if heads % tp_size:
        raise ModelRefused(f"--tp {tp_size} does not divide {heads} query heads")
    if kv_heads % tp_size and tp_size % kv_heads:
        raise ModelRefused(f"--tp {tp_size} neither divides nor is divided by {kv_heads} KV heads")
    if config.intermediate_size % tp_size:
        raise ModelRefused(
            f"--tp {tp_size} does not divide the feed-forward size {config.intermediate_size}"
        )


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model: which heads, features and vocabulary rows it holds.

    KV heads are replicated when there are more ranks than KV heads. The vocabulary is cut into
    equal shards; the last ones are padded when it does not divide, and padding is never sampled.
    """

    config: DecoderConfig
    rank: int
    size: int

    @property
    def num_heads(self) -> int:
        return self.config.num_heads // self.size

    @property
    def num_kv_heads(self) -> int:
        return max(1, self.config.num_kv_heads // self.size)

    @property
    def first_kv_head(self) -> int:
        return self.rank * self.config.num_kv_heads // self.size

    @property
    def intermediate_size(self) -> int:
        return self.config.intermediate_size // self.size

    @property
    def vocab_width(self) -> int:
        """Vocabulary rows of every rank, padding included."""
        return math.ceil(self.config.vocab_size / self.size)

    @property
    def first_token_id(self) -> int:
        return self.rank * self.vocab_width

    @property
    def num_token_ids(self) -> int:
        """Vocabulary rows of this rank without padding; 0 where a rank has padding only."""
        room = self.config.vocab_size - self.first_token_id
        return max(0, min(self.vocab_width, room))
