"""Qwen3 (dense): a decoder that normalizes each head of Q and K, with its own head size."""

from typing import Final

from nvserve.workers.models.config import DecoderConfig, read_shared
from nvserve.workers.models.fields import Fields
from nvserve.workers.models.qwen2 import MAX_POSITION, NUM_KV_HEADS, read_layers

HEAD_DIM: Final = 128  # what the family means when config.json has no head_dim


def read_qwen3(fields: Fields) -> DecoderConfig:
    """The decoder that a Qwen3ForCausalLM config.json describes."""
    has_bias = bool(fields.get("attention_bias", False))
    if fields.get("head_dim") is None:
        fields = {**fields, "head_dim": HEAD_DIM}
    shared = read_shared(fields, MAX_POSITION, NUM_KV_HEADS)
    config = DecoderConfig(
        **shared, has_qkv_bias=has_bias, has_output_bias=has_bias, has_qk_norm=True
    )
    return read_layers(config, fields)
