"""Qwen3 (dense): a decoder that normalizes each head of Q and K, with its own head size."""

from typing import Any

from nvserve.workers.models.config import DecoderConfig, read_shared
from nvserve.workers.step_result import ModelRefused

HEAD_DIM = 128  # what the family means when config.json has no head_dim


def read_qwen3(fields: dict[str, Any]) -> DecoderConfig:
    """The decoder that a Qwen3ForCausalLM config.json describes."""
    if fields.get("use_sliding_window"):
        raise ModelRefused("sliding-window attention is not supported")
    has_bias = bool(fields.get("attention_bias", False))
    shared = read_shared({"head_dim": HEAD_DIM, **fields})
    return DecoderConfig(
        **shared, has_qkv_bias=has_bias, has_output_bias=has_bias, has_qk_norm=True
    )
