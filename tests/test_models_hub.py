"""Model folders as hubs hold them: the answers of transformers from the same files, or a refusal.

A refusal names the field of config.json that is to blame.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_reference import prompt_logits
from safetensors.torch import load_file, save_file
from step_driver import Ask, greedy_reference, make_driver, save_model

from nvserve.workers.models.registry import read_config
from nvserve.workers.step_result import ModelRefused

LLAMA, MISTRAL = "LlamaForCausalLM", "MistralForCausalLM"
QWEN2, QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"
ORIGINAL = 32  # context before scaling; prompts are shorter, as long and longer
LENGTHS = (3, ORIGINAL, 120)
PROMPT = [5, 6, 7, 8] * 6

Fields = dict[str, Any]

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}
OLD = {"rope_parameters": None, "rope_theta": 5e4}  # before transformers 5


def make_folder(folder: Path, architecture: str, changes: Fields, **made: object) -> Path:
    """A tiny model whose config.json is changed after it was written."""
    save_model(folder, architecture, **made)
    edit_config(folder, lambda fields: fields.update(changes))
    return folder


def edit_config(folder: Path, change: Callable[[Fields], object]) -> None:
    fields = json.loads((folder / "config.json").read_text())
    change(fields)
    (folder / "config.json").write_text(json.dumps(fields))


def assert_same_as_transformers(folder: Path) -> None:
    torch.set_num_threads(1)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32).eval()
    driver = make_driver(folder, folder)
    for length in LENGTHS:
        prompt = [token * 7 % 97 for token in range(length)]
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(prompt_logits(driver, prompt), expected, atol=1e-4, rtol=1e-5)
    assert driver.generate([Ask(PROMPT, 16)]) == [greedy_reference(model, PROMPT, 16)]


# -- rotary settings -----------------------------------------------------------------------------

ROPES: dict[str, Fields] = {
    "none": {"rope_parameters": None},
    "theta-beside": {"rope_parameters": {"rope_type": "default"}, "rope_theta": 3e5},
    "theta-in-both": {"rope_parameters": {"rope_theta": 1e3}, "rope_theta": 3e5},
    "old-empty": {**OLD, "rope_scaling": {}},
    "old-linear": {**OLD, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "both-spellings": {**OLD, "rope_scaling": {"rope_type": "linear", "type": "x", "factor": 2}},
    "both-keys": {
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e3},
    },
    "old-llama3": {
        **OLD,
        "rope_scaling": {
            **{k: v for k, v in LLAMA3.items() if k != "rope_theta"},
            "rope_type": "llama3",
            "original_max_position_embeddings": ORIGINAL,
        },
    },
    "llama3-without-original": {
        "rope_parameters": {"rope_type": "llama3", **LLAMA3},
        "max_position_embeddings": ORIGINAL,
    },
    "llama3-original-beside": {
        "rope_parameters": {
            "rope_type": "llama3",
            **LLAMA3,
            "original_max_position_embeddings": 200,
        },
        "original_max_position_embeddings": ORIGINAL,
    },
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
    "old-yarn": {
        **OLD,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
    },
}
YARNS: dict[str, Fields] = {
    "plain": {},
    "attention-factor": {"attention_factor": 1.7},
    "betas": {"beta_fast": 8, "beta_slow": 2, "truncate": False},
    "mscale": {"mscale": 1.2, "mscale_all_dim": 0.7},
    "factor-below-one": {"factor": 0.5},
    "factor-of-the-contexts": {"factor": None},
    "betas-of-zero": {"beta_fast": 0, "beta_slow": 0},
    "original-as-float": {"original_max_position_embeddings": float(ORIGINAL)},
    "narrow": {"beta_fast": 1, "beta_slow": 1},
    "one-point": {"beta_fast": 1, "beta_slow": 1, "truncate": False},
    "one-index": {"beta_fast": ORIGINAL / math.tau, "beta_slow": ORIGINAL / math.tau},
}
ROPES |= {
    f"yarn-{name}": {
        "rope_parameters": {**YARN, "original_max_position_embeddings": ORIGINAL, **changes}
    }
    for name, changes in YARNS.items()
}


@pytest.mark.parametrize("changes", ROPES.values(), ids=ROPES)
def test_rotary_settings_in_every_spelling_are_those_of_transformers(
    tmp_path: Path, changes: Fields
) -> None:
    assert_same_as_transformers(make_folder(tmp_path, LLAMA, changes))


@pytest.mark.parametrize("architecture", [MISTRAL, QWEN2, QWEN3])
def test_every_family_reads_yarn(tmp_path: Path, architecture: str) -> None:
    made = {"head_dim": 16} if architecture == QWEN3 else {}
    changes = {**ROPES["old-yarn"], "sliding_window": None}
    assert_same_as_transformers(make_folder(tmp_path, architecture, changes, **made))


@pytest.mark.parametrize(
    ("kind", "changes", "context_len"),
    [
        ("yarn", {"original_max_position_embeddings": 256}, 1024),
        ("yarn", {"original_max_position_embeddings": ORIGINAL}, 256),
        ("yarn", {}, 256),
        ("linear", {}, 256),
        ("dynamic", {}, 256),
    ],
)
def test_yarn_widens_the_context_that_config_json_calls_the_original(
    tmp_path: Path, kind: str, changes: Fields, context_len: int
) -> None:
    """Without it max_position_embeddings may be either, and the shorter one is safe."""
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4, **changes}
    folder = make_folder(tmp_path, LLAMA, {"rope_parameters": rope})
    assert read_config(folder).context_len == context_len


# -- shapes, biases, windows ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "made", "changes"),
    [
        (LLAMA, {}, {"head_dim": None}),
        (QWEN2, {"head_dim": 16}, {}),
        (MISTRAL, {"head_dim": 24}, {"sliding_window": None}),
        (LLAMA, {"num_key_value_heads": 8}, {"num_key_value_heads": None}),
        (QWEN3, {"num_key_value_heads": 1, "head_dim": 16}, {}),
        (LLAMA, {"mlp_bias": True}, {}),
        (QWEN2, {}, {"attention_bias": False}),
        (LLAMA, {"rms_norm_eps": 0.3}, {}),
        (LLAMA, {}, {"hidden_act": "swish"}),
        (LLAMA, {}, {"attention_dropout": 0.5, "pretraining_tp": 2}),
        (LLAMA, {}, {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}),
        (MISTRAL, {}, {"sliding_window": 256}),
        (QWEN2, {}, {"sliding_window": 8, "max_window_layers": 0}),
        (QWEN2, {}, {**SLIDING, "max_window_layers": 2}),
        (QWEN2, {}, {**SLIDING, "sliding_window": 256, "max_window_layers": 0}),
        (QWEN3, {"head_dim": 16}, {**SLIDING, "layer_types": ["full_attention"] * 2}),
    ],
)
def test_other_settings_are_those_of_transformers(
    tmp_path: Path, architecture: str, made: Fields, changes: Fields
) -> None:
    assert_same_as_transformers(make_folder(tmp_path, architecture, changes, **made))


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        (MISTRAL, {}),
        (QWEN2, {"use_sliding_window": True, "layer_types": None, "max_window_layers": 0}),
        (QWEN2, {"use_sliding_window": True, "layer_types": None, "max_window_layers": 1}),
        (
            QWEN3,
            {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
        ),
    ],
    ids=["mistral", "all", "last", "first"],
)
def test_a_window_caps_the_context_where_it_begins_to_matter(
    tmp_path: Path, architecture: str, changes: Fields
) -> None:
    made = {"head_dim": 8} if architecture == QWEN3 else {}
    make_folder(tmp_path, architecture, {**changes, "sliding_window": 40}, **made)
    assert read_config(tmp_path).context_len == 40
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    driver = make_driver(tmp_path, tmp_path)
    prompt = [token * 7 % 97 for token in range(41)]
    with torch.inference_mode():
        inside, beyond = (model.eval()(torch.tensor([prompt[:n]])).logits[0] for n in (40, 41))
    torch.testing.assert_close(prompt_logits(driver, prompt[:40]), inside, atol=1e-4, rtol=1e-5)
    assert (prompt_logits(driver, prompt)[-1] - beyond[-1]).abs().max() > 1e-3
    expected = model.generate(torch.tensor([prompt[:24]]), max_length=40, do_sample=False)[0]
    assert driver.generate([Ask(prompt[:24], 16)]) == [expected[24:].tolist()]


@pytest.mark.parametrize(
    ("architecture", "num_kv_heads", "made"),
    [
        (LLAMA, 64, {}),
        (MISTRAL, 8, {"sliding_window": None}),  # null is none; absence has a test of its own
        (QWEN2, 32, {}),
        (QWEN3, 32, {"head_dim": 128}),
    ],
)
def test_fields_that_are_absent_mean_what_they_do_in_transformers(
    tmp_path: Path, architecture: str, num_kv_heads: int, made: Fields
) -> None:
    sizes = {"num_attention_heads": 64, "num_key_value_heads": num_kv_heads, "hidden_size": 256}
    save_model(tmp_path, architecture, **sizes, **made)
    known = {"architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size"}
    known |= {"num_hidden_layers", "num_attention_heads", "sliding_window"}
    edit_config(tmp_path, lambda fields: [fields.pop(k) for k in list(fields) if k not in known])
    expected = transformers.AutoConfig.from_pretrained(tmp_path)
    assert read_config(tmp_path).context_len == expected.max_position_embeddings
    assert read_config(tmp_path).num_kv_heads == expected.num_key_value_heads == num_kv_heads
    assert_same_as_transformers(tmp_path)


@pytest.mark.parametrize("architecture", [LLAMA, QWEN2, QWEN3])
def test_as_many_kv_heads_as_query_heads_are_meant_by_null(
    tmp_path: Path, architecture: str
) -> None:
    changes = {"num_key_value_heads": None}
    make_folder(tmp_path, architecture, changes, num_key_value_heads=8, head_dim=8)
    assert_same_as_transformers(tmp_path)


# -- files ---------------------------------------------------------------------------------------


def double_the_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def narrow(tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({name: t.bfloat16() for name, t in tensors.items() if "norm" not in name})


@pytest.mark.parametrize(
    ("is_tied", "change"), [(True, double_the_head), (False, narrow)], ids=["head", "dtypes"]
)
def test_tensors_that_hubs_hold_are_read_as_transformers_does(
    tmp_path: Path, is_tied: bool, change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    save_model(tmp_path, LLAMA, tie_word_embeddings=is_tied)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same_as_transformers(tmp_path)


def test_one_whole_file_is_read_and_not_the_shards_beside_it(tmp_path: Path) -> None:
    save_model(tmp_path, LLAMA)
    tensors = load_file(tmp_path / "model.safetensors")
    shard = "model-00001-of-00001.safetensors"
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, tmp_path / shard)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"layers.0.wq": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    assert_same_as_transformers(tmp_path)


# -- refusals ------------------------------------------------------------------------------------

REFUSALS: list[tuple[str, Fields, str]] = [
    (LLAMA, {"model_type": "granite", "logits_scaling": 8.0}, "model_type 'granite'"),
    (LLAMA, {"model_type": "gemma"}, "model_type 'gemma'"),
    (LLAMA, {"architectures": [LLAMA, "X"]}, "architectures"),
    (LLAMA, {"architectures": LLAMA}, "architectures"),
    (LLAMA, {"architectures": [["x"]]}, "architectures"),
    (LLAMA, {"architectures": ["GraniteForCausalLM"]}, "GraniteForCausalLM is not supported"),
    (LLAMA, {"is_causal": False}, "is_causal"),
    (LLAMA, {"per_layer_config": {"1": {"intermediate_size": 48}}}, "per_layer_config"),
    (LLAMA, {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    (LLAMA, {"head_dim": 9}, "head_dim 9"),
    (QWEN3, {"head_dim": 0}, "head_dim"),
    (LLAMA, {"head_dim": None, "num_attention_heads": 7}, "num_attention_heads 7"),
    (LLAMA, {"hidden_size": True}, "hidden_size"),
    (LLAMA, {"num_key_value_heads": 0}, "num_key_value_heads"),
    (LLAMA, {"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
    (LLAMA, {"vocab_size": 2**70}, "vocab_size must be at most 2147483647"),
    (LLAMA, {"max_position_embeddings": 2**31}, "max_position_embeddings must be at most"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    (LLAMA, {"rope_parameters": [1]}, "rope_parameters"),
    (LLAMA, {"rope_scaling": "linear"}, "rope_scaling"),
    (LLAMA, {"rope_parameters": None, "rope_theta": "big"}, "rope_theta"),
    (LLAMA, {"rope_parameters": None, "rope_theta": 0}, "rope_theta"),
    (LLAMA, {"rope_parameters": None, "rope_theta": 10**400}, "rope_theta"),
    (LLAMA, {"rope_parameters": {**YARN, "factor": 1e308}}, "factor"),
    (
        LLAMA,
        {"rope_parameters": {**YARN, "factor": 1e9, "original_max_position_embeddings": 256}},
        "factor 1e+09",
    ),
    (
        LLAMA,
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 8192.5}},
        "original_max_position_embeddings",
    ),
    (LLAMA, {"rope_parameters": {**YARN, "beta_fast": 1e308}}, "beta_fast"),
    (LLAMA, {"rope_parameters": {**YARN, "rope_theta": 1.0}}, "rope_theta 1 "),
    (LLAMA, {"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
    (LLAMA, {"rope_parameters": {"rope_type": ["linear"]}}, "rope_type ['linear']"),
    (LLAMA, {"rope_parameters": {"rope_type": "linear"}}, "factor"),
    (LLAMA, {"rope_parameters": {"rope_type": "linear", "factor": "x"}}, "factor"),
    (LLAMA, {"rope_parameters": {"rope_type": "linear", "factor": float("nan")}}, "factor"),
    (
        LLAMA,
        {"rope_parameters": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
        "low_freq_factor",
    ),
    (QWEN3, {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "full_attention"),
    (MISTRAL, {"sliding_window": "4096"}, "sliding_window"),
    (QWEN2, {**SLIDING, "sliding_window": 0, "max_window_layers": 1}, "sliding_window"),
    (QWEN2, {**SLIDING, "max_window_layers": "1"}, "max_window_layers"),
    (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    (QWEN3, {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
    (QWEN3, {"layer_types": ["full_attention"]}, "layer_types"),
]


@pytest.mark.parametrize(("architecture", "changes", "words"), REFUSALS)
def test_a_config_of_another_model_is_refused_by_its_field(
    tmp_path: Path, architecture: str, changes: Fields, words: str
) -> None:
    make_folder(tmp_path, architecture, changes)
    with pytest.raises(ModelRefused) as refused:
        read_config(tmp_path)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 200


def test_a_window_that_config_json_does_not_name_is_the_familys(tmp_path: Path) -> None:
    """transformers takes 4096 where the field is absent, and none where it is null."""
    changes = {"max_position_embeddings": 4097, "sliding_window": None}
    make_folder(tmp_path, MISTRAL, changes)
    assert read_config(tmp_path).context_len == 4097
    edit_config(tmp_path, lambda fields: fields.pop("sliding_window"))
    assert read_config(tmp_path).context_len == 4096
