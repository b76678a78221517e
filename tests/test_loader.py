"""Loading weights: every parameter exactly once from whole, split, tied and broken checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from step_driver import Ask, greedy_reference, make_driver, save_model

from nvserve.workers.loader import load, load_dummy
from nvserve.workers.models.config import DecoderConfig, read_shared
from nvserve.workers.models.decoder import Decoder
from nvserve.workers.models.llama import read_llama
from nvserve.workers.models.registry import read_config
from nvserve.workers.parallel import TensorParallel
from nvserve.workers.step_result import ModelRefused

CPU = torch.device("cpu")
PROMPT = [3, 14, 15, 92, 65]
FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 51,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "attention_bias": True,
}


def make_decoder(config: DecoderConfig, rank: int = 0, size: int = 1) -> Decoder:
    return Decoder(config, TensorParallel(rank, size), 16, CPU, torch.float32)


def ignore(done: float) -> None:
    pass


def load_folder(folder: Path) -> Decoder:
    config = read_config(folder)
    decoder = make_decoder(config)
    load(folder, decoder.parameters(), config.is_tied, ignore)
    return decoder


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied checkpoint in one file."""
    folder = tmp_path_factory.mktemp("sound")
    save_model(folder, "LlamaForCausalLM")
    return folder


@pytest.fixture
def checkpoint(sound: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((sound / name).read_bytes())
    return tmp_path


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a one-file checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **changes: object) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, **changes}))


