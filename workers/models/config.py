"""What a decoder is made of, in numbers, and how far tensor parallelism may cut it.

Knows names of config.json fields that all families share; the families add their own.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from nvserve.workers.models.fields import Fields, positive_int, positive_number
from nvserve.workers.models.rope import RopeConfig, read_rope
from nvserve.workers.step_result import ModelRefused


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
    context_len: int  # tokens that positions are made for, and that every layer sees
    rope: RopeConfig
    is_tied: bool  # the head reads the embedding's weights
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False


def read_shared(
    fields: Fields, max_position: int, num_kv_heads: int | None = None
) -> dict[str, Any]:
    """The arguments of DecoderConfig that every family spells alike.

    max_position and num_kv_heads are what the family means where config.json has neither; without
    the latter, and where the field is null, there are as many KV heads as query heads.
    """
    _check_plain(fields)
    num_heads = positive_int(fields, "num_attention_heads")
    hidden_size = positive_int(fields, "hidden_size")
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise ModelRefused(
            f"config.json: num_attention_heads {num_heads} does not divide hidden_size"
            f" {hidden_size}, and there is no head_dim"
        )
    head_dim = positive_int(fields, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ModelRefused(f"config.json: head_dim {head_dim} is odd, rotation needs pairs")
    max_position = positive_int(fields, "max_position_embeddings", max_position)
    rope = read_rope(fields, max_position)
    if num_kv_heads is None or "num_key_value_heads" in fields:
        num_kv_heads = num_heads
    return {
        "architecture": fields["architectures"][0],
        "vocab_size": positive_int(fields, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": positive_int(fields, "intermediate_size"),
        "num_layers": positive_int(fields, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": positive_int(fields, "num_key_value_heads", num_kv_heads),
        "head_dim": head_dim,
        "norm_eps": positive_number(fields, "rms_norm_eps", 1e-6),
        # YaRN is often added to a config.json whose max_position_embeddings stays as it was.
        "context_len": max(max_position, rope.widened_context),
        "rope": rope,
        "is_tied": bool(fields.get("tie_word_embeddings", False)),
    }


def _check_plain(fields: Fields) -> None:
    """Refuse what would be another model than its other numbers tell."""
    if fields.get("quantization_config"):
        raise ModelRefused("config.json: quantization_config: quantized weights are not supported")
    if fields.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelRefused(f"config.json: hidden_act {fields['hidden_act']!r} is not silu")
    if fields.get("is_causal") is False:
        raise ModelRefused("config.json: is_causal false: this model reads ahead, it cannot write")
    if fields.get("per_layer_config"):
        raise ModelRefused("config.json: per_layer_config: layers that differ are not supported")


def cap_context(config: DecoderConfig, fields: Fields, default: int) -> DecoderConfig:
    """The config with a context of sliding_window tokens at most, for one with layers that slide.

    A token sees itself and the window - 1 tokens before it, so up to there such layers see all,
    like any other. What lies beyond would need attention to a window only, which is not supported.
    """
    window = positive_int(fields, "sliding_window", default)
    return replace(config, context_len=min(window, config.context_len))


def check_parallel(config: DecoderConfig, tp_size: int) -> None:
    """Refuse a tensor-parallel size that does not divide this model; before anything is loaded.

    KV heads fewer than ranks are copied, so each must go to the same number of ranks.
    """
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % tp_size or (kv_heads % tp_size and tp_size % kv_heads):
        raise ModelRefused(f"--tp {tp_size} cannot split {kv_heads} KV heads / {heads} query heads")
    if heads % kv_heads:
        raise ModelRefused(
            f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
        )
    if config.intermediate_size % tp_size:
        raise ModelRefused(
            f"--tp {tp_size} does not divide intermediate_size {config.intermediate_size}"
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
