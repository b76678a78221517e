"""Reads a Hugging Face model folder's own config files: what core and frontend must know of it.

Loads no weights and no tokenizer. Every refusal is one line for the user.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nvserve.protocol.config import ModelFacts

ARCHITECTURES: Final = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
DEMO_MODEL: Final = Path(__file__).parent / "demo_model"
DEMO_NAME: Final = "demo"


class ModelError(ValueError):
    """The folder cannot be served; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model folder that looks servable."""

    path: Path
    facts: ModelFacts
    num_query_heads: int
    dtype: str  # of the weights by config.json: float32, bfloat16 or float16


def read_model(path: Path, *, needs_weights: bool = True) -> Model:
    """Check the folder and read its config files; raises ModelError."""
    if not path.exists():
        raise ModelError(f"--model {path}: no such folder")
    if not path.is_dir():
        raise ModelError(f"--model {path}: not a folder")
    config = _read_json(path / "config.json")
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"--model {path}: no tokenizer.json")
    generation = path / "generation_config.json"
    model = _model_of(path, config, _read_json(generation) if generation.is_file() else {})
    if needs_weights and not any(path.glob("*.safetensors")):
        raise ModelError(f"--model {path}: no *.safetensors weights (or use --load-format dummy)")
    return model


def check_split(model: Model, tp_size: int) -> None:
    """Raise ModelError unless the heads can be divided among `tp_size` ranks.

    KV heads fewer than ranks are copied, so each must go to the same number of ranks.
    """
    num_query, num_kv = model.num_query_heads, model.facts.num_kv_heads
    if num_query % tp_size == 0 and (num_kv % tp_size == 0 or tp_size % num_kv == 0):
        return
    raise ModelError(f"--tp {tp_size} cannot split {num_kv} KV heads / {num_query} query heads")


def _model_of(path: Path, config: Mapping[str, Any], generation: Mapping[str, Any]) -> Model:
    names = config.get("architectures") or ["none"]
    if names[0] not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"--model {path}: architecture {names[0]} is not supported ({known} are)")
    num_heads = _positive(path, config, "num_attention_heads")
    facts = ModelFacts(
        architecture=names[0],
        vocab_size=_positive(path, config, "vocab_size"),
        num_layers=_positive(path, config, "num_hidden_layers"),
        num_kv_heads=_positive(path, config, "num_key_value_heads", num_heads),
        context_len=_positive(path, config, "max_position_embeddings"),
        bos_token_id=_first_id(generation, config, "bos_token_id"),
        eos_token_ids=list(
            dict.fromkeys(_ids(generation, "eos_token_id") + _ids(config, "eos_token_id"))
        ),
    )
    # transformers 5 writes `dtype` where 4 wrote `torch_dtype`
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return Model(path, facts, num_heads, dtype.removeprefix("torch."))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"--model {path.parent}: no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value


def _positive(path: Path, config: Mapping[str, Any], name: str, default: int = 0) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise ModelError(
            f"{path / 'config.json'}: {name} must be a positive integer, not {value!r}"
        )
    return value


def _ids(config: Mapping[str, Any], name: str) -> list[int]:
    """A token id that may be missing, null, one number or a list of them."""
    value = config.get(name)
    values = value if isinstance(value, list) else [value]
    return [token_id for token_id in values if isinstance(token_id, int) and token_id >= 0]


def _first_id(generation: Mapping[str, Any], config: Mapping[str, Any], name: str) -> int:
    return next(iter(_ids(config, name) + _ids(generation, name)), -1)
