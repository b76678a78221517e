"""Architecture names of config.json and the families that read them.

Loads no torch: the launcher asks here too, before it starts anything.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from nvserve.workers.models.config import DecoderConfig
from nvserve.workers.models.fields import Fields, read_json
from nvserve.workers.models.llama import read_llama
from nvserve.workers.models.mistral import read_mistral
from nvserve.workers.models.qwen2 import read_qwen2
from nvserve.workers.models.qwen3 import read_qwen3
from nvserve.workers.step_result import ModelRefused

# Architecture -> its model_type, and who reads it.
FAMILIES: Final[dict[str, tuple[str, Callable[[Fields], DecoderConfig]]]] = {
    "LlamaForCausalLM": ("llama", read_llama),
    "MistralForCausalLM": ("mistral", read_mistral),
    "Qwen2ForCausalLM": ("qwen2", read_qwen2),
    "Qwen3ForCausalLM": ("qwen3", read_qwen3),
}


def read_config(model: Path) -> DecoderConfig:
    """The decoder in this folder; ModelRefused when it is none that can be served."""
    if not model.is_dir():
        raise ModelRefused(f"{model} is no folder")
    return read_fields(read_json(model / "config.json"))


def read_fields(fields: Fields) -> DecoderConfig:
    """The decoder that these fields of a config.json describe, or ModelRefused."""
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelRefused(f"config.json: architectures must name a single one, not {names!r}")
    if names[0] not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ModelRefused(f"config.json: architecture {names[0]} is not supported ({known} are)")
    model_type, read = FAMILIES[names[0]]
    # transformers goes by model_type: Granite under Llama's name would get Llama's answers here.
    if fields.get("model_type", model_type) != model_type:
        raise ModelRefused(
            f"config.json: model_type {fields['model_type']!r} is not {names[0]}'s {model_type!r}"
        )
    return read(fields)
