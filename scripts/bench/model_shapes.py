"""Shapes of real models, and model folders of them without weights, for `--load-format dummy`.

A written folder has config.json, generation_config.json and a byte-level BPE tokenizer whose
vocabulary has the model's full size, so that every sampled id has a text, as in real use.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nvserve.workers.models.config import DecoderConfig

BOS_ID: Final = 0
EOS_ID: Final = 1
CHAT_TEMPLATE: Final = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
LETTERS: Final = "etaoinshrdlucmfwypvbgkjqxz"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides the cost of a step; `config` holds the rest of config.json."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    context_len: int
    head_dim: int = 128
    is_tied: bool = False  # one matrix embeds and projects
    config: dict[str, Any] = field(default_factory=dict)

    def config_json(self) -> dict[str, Any]:
        """The content of a Hugging Face config.json."""
        return {
            "architectures": [self.architecture],
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.context_len,
            "tie_word_embeddings": self.is_tied,
            "torch_dtype": "bfloat16",
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_cache": True,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            **self.config,
        }

    @staticmethod
    def of(decoder: DecoderConfig) -> "ModelShape":
        """The shape of a model that was read."""
        return ModelShape(
            architecture=decoder.architecture,
            hidden_size=decoder.hidden_size,
            intermediate_size=decoder.intermediate_size,
            num_layers=decoder.num_layers,
            num_heads=decoder.num_heads,
            num_kv_heads=decoder.num_kv_heads,
            vocab_size=decoder.vocab_size,
            context_len=decoder.context_len,
            head_dim=decoder.head_dim,
            is_tied=decoder.is_tied,
        )

    @staticmethod
    def from_config(config: dict[str, Any]) -> "ModelShape":
        """The shape that `config_json` describes."""
        num_heads = config["num_attention_heads"]
        return ModelShape(
            architecture=config["architectures"][0],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            vocab_size=config["vocab_size"],
            context_len=config["max_position_embeddings"],
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            is_tied=bool(config.get("tie_word_embeddings")),
        )


QWEN3: Final = {
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
}
LLAMA3: Final = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "mlp_bias": False,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> ModelShape:
    return ModelShape(
        architecture="Qwen3ForCausalLM",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        vocab_size=151_936,
        context_len=40_960,
        is_tied=tied,
        config=QWEN3,
    )


def _llama3(hidden: int, intermediate: int, layers: int, heads: int) -> ModelShape:
    return ModelShape(
        architecture="LlamaForCausalLM",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        vocab_size=128_256,
        context_len=131_072,
        config=LLAMA3,
    )


SHAPES: Final[dict[str, ModelShape]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "llama-8b": _llama3(4096, 14336, 32, 32),
    "llama-70b": _llama3(8192, 28672, 80, 64),
}


def write_model_folder(shape: ModelShape, folder: Path) -> Path:
    """Write what a launch needs beside weights; overwrites; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, Any] = {
        "config.json": shape.config_json(),
        "generation_config.json": {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID},
        "tokenizer.json": make_tokenizer(shape.vocab_size),
        "tokenizer_config.json": {
            "bos_token": "<|begin|>",
            "eos_token": "<|end|>",
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False))
    return folder


def make_tokenizer(vocab_size: int) -> dict[str, Any]:
    """A byte-level BPE tokenizer.json of exactly `vocab_size` ids, with merges to all of them.

    Ids 0 and 1 are the special tokens, then the bytes, then ever longer strings of letters.
    """
    specials = ["<|begin|>", "<|end|>"]
    alphabet = byte_alphabet()
    if vocab_size < len(specials) + len(alphabet):
        raise ValueError(f"a byte-level vocabulary needs 258 ids, not {vocab_size}")
    tokens = specials + alphabet
    merges: list[list[str]] = []
    queue = ["\u0120", *LETTERS]  # U+0120 stands for a space, with which a word begins
    for stem in queue:  # grows while it is walked
        for letter in LETTERS:
            if len(tokens) == vocab_size:
                break
            merges.append([stem, letter])
            tokens.append(stem + letter)
            queue.append(stem + letter)
        if len(tokens) == vocab_size:
            break
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(token_id, text) for token_id, text in enumerate(specials)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def byte_alphabet() -> list[str]:
    """The printable stand-ins of all 256 bytes in byte-level BPE."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(code) for code in own] + [chr(256 + i) for i in range(256 - len(own))]


def _special(token_id: int, text: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": text, **flags, "special": True}
