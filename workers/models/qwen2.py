"""Qwen2 and Qwen2.5: a decoder whose Q, K and V projections always have a bias."""

from typing import Final

from nvserve.workers.models.config import DecoderConfig, cap_context, read_shared
from nvserve.workers.models.fields import Fields
from nvserve.workers.step_result import ModelRefused

MAX_POSITION: Final = 32_768  # what the family means when config.json does not tell
NUM_KV_HEADS: Final = 32
WINDOW: Final = 4096
NUM_WIDE_LAYERS: Final = 28


def read_qwen2(fields: Fields) -> DecoderConfig:
    """The decoder that a Qwen2ForCausalLM config.json describes."""
    shared = read_shared(fields, MAX_POSITION, NUM_KV_HEADS)
    return read_layers(DecoderConfig(**shared, has_qkv_bias=True), fields)


def read_layers(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    """The config, its context capped if some layers, which Qwen3 tells alike, see a window only."""
    has_window = bool(fields.get("use_sliding_window")) and (
        fields.get("sliding_window", WINDOW) is not None
    )
    kinds = fields.get("layer_types")
    if kinds is None:
        num_wide = fields.get("max_window_layers", NUM_WIDE_LAYERS)
        if not isinstance(num_wide, int):
            raise ModelRefused(f"config.json: max_window_layers must be a number, not {num_wide!r}")
        is_sliding = has_window and num_wide < config.num_layers
        return cap_context(config, fields, WINDOW) if is_sliding else config
    if not isinstance(kinds, list) or len(kinds) != config.num_layers:
        raise ModelRefused(f"config.json: layer_types must name {config.num_layers} layers")
    for kind in kinds:
        if kind != "full_attention" and (kind != "sliding_attention" or not has_window):
            raise ModelRefused(f"config.json: layer_types: {kind!r} is not supported")
    return cap_context(config, fields, WINDOW) if "sliding_attention" in kinds else config
