"""Token ids -> text, one id at a time: exact, incremental, and never taking text back.

A `Vocabulary` is built once per tokenizer: a table id -> bytes for byte-level and SentencePiece
decoders, checked against the tokenizer's own decode, or a window over its decode for every other
kind. A `Detokenizer` is one request's state. What is put out after k ids is a function of those k
ids alone, however they were grouped. Knows text and ids; never a request.
"""

import codecs
import json
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

logger = logging.getLogger(__name__)

SPIECE_SPACE: Final = "\u2581"
REPLACEMENT: Final = "\ufffd"
MAX_UTF8_TAIL: Final = 3  # bytes of an unfinished character
NUM_CHECKS: Final = 128  # random sequences compared at load
CHECK_IDS: Final = 12  # ids in each

_new_utf8: Final = codecs.getincrementaldecoder("utf-8")


class TokenizerLike(Protocol):
    """The part of `tokenizers.Tokenizer` that decoding needs."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def id_to_token(self, id: int) -> str | None: ...
    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]: ...
    def to_str(self, pretty: bool = False) -> str: ...


class Detokenizer(Protocol):
    """One request's decoding state."""

    def feed(self, token_id: int) -> str:
        """The text that became certain with this id; may be empty."""

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that stayed unfinished."""


class ByteDetokenizer:
    """Looks up each id's bytes and decodes them as one UTF-8 stream.

    The first ones may go on with a character that the prompt's tail left unfinished. If they do
    not, its replacement is the prompt's.
    """

    __slots__ = ("_decode", "_strip", "_table", "_unfinished")

    def __init__(self, table: list[bytes], tail: bytes, strip: bool) -> None:
        self._table = table
        self._decode: Final = _new_utf8("replace").decode
        self._strip = strip  # drop one leading space of the first text
        self._unfinished = _unfinished_end(tail)

    def feed(self, token_id: int) -> str:
        table = self._table
        data = table[token_id] if token_id < len(table) else b""
        if self._unfinished and data:
            self._begin(data[:1])
        text = self._decode(data)
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        return self._decode(b"", True)

    def _begin(self, first: bytes) -> None:
        unfinished, self._unfinished = self._unfinished, b""
        try:
            _new_utf8("strict").decode(unfinished + first)
        except UnicodeDecodeError:
            return
        self._decode(unfinished)


def _unfinished_end(tail: bytes) -> bytes:
    """What these bytes have of a character that the next ones may complete."""
    decoder = _new_utf8("replace")
    decoder.decode(tail)
    return decoder.getstate()[0]


class WindowDetokenizer:
    """Decodes a window of the last ids twice and puts out the difference.

    For decoders whose output depends on the neighbouring token. The window starts where text was
    last certain; text that ends in U+FFFD waits, because its character may be unfinished.
    """

    __slots__ = ("_decode", "_ids", "_num_read", "_text")

    def __init__(self, decode: Callable[[list[int]], str], context: list[int]) -> None:
        self._decode: Final = decode
        self._ids = list(context)
        self._num_read = len(context)  # ids whose text is out
        self._text = decode(self._ids)  # text of the ids read; a prompt's may be unfinished

    def feed(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT):
            if text == self._text and self._decode([token_id]):
                # It goes on with the prompt's last character, whose replacement is output then.
                self._text = text[: -len(REPLACEMENT)]
            return ""
        fresh = self._fresh(text)
        if not fresh:
            self._ids.pop()  # it has no text, so the window need not grow by it
            return ""
        self._ids = self._ids[self._num_read :]
        self._num_read = len(self._ids)
        self._text = self._decode(self._ids)
        return fresh

    def flush(self) -> str:
        return self._fresh(self._decode(self._ids))

    def _fresh(self, text: str) -> str:
        """What this text has behind the text of the ids read."""
        known = self._text if text.startswith(self._text) else self._text.rstrip(REPLACEMENT)
        return text[len(known) :]


class Vocabulary:
    """How a tokenizer's ids turn into text; chooses the decoding for all requests once."""

    def __init__(self, tokenizer: TokenizerLike, special_ids: frozenset[int]) -> None:
        self.special_ids: Final = special_ids
        self._tokenizer: Final = tokenizer
        self._num_ids: Final = max(tokenizer.get_vocab().values(), default=-1) + 1
        decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
        to_bytes = _converter(decoder)
        self.strips_start: Final = _strips_start(decoder)
        self.table: list[bytes] = []  # by id, special tokens as their text
        self._plain_table: list[bytes] = []  # by id, special tokens empty
        self.kind = "window"
        if to_bytes is not None:
            self._build(to_bytes)
            self.kind = "bytes" if self._is_exact(decoder) else "window"
        if self.kind == "window":
            logger.info("decoder %r is decoded by window", decoder.get("type"))
            self._build_from_decode()
        self.max_token_bytes: Final = max(map(len, self.table), default=1) or 1

    def detokenizer(
        self, prompt: Sequence[int], *, skip_special: bool, is_start: bool
    ) -> Detokenizer:
        """Decoding state behind `prompt`, whose own text is never put out.

        `is_start` says that no text stands before the first id, where SentencePiece drops a space.
        """
        if self.kind == "window":
            return WindowDetokenizer(
                lambda ids: self._tokenizer.decode(ids, skip_special_tokens=skip_special),
                [] if is_start else list(prompt[-4:]),
            )
        table = self._plain_table if skip_special else self.table
        tail = b"".join(table[i] for i in prompt[-8:] if i < len(table))[-MAX_UTF8_TAIL:]
        return ByteDetokenizer(table, tail, self.strips_start and is_start)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of a whole sequence, as the sum of what a stream would put out."""
        state = self.detokenizer((), skip_special=skip_special, is_start=True)
        return "".join(map(state.feed, ids)) + state.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """One token's own bytes; empty for an id the tokenizer does not know."""
        return self.table[token_id] if token_id < len(self.table) else b""

    # -- building and checking -------------------------------------------------------------------

    def _build(self, to_bytes: Callable[[str], bytes]) -> None:
        self.table = [b""] * self._num_ids
        for token, token_id in self._tokenizer.get_vocab().items():
            self.table[token_id] = to_bytes(token)
        self._plain_table = list(self.table)
        for token_id in self.special_ids:
            self._plain_table[token_id] = b""

    def _build_from_decode(self) -> None:
        decode = self._tokenizer.decode
        ids = range(self._num_ids)
        self.table = [decode([i], skip_special_tokens=False).encode() for i in ids]

    def _is_exact(self, decoder: dict[str, Any]) -> bool:
        """Compare with the tokenizer's decode on random ids, and on each id near the ends."""
        rng = random.Random(0)
        ids = range(len(self.table))
        samples = [[rng.choice(ids) for _ in range(CHECK_IDS)] for _ in range(NUM_CHECKS)]
        samples += [[i] for i in (*ids[:300], *ids[-300:])]
        falls_back = "ByteFallback" in _decoder_types(decoder)
        for sample in samples:
            # A run of byte tokens that is no UTF-8 is replaced as a whole by the tokenizer, which
            # no stream can do; only runs without any byte token are comparable.
            if falls_back and any(_is_byte_token(self._tokenizer.id_to_token(i)) for i in sample):
                continue
            for skip in (True, False):
                expected = self._tokenizer.decode(sample, skip_special_tokens=skip)
                self.kind = "bytes"
                if self.decode(sample, skip_special=skip) != expected:
                    return False
        return True


