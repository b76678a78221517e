"""Llama: the plain decoder, with optional biases."""

from typing import Final

from nvserve.workers.models.config import DecoderConfig, read_shared
from nvserve.workers.models.fields import Fields

MAX_POSITION: Final = 2048  # what the family means without max_position_embeddings


def read_llama(fields: Fields) -> DecoderConfig:
    """The decoder that a LlamaForCausalLM config.json describes."""
    has_bias = bool(fields.get("attention_bias", False))
    return DecoderConfig(
        **read_shared(fields, MAX_POSITION),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=bool(fields.get("mlp_bias", False)),
    )
