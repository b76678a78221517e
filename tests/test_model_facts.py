"""What the launcher reads of a model folder, and what it refuses before a process starts."""

import json
from pathlib import Path

import pytest

from nvserve.scripts.model_facts import DEMO_MODEL, ModelError, check_split, read_model
from nvserve.workers.models.registry import FAMILIES


def make_folder(folder: Path, *, ends: object = 1, **changes: object) -> Path:
    """The demo model's config with changes, without weights."""
    fields = {**json.loads((DEMO_MODEL / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_architecture_of_the_workers_is_taken(tmp_path: Path, architecture: str) -> None:
    names = {"architectures": [architecture], "model_type": FAMILIES[architecture][0]}
    model = read_model(make_folder(tmp_path, **names), needs_weights=False)
    assert model.facts.architecture == architecture
    assert (model.facts.vocab_size, model.facts.num_kv_heads) == (1024, 4)
    assert model.facts.context_len == 4096


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "float16", "dtype": "float32"}, "float32"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"torch_dtype": None}, "bfloat16"),
        ({"torch_dtype": "auto"}, "bfloat16"),
        ({"dtype": "float64"}, "bfloat16"),
    ],
)
def test_a_dtype_that_is_not_served_leaves_the_usual_one(
    tmp_path: Path, changes: dict[str, object], dtype: str
) -> None:
    assert read_model(make_folder(tmp_path, **changes), needs_weights=False).dtype == dtype


def test_ids_beyond_the_vocabulary_end_nothing(tmp_path: Path) -> None:
    """A mask over them would leave the logits: the worker would die of it."""
    folder = make_folder(
        tmp_path, ends=[3, 1024, 5], eos_token_id=[32000, True, 1023], bos_token_id=1024
    )
    facts = read_model(folder, needs_weights=False).facts
    assert facts.eos_token_ids == [3, 5, 1023]
    assert facts.bos_token_id == -1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"model_type": "granite"}, "model_type 'granite'"),
        ({"architectures": {"x": 1}}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type 'longrope'"),
        ({"max_position_embeddings": "4096"}, "max_position_embeddings"),
    ],
)
def test_what_a_worker_would_refuse_is_refused_before_one_starts(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    folder = make_folder(tmp_path, **changes)
    with pytest.raises(ModelError) as refused:
        read_model(folder, needs_weights=False)
    assert str(refused.value).startswith(f"--model {tmp_path}: config.json: ")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "tp_size", "words"),
    [
        ({}, 3, "--tp 3 cannot split 4 KV heads / 8 query heads"),
        (
            {"num_key_value_heads": 3},
            1,
            "num_key_value_heads 3 does not divide num_attention_heads 8",
        ),
        ({"intermediate_size": 385}, 2, "--tp 2 does not divide intermediate_size 385"),
    ],
)
def test_a_size_that_a_worker_would_refuse_is_refused_before_one_starts(
    tmp_path: Path, changes: dict[str, object], tp_size: int, words: str
) -> None:
    model = read_model(make_folder(tmp_path, **changes), needs_weights=False)
    with pytest.raises(ModelError, match=words):
        check_split(model, tp_size)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", None, ": no config.json"),
        ("config.json", "{", "/config.json cannot be read: "),
        ("config.json", "[]", "/config.json: not a JSON object"),
        ("generation_config.json", "[]", "/generation_config.json: not a JSON object"),
    ],
)
def test_a_file_that_holds_no_fields_is_refused_by_its_name(
    tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    make_folder(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError) as refused:
        read_model(tmp_path, needs_weights=False)
    assert str(refused.value).startswith(f"--model {tmp_path}{words}")


def test_yarn_widens_the_context_that_may_be_asked_for(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    model = read_model(make_folder(tmp_path, rope_scaling=scaling), needs_weights=False)
    assert model.facts.context_len == 16384
