"""Mistral: the plain decoder without biases.

Early ones attend within a window, and are served with a context as long as that window.
"""

from typing import Final

from nvserve.workers.models.config import DecoderConfig, cap_context, read_shared
from nvserve.workers.models.fields import Fields

MAX_POSITION: Final = 131_072  # what the family means when config.json does not tell
NUM_KV_HEADS: Final = 8
WINDOW: Final = 4096  # null is none


def read_mistral(fields: Fields) -> DecoderConfig:
    """The decoder that a MistralForCausalLM config.json describes."""
    config = DecoderConfig(**read_shared(fields, MAX_POSITION, NUM_KV_HEADS))
    if fields.get("sliding_window", WINDOW) is None:
        return config
    return cap_context(config, fields, WINDOW)
