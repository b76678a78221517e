"""The shipped demo model's folder agrees with itself; read without torch or transformers."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from nvserve.scripts.demo_text import (
    CHAT_TEMPLATE,
    SPECIALS,
    Corpus,
    encode_corpus,
    split_speeches,
    split_text,
    train_tokenizer,
)

FOLDER = Path(__file__).parents[1] / "scripts" / "demo_model"
PLAY = "ROMEO:\nIs love a tender thing?\n\nMERCUTIO:\nBe rough with love.\n\nROMEO:\nWhy?\n\n" * 9


def read_json(name: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((FOLDER / name).read_text())
    return parsed


def read_header() -> dict[str, Any]:
    """Return the safetensors header: eight bytes of length, then JSON."""
    with (FOLDER / "model.safetensors").open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__")
    return header


def render(messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
    config = read_json("tokenizer_config.json")
    template = ImmutableSandboxedEnvironment().from_string(config["chat_template"])
    return template.render(
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        bos_token=config["bos_token"],
        eos_token=config["eos_token"],
    )


def make_corpus() -> tuple[Tokenizer, Corpus]:
    tokenizer = train_tokenizer(PLAY, vocab_size=300)
    return tokenizer, encode_corpus(tokenizer, PLAY)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_weights_are_bfloat16_and_at_most_five_megabytes() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 5_000_000
    assert {tensor["dtype"] for tensor in read_header().values()} == {"BF16"}


def test_weights_have_the_shapes_of_the_config_and_no_second_copy_of_the_head() -> None:
    config, header = read_json("config.json"), read_header()
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    first = "model.layers.0.self_attn"
    assert header["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], hidden]
    assert header[f"{first}.q_proj.weight"]["shape"] == [8 * head_dim, hidden]
    assert header[f"{first}.k_proj.weight"]["shape"] == [4 * head_dim, hidden]
    assert len(header) == 9 * config["num_hidden_layers"] + 2
    assert config["tie_word_embeddings"]
    assert "lm_head.weight" not in header


def test_model_splits_over_four_ranks() -> None:
    config = read_json("config.json")
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (8, 4)
    assert config["head_dim"] >= 32
    assert math.log2(config["head_dim"]).is_integer()
    assert config["vocab_size"] % 4 == config["intermediate_size"] % 4 == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "But, soft! what light through yonder window breaks?\n",
        "naïve façade — “quotes”",
        "漢字とかな 한국어 العربية",
        "🙂👩‍👩‍👧‍👦🇫🇷 é",
        "\x00\x01\x07\x1b[0m\x7f\r\n\t\x0b\u2028\ufeff",
        "  two  spaces , a comma 's and 're  ",
        "".join(map(chr, range(0x250))),
    ],
)
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    text = "".join(map(chr, range(256))) + "\U0010ffff"
    assert max(tokenizer.encode(text).ids) < tokenizer.get_vocab_size() == 1024
    assert sum(len(token) == 1 for token in tokenizer.get_vocab()) == 256


def test_encoding_puts_bos_in_front_and_nothing_behind(tokenizer: Tokenizer) -> None:
    bare = tokenizer.encode("Speak, speak.", add_special_tokens=False).ids
    assert tokenizer.encode("Speak, speak.").ids == [0, *bare]


def test_special_ids_match_in_all_files(tokenizer: Tokenizer) -> None:
    config, names = read_json("config.json"), read_json("tokenizer_config.json")
    assert [tokenizer.token_to_id(token) for token in SPECIALS] == [0, 1, 2, 3, 4]
    for kind in ("bos", "eos", "pad"):
        token_id = tokenizer.token_to_id(names[f"{kind}_token"])
        assert config[f"{kind}_token_id"] == token_id
        assert read_json("generation_config.json")[f"{kind}_token_id"] == token_id
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert names["model_max_length"] == config["max_position_embeddings"]


def test_chat_template_renders_turns_and_the_generation_prompt(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "You are JULIET."},
        {"role": "user", "content": "Who's there?"},
        {"role": "assistant", "content": "I."},
    ]
    told = (
        "<|begin|><|system|>You are JULIET.<|end|><|user|>Who's there?<|end|><|assistant|>I.<|end|>"
    )
    assert render(messages, add_generation_prompt=False) == told
    assert render(messages, add_generation_prompt=True) == told + "<|assistant|>"
    ids = tokenizer.encode(told, add_special_tokens=False).ids
    assert [token_id for token_id in ids if token_id < 5] == [0, 4, 1, 2, 1, 3, 1]


def test_chat_template_is_the_same_in_its_own_file() -> None:
    assert (FOLDER / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert read_json("tokenizer_config.json")["chat_template"] == CHAT_TEMPLATE


def test_model_card_states_the_validation_loss() -> None:
    card = (FOLDER / "README.md").read_text()
    row = re.search(r"plain text \| 4096 \| (\d\.\d+) \| (\d\.\d+)", card)
    assert row is not None
    assert 3.0 < float(row[1]) < 3.5
    assert 1.3 < float(row[2]) < 1.5


def test_model_card_states_the_sizes() -> None:
    card = (FOLDER / "README.md").read_text()
    num_bytes = (FOLDER / "model.safetensors").stat().st_size
    num_parameters = sum(math.prod(tensor["shape"]) for tensor in read_header().values())
    assert f"bfloat16, {num_bytes:,} bytes" in card
    assert f"{num_parameters:,} parameters" in card


def test_split_keeps_the_text_whole_and_starts_validation_with_a_speech() -> None:
    training, validation = split_text(PLAY, validation_share=0.05)
    assert training + validation == PLAY
    assert validation.startswith("ROMEO:\n")
    assert split_speeches(validation)[0] == ("ROMEO", "Why?")


def test_chat_rows_alternate_roles_and_plain_rows_hold_no_special_but_bos() -> None:
    tokenizer, corpus = make_corpus()
    for seed in range(20):
        rng = np.random.default_rng(seed)
        chat = corpus.chat_row(rng, num_tokens=60)
        text = tokenizer.decode(chat, skip_special_tokens=False)
        roles = [role for role in re.findall(r"<\|(\w+)\|>", text) if role != "end"]
        assert roles[-2:] in (["user", "assistant"], ["assistant", "user"])
        assert roles[0] == "begin"
        plain = corpus.plain_row(rng, num_tokens=60)
        assert len(plain) == len(chat) == 60
        assert plain[0] == 0
        assert min(plain[1:]) >= len(SPECIALS)


def test_dropped_merges_change_the_tokens_but_not_the_text() -> None:
    tokenizer, corpus = make_corpus()
    noisy = encode_corpus(tokenizer, PLAY, bpe_dropout=0.5)
    assert len(noisy.tokens) > len(corpus.tokens)
    assert tokenizer.decode(noisy.tokens.tolist()) == PLAY
    assert encode_corpus(tokenizer, PLAY).tokens.tolist() == corpus.tokens.tolist()
