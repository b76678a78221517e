"""Architecture names of config.json and the families that read them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from nvserve.workers.models.config import DecoderConfig, read_json
from nvserve.workers.models.llama import read_llama
from nvserve.workers.models.qwen2 import read_qwen2
from nvserve.workers.models.qwen3 import read_qwen3
from nvserve.workers.step_result import ModelRefused

FAMILIES: Final[dict[str, Callable[[dict[str, Any]], DecoderConfig]]] = {
    "LlamaForCausalLM": read_llama,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
}


def read_config(model: Path) -> DecoderConfig:
    """The decoder in this folder; ModelRefused when it is none that can be served."""
    if not model.is_dir():
        raise ModelRefused(f"{model} is no folder")
    fields = read_json(model / "config.json")
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ModelRefused(f"{model / 'config.json'} names no single architecture: {names!r}")
    if names[0] not in FAMILIES:
        raise ModelRefused(f"{names[0]} is not supported; {', '.join(FAMILIES)} are")
    return FAMILIES[names[0]](fields)
