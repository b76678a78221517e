"""Written model folders are whole, and floors count the right bytes."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from nvserve.scripts.bench import floors, own_process
from nvserve.scripts.bench.model_shapes import (
    SHAPES,
    ModelShape,
    make_tokenizer,
    write_model_folder,
)
from nvserve.scripts.model_facts import check_split, read_model

# Published parameter counts, in billions.
SIZES = {"qwen3-0.6b": 0.596, "qwen3-8b": 8.19, "llama-8b": 8.03, "llama-70b": 70.55}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_size_of_its_model(name: str) -> None:
    shape = SHAPES[name]
    matmuls = sum(rows * columns for rows, columns in floors.projection_shapes(shape, 1))
    embedding = shape.vocab_size * shape.hidden_size * (1 if shape.is_tied else 2)
    total = matmuls * shape.num_layers + embedding
    assert total / 1e9 == pytest.approx(SIZES[name], rel=0.005)


def test_ranks_share_the_projections_and_the_kv_evenly() -> None:
    shape = SHAPES["llama-70b"]
    whole = sum(rows * columns for rows, columns in floors.projection_shapes(shape, 1))
    half = sum(rows * columns for rows, columns in floors.projection_shapes(shape, 2))
    assert half * 2 == whole
    assert floors.kv_bytes_per_token(shape, 1) == 80 * 8 * 128 * 2 * 2
    assert floors.kv_bytes_per_token(shape, 2) * 2 == floors.kv_bytes_per_token(shape, 1)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_survives_its_own_config(name: str) -> None:
    shape = SHAPES[name]
    again = ModelShape.from_config(shape.config_json())
    assert again == ModelShape.from_config(again.config_json())
    assert floors.projection_shapes(again, 1) == floors.projection_shapes(shape, 1)
    assert (again.vocab_size, again.is_tied) == (shape.vocab_size, shape.is_tied)


def test_the_launcher_takes_a_written_folder_without_weights(tmp_path: Path) -> None:
    folder = write_model_folder(SHAPES["qwen3-0.6b"], tmp_path / "made" / "qwen")
    model = read_model(folder, needs_weights=False)
    check_split(model, 2)
    assert (model.facts.vocab_size, model.facts.num_layers) == (151_936, 28)
    assert (model.facts.bos_token_id, model.facts.eos_token_ids) == (0, [1])
    assert model.dtype == "bfloat16"


@pytest.mark.parametrize("vocab_size", [258, 259, 1000, 30_000])
def test_every_id_of_the_made_tokenizer_has_a_text_of_its_own(vocab_size: int) -> None:
    tokenizer = Tokenizer.from_str(json.dumps(make_tokenizer(vocab_size)))
    assert tokenizer.get_vocab_size() == vocab_size
    texts = [tokenizer.id_to_token(token_id) for token_id in range(vocab_size)]
    assert len(set(texts)) == vocab_size
    assert None not in texts


def test_the_made_tokenizer_gives_text_back_and_uses_long_tokens() -> None:
    tokenizer = Tokenizer.from_str(json.dumps(make_tokenizer(150_000)))
    text = "So it is: a hat, én 日 tent.\n"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text)
    assert max(ids) > 257  # merged, not bytes alone


def test_a_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="258"):
        make_tokenizer(257)


def test_without_a_gpu_there_is_no_floor_and_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(own_process.NotMeasured, match="no CUDA device"):
        floors.measure_floors(SHAPES["qwen3-0.6b"], [1], context=8)