# -- decoder kinds ---------------------------------------------------------------------------------


def _decoder_types(decoder: dict[str, Any]) -> list[str]:
    if decoder.get("type") == "Sequence":
        return [part["type"] for part in decoder["decoders"]]
    return [decoder["type"]] if decoder else []


def _strips_start(decoder: dict[str, Any]) -> bool:
    if decoder.get("type") == "Sequence":
        return any(_strips_start(part) for part in decoder["decoders"])
    if decoder.get("type") == "Metaspace":
        return bool(decoder.get("prepend_scheme", "always") != "never")
    return decoder.get("type") == "Strip" and decoder.get("start", 0) == 1


def _converter(decoder: dict[str, Any]) -> Callable[[str], bytes] | None:
    """How one token of this decoder becomes bytes; None when that depends on its neighbours."""
    types = set(_decoder_types(decoder))
    if types == {"ByteLevel"}:
        return _byte_level_bytes
    if types and types <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return _sentencepiece_bytes
    return None


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level BPE: itself, or 256 and up in order."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in own]
    return {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(moved)}


_BYTES_OF: Final = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTES_OF[char] for char in token])
    except KeyError:  # an added token with characters outside the alphabet is its own text
        return token.encode()


def _is_byte_token(token: str | None) -> bool:
    return token is not None and len(token) == 6 and token[:3] == "<0x" and token[-1] == ">"


def _sentencepiece_bytes(token: str) -> bytes:
    if _is_byte_token(token):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass  # an ordinary token that only looks like one
    return token.replace(SPIECE_SPACE, " ").encode()
