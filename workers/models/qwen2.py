"""Qwen2 and Qwen2.5: a decoder whose Q, K and V projections always have a bias."""

from typing import Any

from nvserve.workers.models.config import DecoderConfig, read_shared
from nvserve.workers.step_result import ModelRefused


def read_qwen2(fields: dict[str, Any]) -> DecoderConfig:
    """The decoder that a Qwen2ForCausalLM config.json describes."""
    if fields.get("use_sliding_window"):
        raise ModelRefused("sliding-window attention is not supported")
    return DecoderConfig(**read_shared(fields), has_qkv_bias=True)
