"""Reads a Hugging Face model folder's own config files: what core and frontend must know of it.

Loads no weights and no tokenizer. Every refusal is one line for the user.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nvserve.protocol.config import ModelFacts
from nvserve.workers.models.config import DecoderConfig, check_parallel
from nvserve.workers.models.fields import Fields, read_json
from nvserve.workers.models.registry import read_fields
from nvserve.workers.step_result import ModelRefused

DEMO_MODEL: Final = Path(__file__).parent / "demo_model"
DEMO_NAME: Final = "demo"
DTYPES: Final = ("bfloat16", "float16", "float32")  # the first stands for any other


class ModelError(ValueError):
    """The folder cannot be served; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model folder that looks servable."""

    path: Path
    facts: ModelFacts
    decoder: DecoderConfig
    dtype: str  # of the weights by config.json, one of DTYPES


def read_model(path: Path, *, needs_weights: bool = True) -> Model:
    """Check the folder and read its config files; raises ModelError."""
    if not path.exists():
        raise ModelError(f"--model {path}: no such folder")
    if not path.is_dir():
        raise ModelError(f"--model {path}: not a folder")
    config = _read(path / "config.json")
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"--model {path}: no tokenizer.json")
    generation = path / "generation_config.json"
    model = _model_of(path, config, _read(generation) if generation.is_file() else {})
    if needs_weights and not any(path.glob("*.safetensors")):
        raise ModelError(f"--model {path}: no *.safetensors weights (or use --load-format dummy)")
    return model


def check_split(model: Model, tp_size: int) -> None:
    """Raise ModelError unless the model can be divided among `tp_size` ranks."""
    try:
        check_parallel(model.decoder, tp_size)
    except ModelRefused as error:
        raise ModelError(str(error)) from error


def _model_of(path: Path, config: Fields, generation: Fields) -> Model:
    try:
        decoder = read_fields(config)  # what a worker would refuse is refused before one starts
    except ModelRefused as error:
        raise ModelError(f"--model {path}: {error}") from error
    ends = _ids(generation, "eos_token_id") + _ids(config, "eos_token_id")
    begins = _ids(config, "bos_token_id") + _ids(generation, "bos_token_id")
    vocab_size = decoder.vocab_size
    facts = ModelFacts(
        architecture=decoder.architecture,
        vocab_size=vocab_size,
        num_layers=decoder.num_layers,
        num_kv_heads=decoder.num_kv_heads,
        context_len=decoder.context_len,
        bos_token_id=next((token_id for token_id in begins if token_id < vocab_size), -1),
        # An id beyond the vocabulary is never sampled, and masks have no place for it.
        eos_token_ids=[token_id for token_id in dict.fromkeys(ends) if token_id < vocab_size],
    )
    return Model(path, facts, decoder, _dtype(config))


def _dtype(config: Fields) -> str:
    """What --dtype auto means on a GPU; transformers 5 writes `dtype` where 4 wrote another."""
    name = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return name if name in DTYPES else DTYPES[0]


def _read(path: Path) -> Fields:
    try:
        return read_json(path)
    except ModelRefused as error:
        raise ModelError(f"--model {error}") from error


def _ids(config: Fields, name: str) -> list[int]:
    """A token id that may be missing, null, one number or a list of them."""
    value = config.get(name)
    values = value if isinstance(value, list) else [value]
    return [token_id for token_id in values if type(token_id) is int and token_id >= 0]
