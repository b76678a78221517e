"""Refuses large bodies and frames that would hold the event loop while they are decoded.

A MB of text takes a millisecond to decode, a MB of small lists or of keys 70. So beyond a size that
cannot hurt, only the fields that carry text and ids may be large; how large the others are is found
by skipping over them. Knows sizes; what the fields mean is the schema's affair.
"""

from typing import Any, Final

import msgspec

from nvserve.frontend.errors import invalid

FREE_BYTES: Final = 1 << 20  # of a body, and of each field but those that carry text
CARRIERS: Final = frozenset({"prompt", "messages", "tokens"})
MAX_LISTS: Final = 1024  # of token ids, in one prompt

_skimmers: Final[dict[type, "msgspec.json.Decoder[Any]"]] = {}
_strings: Final = msgspec.json.Decoder(list[str])


class _Frame(msgspec.Struct):
    """A message to the ZMQ door, of which only this part can be dear."""

    params: msgspec.Raw = msgspec.Raw()


_frames: Final = msgspec.msgpack.Decoder(_Frame)


def check_bulk(body_type: type[msgspec.Struct], raw: bytes) -> None:
    """A 400 for a body that is dear to decode; also raises what its decoder does, for less."""
    if len(raw) <= FREE_BYTES:
        return
    skimmed = _skimmer(body_type).decode(raw)
    for name in skimmed.__struct_fields__:
        value: msgspec.Raw = getattr(skimmed, name)
        if name not in CARRIERS:
            if len(memoryview(value)) > FREE_BYTES:
                raise invalid(name, f"is larger than {FREE_BYTES} bytes")
        elif name == "prompt":
            _check_prompt(bytes(memoryview(value)))


def is_bulky_frame(frame: bytes) -> bool:
    """Whether the parameters in a frame are dear to decode; raises what its decoder does."""
    return len(frame) > FREE_BYTES and len(memoryview(_frames.decode(frame).params)) > FREE_BYTES


def _check_prompt(raw: bytes) -> None:
    """Of many strings, or of lists of ids: then every bracket is a list."""
    start = raw[:100].lstrip(b"[ \t\r\n")
    if raw[:1] != b"[":
        return
    if start[:1] == b'"':
        try:
            _strings.decode(raw)
        except msgspec.ValidationError as error:
            raise invalid("prompt", "must not mix strings and token ids") from error
    elif raw.count(b"[") > MAX_LISTS + 1:
        raise invalid("prompt", f"holds more than {MAX_LISTS} prompts")


def _skimmer(body_type: type[msgspec.Struct]) -> "msgspec.json.Decoder[Any]":
    """Takes the fields of a body apart without looking into them."""
    if body_type not in _skimmers:
        nothing = msgspec.Raw()
        fields = [(name, msgspec.Raw, nothing) for name in body_type.__struct_fields__]
        skimmed = msgspec.defstruct(
            body_type.__name__, fields, kw_only=True, forbid_unknown_fields=True
        )
        _skimmers[body_type] = msgspec.json.Decoder(skimmed)
    return _skimmers[body_type]
