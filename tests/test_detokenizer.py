"""Streams of text equal the tokenizer's own decode of all ids, for every decoder kind."""

import functools
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from nvserve.frontend.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    Vocabulary,
    WindowDetokenizer,
)

DEMO = Path(__file__).parents[1] / "scripts" / "demo_model" / "tokenizer.json"
TEXTS = (
    "plain words",
    "    a    b",
    " leading",
    "\n\ttabs\r\n",
    "한국어 日本語 中文 ไทย हिन्दी",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 e\u0301 naïve ﷽",
    "def f(x):\n        return x  # ok",
)


@functools.cache
def byte_level() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO))


@functools.cache
def sentencepiece() -> Tokenizer:
    """As Llama 2's: metaspace normalizer, byte fallback, one leading space stripped."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on  the mat and the rat"] * 3, trainer)
    return with_vocabulary(tokenizer, ["▁the", *(f"<0x{byte:02X}>" for byte in range(256))])


def with_vocabulary(tokenizer: Tokenizer, tokens: Sequence[str]) -> Tokenizer:
    """The same tokenizer with more tokens in its model (not as added tokens)."""
    document = json.loads(tokenizer.to_str())
    vocabulary = document["model"]["vocab"]
    for token in tokens:
        vocabulary.setdefault(token, len(vocabulary))
    return Tokenizer.from_str(json.dumps(document))


@functools.cache
def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=["[UNK]", "[CLS]"], show_progress=False
    )
    tokenizer.train_from_iterator(["unhappy cats, happily sitting; don't!"] * 3, trainer)
    return tokenizer


MAKERS = {"bytes": byte_level, "sentencepiece": sentencepiece, "wordpiece": wordpiece}


@functools.cache
def vocabulary(name: str) -> Vocabulary:
    tokenizer = MAKERS[name]()
    added = tokenizer.get_added_tokens_decoder()
    return Vocabulary(tokenizer, frozenset(i for i, token in added.items() if token.special))


def deltas(state: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*map(state.feed, ids), state.flush()]


def streamed(name: str, ids: Sequence[int], *, skip_special: bool = True) -> list[str]:
    return deltas(vocabulary(name).detokenizer((), skip_special=skip_special, is_start=True), ids)


def byte_id(byte: int) -> int:
    token_id = sentencepiece().token_to_id(f"<0x{byte:02X}>")
    assert token_id is not None
    return token_id


def is_byte(tokenizer: Tokenizer, token_id: int) -> bool:
    token = tokenizer.id_to_token(token_id)
    return token is not None and token.startswith("<0x")


@pytest.mark.parametrize(
    ("name", "kind"), [("bytes", "bytes"), ("sentencepiece", "bytes"), ("wordpiece", "window")]
)
def test_each_decoder_is_recognized(name: str, kind: str) -> None:
    assert vocabulary(name).kind == kind


@pytest.mark.parametrize("name", ["bytes", "sentencepiece"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_whole_and_unfinished_characters_wait(name: str, text: str) -> None:
    ids = MAKERS[name]().encode(text, add_special_tokens=False).ids
    pieces = streamed(name, ids)
    assert "".join(pieces) == text == MAKERS[name]().decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=2000, deadline=None)
@given(st.lists(st.integers(0, 1030), max_size=24), st.booleans())
def test_any_byte_level_ids_stream_to_what_decode_gives(ids: list[int], skip: bool) -> None:
    expected = byte_level().decode([i for i in ids if i < 1024], skip_special_tokens=skip)
    assert "".join(streamed("bytes", ids, skip_special=skip)) == expected


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=24), st.booleans())
def test_any_wordpiece_ids_stream_to_what_decode_gives(ids: list[int], skip: bool) -> None:
    expected = wordpiece().decode(ids, skip_special_tokens=skip)
    assert "".join(streamed("wordpiece", ids, skip_special=skip)) == expected


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 90), st.text(max_size=2)), max_size=16), st.booleans())
def test_sentencepiece_ids_with_whole_characters_stream_to_what_decode_gives(
    parts: list[int | str], skip: bool
) -> None:
    """Runs of byte tokens that are UTF-8; others cannot equal a decode that replaces whole runs."""
    tokenizer = sentencepiece()
    ids: list[int] = []
    for part in parts:
        if isinstance(part, str):
            ids += [byte_id(byte) for byte in part.encode()]
        elif not is_byte(tokenizer, part):
            ids.append(part)
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(streamed("sentencepiece", ids, skip_special=skip)) == expected


def test_broken_byte_tokens_become_replacements_and_nothing_is_taken_back() -> None:
    the = vocabulary("sentencepiece").table.index(b" the")
    first, second, third = map(byte_id, "中".encode())
    ids = [first, second, the, third, first, second, third]
    assert "".join(streamed("sentencepiece", ids)) == "\ufffd the\ufffd中"


def test_one_leading_space_is_dropped_only_at_the_start_of_all_text() -> None:
    words = vocabulary("sentencepiece")
    the = words.table.index(b" the")
    at_start = words.detokenizer([1], skip_special=True, is_start=True)
    behind_text = words.detokenizer([1, the], skip_special=True, is_start=False)
    assert deltas(at_start, [the, the]) == ["the", " the", ""]
    assert deltas(behind_text, [the, the]) == [" the", " the", ""]


def test_a_prompt_that_ends_inside_a_character_never_shows_up() -> None:
    """Hello world and two of three bytes of a Hangul syllable, then the third from the model."""
    words = vocabulary("bytes")
    first, second, third = (words.table.index(bytes([byte])) for byte in "한".encode())
    prompt = [*byte_level().encode("Hello world ").ids, first, second]
    state = words.detokenizer(prompt, skip_special=True, is_start=False)
    assert deltas(state, [third, third]) == ["한", "\ufffd", ""]
    whole = words.detokenizer(prompt[:-2], skip_special=True, is_start=False)
    assert deltas(whole, [first, second]) == ["", "", "\ufffd"]


TAILS = ["한".encode()[:2], "👧".encode()[:1], b"\xed"]


@pytest.mark.parametrize("kind", ["bytes", "window"])
@pytest.mark.parametrize("tail", TAILS)
def test_the_replacement_of_what_a_prompt_leaves_unfinished_is_no_output(
    kind: str, tail: bytes
) -> None:
    words = vocabulary("bytes")
    prompt = [words.table.index(tail[index : index + 1]) for index in range(len(tail))]
    letter, end = words.table.index(b"x"), 1

    def state() -> Detokenizer:
        if kind == "window":
            return WindowDetokenizer(byte_level().decode, list(prompt))
        return words.detokenizer(prompt, skip_special=True, is_start=False)

    assert "".join(deltas(state(), [])) == ""
    assert "".join(deltas(state(), [end])) == ""
    assert "".join(deltas(state(), [letter, letter])) == "xx"
    assert "".join(deltas(state(), [end, letter])) == "x"


@pytest.mark.parametrize("kind", ["bytes", "window"])
@pytest.mark.parametrize("prompt", [b"\xed", b"a\xed", b"\xed\xed"])
@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (b"\x95", "\ufffd"),
        (b"\x95x", "\ufffdx"),
        (b"\x95\x9cx", "한x"),
        (b"\x95\x95\x9cx", "핕\ufffdx"),
        (b"\x95\xed\x95x", "\ufffd\ufffdx"),
        (b"\xedx", "\ufffdx"),
    ],
)
def test_a_character_that_the_output_goes_on_with_is_its_own(
    kind: str, prompt: bytes, output: bytes, expected: str
) -> None:
    words = vocabulary("bytes")
    ids = [words.table.index(bytes([byte])) for byte in prompt]
    state = words.detokenizer(ids, skip_special=True, is_start=False)
    if kind == "window":
        state = WindowDetokenizer(byte_level().decode, ids)
    assert "".join(deltas(state, [words.table.index(bytes([one])) for one in output])) == expected


def test_a_prompt_that_ends_in_a_replacement_character_keeps_it() -> None:
    ids = byte_level().encode("a\ufffd", add_special_tokens=False).ids
    letter = vocabulary("bytes").table.index(b"x")
    for state in (
        vocabulary("bytes").detokenizer(ids, skip_special=True, is_start=False),
        WindowDetokenizer(byte_level().decode, list(ids)),
    ):
        assert deltas(state, [letter, letter]) == ["x", "x", ""]


def test_window_decoding_continues_behind_a_prompt() -> None:
    ids = wordpiece().encode("unhappy cats").ids
    state = vocabulary("wordpiece").detokenizer(ids, skip_special=True, is_start=False)
    assert isinstance(state, WindowDetokenizer)
    assert "".join(deltas(state, ids)) == " unhappy cats"


def test_ids_the_tokenizer_does_not_know_are_silent() -> None:
    state = vocabulary("bytes").detokenizer((), skip_special=True, is_start=True)
    assert isinstance(state, ByteDetokenizer)
    assert deltas(state, [50_000, 1024]) == ["", "", ""]
    assert vocabulary("bytes").token_bytes(50_000) == b""


def test_special_tokens_are_text_only_when_asked_for() -> None:
    ids = byte_level().encode("hi").ids
    assert "".join(streamed("bytes", ids)) == "hi"
    assert "".join(streamed("bytes", ids, skip_special=False)) == "<|begin|>hi"


def test_a_decoder_that_does_not_match_its_table_falls_back_to_the_window() -> None:
    """A Metaspace decoder drops every mark of a first token, which no table can say."""
    document = json.loads(byte_level().to_str())
    document["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}
    document["decoder"]["split"] = True
    tokenizer = with_vocabulary(Tokenizer.from_str(json.dumps(document)), ["▁▁▁"])
    words = Vocabulary(tokenizer, frozenset())
    assert words.kind == "window"


def test_the_window_stays_short_on_long_random_output() -> None:
    rng = random.Random(1)
    ids = [rng.randrange(2, 50) for _ in range(2000)]
    state = vocabulary("wordpiece").detokenizer((), skip_special=True, is_start=True)
    assert isinstance(state, WindowDetokenizer)
    assert "".join(deltas(state, ids)) == wordpiece().decode(ids)
    assert len(state._ids) < 8


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_a15_a_hundred_thousand_sequences_in_chunks(name: str) -> None:
    """Whatever comes together, the text is what a decode of all ids gives."""
    scale = float(os.environ.get("NVSERVE_TEST_SCALE", "0.1"))
    tokenizer, words = MAKERS[name](), vocabulary(name)
    plain = [i for i in range(tokenizer.get_vocab_size()) if not is_byte(tokenizer, i)]
    for seed in range(round(100_000 * scale)):
        draw = random.Random(seed)
        ids = [draw.choice(plain) for _ in range(draw.randrange(20))]
        if name != "wordpiece":
            text = "".join(draw.choice(draw.choice(TEXTS)) for _ in range(draw.randrange(8)))
            ids += tokenizer.encode(text, add_special_tokens=False).ids
        state = words.detokenizer((), skip_special=seed % 2 == 0, is_start=True)
        out, at = "", 0
        while at < len(ids):
            size = draw.randrange(1, 8)
            out += "".join(map(state.feed, ids[at : at + size]))
            at += size
        expected = tokenizer.decode(ids, skip_special_tokens=seed % 2 == 0)
        assert out + state.flush() == expected, f"seed {seed}"
