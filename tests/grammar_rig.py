"""The demo tokenizer's grammars, and what its ids mean, for the grammar tests."""

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from nvserve.core.grammar import GrammarCompiler, GrammarMatcher

MODEL = Path(__file__).parent.parent / "scripts" / "demo_model"
EOS_ID = 1
NUM_TOKENS = 1024
VOCAB_SIZE = 1050  # larger than the tokenizer's, and no multiple of 32


def new_compiler() -> GrammarCompiler:
    return GrammarCompiler(str(MODEL), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS_ID])


@cache
def shared_compiler() -> GrammarCompiler:
    return new_compiler()


def compiled(grammar: str) -> GrammarMatcher:
    return shared_compiler().compile(grammar)


def schema_grammar(schema: Any) -> str:
    return "json_schema:" + json.dumps(schema, separators=(",", ":"))


def allowed(matcher: GrammarMatcher) -> set[int]:
    bits = int.from_bytes(matcher.mask(), "little")
    return {token_id for token_id in range(bits.bit_length()) if bits >> token_id & 1}


@cache
def token_bytes() -> dict[int, bytes]:
    """id -> bytes of the ordinary tokens, read from the file by the rule of byte-level BPE."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    byte_of = {chr(byte): byte for byte in plain}
    byte_of |= {chr(256 + index): byte for index, byte in enumerate(others)}
    spec = json.loads((MODEL / "tokenizer.json").read_text())
    special = {token["id"] for token in spec["added_tokens"]}
    return {
        token_id: bytes(byte_of[char] for char in token)
        for token, token_id in spec["model"]["vocab"].items()
        if token_id not in special
    }


def ids_of(text: str) -> list[int]:
    """One of the ways to write a text: the longest token first."""
    by_bytes = {value: token_id for token_id, value in token_bytes().items()}
    rest, ids = text.encode(), []
    while rest:
        size = next(n for n in range(min(len(rest), 40), 0, -1) if rest[:n] in by_bytes)
        ids.append(by_bytes[rest[:size]])
        rest = rest[size:]
    return ids


def walk(matcher: GrammarMatcher, draw: Random, max_tokens: int) -> str | None:
    """Random allowed ids until the end; the text, or None when it did not end in time.

    Ends as soon as it may with a chance of a half, since a random walk likes to go on for ever.
    """
    output: list[int] = []
    for _ in range(max_tokens):
        if matcher.is_over:
            break
        choices = allowed(matcher)
        assert choices, "nothing may follow, yet the matcher is not over"
        if EOS_ID in choices and draw.random() < 0.5:
            matcher.advance(EOS_ID)
            break
        token_id = draw.choice(sorted(choices))
        matcher.advance(token_id)
        if token_id != EOS_ID:
            output.append(token_id)
    assert matcher.error == ""
    if not matcher.is_over:
        return None
    return b"".join(token_bytes()[token_id] for token_id in output).decode()