def split(folder: Path) -> dict[str, str]:
    """Turn a one-file checkpoint into two shards with an index; returns the weight map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, some in halves.items():
        save_file({name: tensors[name] for name in some}, folder / shard)
    weight_map = {name: shard for shard, some in halves.items() for name in some}
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_split_checkpoint_loads_what_the_whole_one_holds(checkpoint: Path, sound: Path) -> None:
    split(checkpoint)
    shares, wholes = load_folder(checkpoint).parameters(), load_folder(sound).parameters()
    for share, whole in zip(shares, wholes, strict=True):
        assert torch.equal(share.target, whole.target), share.name


def test_loading_reports_its_progress_up_to_the_end(sound: Path) -> None:
    decoder = make_decoder(read_config(sound))
    reports = list[float]()
    load(sound, decoder.parameters(), False, reports.append)
    assert reports == sorted(reports)
    assert len(reports) == len(decoder.parameters())
    assert reports[-1] == 1.0


def test_a_tied_checkpoint_needs_no_head(tmp_path: Path) -> None:
    model = save_model(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True)
    driver = make_driver(tmp_path, tmp_path)
    assert driver.generate([Ask(PROMPT, 8)]) == [greedy_reference(model, PROMPT, 8)]


@pytest.mark.parametrize("row", [0, 3, 96])
def test_a_tied_checkpoint_with_another_head_is_refused_by_the_ranks_that_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: int
) -> None:
    """As soon as it has the embedding. transformers unties such a model and serves the head."""
    monkeypatch.setattr("nvserve.workers.loader.COMPARED_ROWS", 10)
    save_model(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True)

    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][row, 5] += 1.0

    edit(tmp_path, add_head)
    config = read_config(tmp_path)
    for rank in range(2):
        parameters = make_decoder(config, rank, 2).parameters()
        if rank == row // 49:
            reports = list[float]()
            with pytest.raises(ModelRefused, match=r"the stored head.* must say false") as refused:
                load(tmp_path, parameters, True, reports.append)
            assert str(refused.value).startswith("lm_head.weight in model.safetensors differs")
            assert not reports
        else:
            load(tmp_path, parameters, True, ignore)


def test_a_head_that_differs_is_served_once_config_json_unties_it(tmp_path: Path) -> None:
    save_model(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_model = transformers.AutoModelForCausalLM.from_pretrained
    expected = greedy_reference(load_model(tmp_path, dtype=torch.float32).eval(), PROMPT, 8)
    edit_config(tmp_path, tie_word_embeddings=False)
    assert make_driver(tmp_path, tmp_path).generate([Ask(PROMPT, 8)]) == [expected]


def test_buffers_that_follow_from_the_config_are_no_extras(checkpoint: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(checkpoint, lambda tensors: tensors.update({name: torch.zeros(4)}))
    load_folder(checkpoint)


def test_half_precision_checkpoints_are_widened(checkpoint: Path, sound: Path) -> None:
    edit(checkpoint, lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()}))
    narrow, wide = load_folder(checkpoint), load_folder(sound)
    assert narrow.embedding.dtype == torch.float32
    torch.testing.assert_close(narrow.embedding, wide.embedding, atol=1e-3, rtol=1e-3)


# -- refusals ------------------------------------------------------------------------------------


def refusal(folder: Path) -> str:
    with pytest.raises(ModelRefused) as refused:
        load_folder(folder)
    return str(refused.value)


def test_an_untied_checkpoint_without_head_is_refused_by_name(checkpoint: Path) -> None:
    edit(checkpoint, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight" in refusal(checkpoint)


def test_a_missing_parameter_is_refused_by_name(checkpoint: Path) -> None:
    edit(checkpoint, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "model.layers.1.mlp.up_proj.weight" in refusal(checkpoint)


def test_an_extra_tensor_is_refused_by_name(checkpoint: Path) -> None:
    edit(checkpoint, lambda tensors: tensors.update({"model.layers.2.odd": torch.zeros(1)}))
    assert "model.layers.2.odd" in refusal(checkpoint)


def test_a_wrong_shape_is_refused_with_both_shapes(checkpoint: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    edit(checkpoint, lambda tensors: tensors.update({name: torch.zeros(33, 64)}))
    message = refusal(checkpoint)
    assert name in message
    assert "[33, 64]" in message
    assert "[32, 64]" in message


def test_an_integer_tensor_is_refused_by_name(checkpoint: Path) -> None:
    edit(checkpoint, lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    message = refusal(checkpoint)
    assert "model.norm.weight" in message
    assert "I8" in message


def test_an_index_that_names_a_missing_shard_is_refused(checkpoint: Path) -> None:
    split(checkpoint)
    (checkpoint / "b.safetensors").unlink()
    assert "b.safetensors" in refusal(checkpoint)


def test_an_index_that_places_a_tensor_wrongly_is_refused(checkpoint: Path) -> None:
    weight_map = split(checkpoint)
    wrong = {"a.safetensors": "b.safetensors", "b.safetensors": "a.safetensors"}
    weight_map["model.norm.weight"] = wrong[weight_map["model.norm.weight"]]
    write_index(checkpoint, weight_map)
    assert "model.norm.weight" in refusal(checkpoint)


def test_an_index_that_leaves_the_folder_is_refused(checkpoint: Path) -> None:
    weight_map = split(checkpoint)
    weight_map["model.norm.weight"] = "../a.safetensors"
    write_index(checkpoint, weight_map)
    assert "../a.safetensors" in refusal(checkpoint)


def test_a_tensor_in_two_shards_is_refused_by_name(checkpoint: Path) -> None:
    split(checkpoint)
    tensors = load_file(checkpoint / "a.safetensors") | load_file(checkpoint / "b.safetensors")
    save_file(tensors, checkpoint / "b.safetensors")
    assert "is in both a.safetensors and b.safetensors" in refusal(checkpoint)


def test_a_truncated_file_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "model.safetensors cannot be read" in refusal(checkpoint)


def test_a_clone_without_its_large_files_is_told_so(checkpoint: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4976698672\n"
    (checkpoint / "model.safetensors").write_text(pointer)
    assert "is a Git LFS pointer" in refusal(checkpoint)


def test_a_folder_without_weights_is_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert "holds no safetensors weights" in refusal(checkpoint)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "architectures"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_parameters": None, "rope_scaling": {"type": "odd", "factor": 2}}, "'odd'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(
    checkpoint: Path, changes: dict[str, object], reason: str
) -> None:
    edit_config(checkpoint, **changes)
    assert reason in refusal(checkpoint)


def test_broken_and_missing_configs_are_refused(tmp_path: Path) -> None:
    assert "is no folder" in refusal(tmp_path / "nowhere")
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "not a JSON object" in refusal(tmp_path)


def test_rope_settings_of_older_configs_are_read() -> None:
    scaling = {"type": "linear", "factor": 2.0}
    rope = read_shared({**FIELDS, "rope_theta": 5e5, "rope_scaling": scaling}, 2048)["rope"]
    assert (rope.theta, rope.kind, rope.factor) == (5e5, "linear", 2.0)


# -- random weights ------------------------------------------------------------------------------


def gathered(config: DecoderConfig, size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """The full tensors that the ranks of a group hold together, by name."""
    full: dict[str, torch.Tensor] = {}
    for rank in range(size):
        decoder = make_decoder(config, rank, size)
        load_dummy(decoder.parameters(), seed, ignore)
        for parameter in decoder.parameters():
            tensor = full.setdefault(parameter.name, torch.full(parameter.full_shape, torch.nan))
            length = parameter.target.shape[parameter.axis]
            tensor.narrow(parameter.axis, parameter.start, length).copy_(parameter.target)
    return full


@pytest.mark.parametrize("size", [2, 4, 8])
def test_random_weights_do_not_depend_on_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("nvserve.workers.loader.DUMMY_CHUNK", 100)  # many chunks to a tensor
    config = read_llama(FIELDS)
    one, several = gathered(config, 1), gathered(config, size)
    assert one.keys() == several.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, several[name]), name


def test_random_weights_are_small_normal_and_follow_the_seed() -> None:
    config = read_llama({**FIELDS, "hidden_size": 256, "intermediate_size": 512})
    weights, others = gathered(config, 1, seed=1), gathered(config, 1, seed=2)
    up = weights["model.layers.0.mlp.up_proj.weight"]
    assert float(up.std()) == pytest.approx(0.02, rel=0.02)
    assert abs(float(up.mean())) < 1e-3
    assert not torch.equal(up, others["model.layers.0.mlp.up_proj.weight"])
    assert not torch.equal(up, weights["model.layers.1.mlp.up_proj.weight"])
    assert (weights["model.layers.1.post_attention_layernorm.weight"] == 1.0).all()
