"""Refuses large bodies and frames that would hold the event loop while they are decoded.

A MB of text takes a millisecond to decode, a MB of small lists or of keys 70. So beyond a size that
cannot hurt, only the fields that carry text and ids may be large, and these hold only so many; how
large the others are, all together, is found by skipping over them. Knows sizes and counts; what the
fields mean is the schema's affair.
"""

import re
from typing import Any, Final

import msgspec

from nvserve.frontend.errors import ApiError, invalid

FREE_BYTES: Final = 1 << 20  # of a body, and of all fields but those that carry text
CARRIERS: Final = frozenset({"prompt", "messages", "tokens"})
MAX_PROMPTS: Final = 1024  # texts or lists of token ids, in one body
MAX_STRINGS: Final = 1 << 18  # names and values in messages: many more than the turns they may have

_TEXTS: Final = re.compile(rb'\[[ \t\r\n]*"')  # how a list of them begins
_skimmers: Final[dict[type, "msgspec.json.Decoder[Any]"]] = {}
_strings: Final = msgspec.json.Decoder(list[str])


class _Frame(msgspec.Struct):
    """A message to the ZMQ door, of which only this part can be dear."""

    params: msgspec.Raw = msgspec.Raw()


_frames: Final = msgspec.msgpack.Decoder(_Frame)


def check_bulk(body_type: type[msgspec.Struct], raw: bytes, max_ids: int | None = None) -> None:
    """A 400 for a body that is dear to decode; also raises what its decoder does, for less.

    `max_ids`: the context's length, which no list of ids can exceed.
    """
    if len(raw) <= FREE_BYTES:
        return
    skimmed = _skimmer(body_type).decode(raw)
    sizes: dict[str, int] = {}  # of the fields that carry no texts or ids
    num_idle = len(raw)
    for name in skimmed.__struct_fields__:
        value: msgspec.Raw = getattr(skimmed, name)
        num_bytes = len(memoryview(value))
        num_idle -= num_bytes
        if name not in CARRIERS:
            sizes[name] = num_bytes
        elif num_bytes > FREE_BYTES:
            _check_carrier(name, bytes(memoryview(value)), max_ids)
    if sum(sizes.values()) > FREE_BYTES:
        name = max(sizes, key=sizes.__getitem__)
        carried = " and ".join(sorted(CARRIERS.intersection(skimmed.__struct_fields__)))
        raise invalid(name, f"all fields but {carried} are larger than {FREE_BYTES} bytes together")
    if num_idle > FREE_BYTES:  # fields given again and again, or blanks
        raise ApiError(400, f"the body has more than {FREE_BYTES} bytes beside its fields")


def is_bulky_frame(frame: bytes) -> bool:
    """Whether the parameters in a frame are dear to decode; raises what its decoder does."""
    return len(frame) > FREE_BYTES and len(memoryview(_frames.decode(frame).params)) > FREE_BYTES


def _check_carrier(name: str, raw: bytes, max_ids: int | None) -> None:
    if name == "messages":
        if _least_strings(raw) > MAX_STRINGS:
            raise invalid(name, f"hold more than {MAX_STRINGS} names and values")
    elif name == "tokens":
        _check_ids(name, raw, 1, max_ids)
    elif raw[:1] == b"[":
        _check_prompts(raw, max_ids)


def _check_prompts(raw: bytes, max_ids: int | None) -> None:
    """Of strings, or of ids, or of lists of ids: then every bracket is a list."""
    if _TEXTS.match(raw):
        _check_count(_least_strings(raw))
        try:
            _strings.decode(raw)
        except msgspec.ValidationError as error:
            raise _mixed() from error
        return
    num_lists = raw.count(b"[") - 1
    _check_count(num_lists)
    if b'"' in raw:
        raise _mixed()
    _check_ids("prompt", raw, max(num_lists, 1), max_ids)


def _check_count(num_prompts: int) -> None:
    if num_prompts > MAX_PROMPTS:
        raise invalid("prompt", f"holds more than {MAX_PROMPTS} prompts")


def _mixed() -> ApiError:
    return invalid("prompt", "must not mix strings and token ids")


def _check_ids(name: str, raw: bytes, num_lists: int, max_ids: int | None) -> None:
    num_ids = raw.count(b",") + 1  # a list that is too long makes the count so
    if max_ids is not None and num_ids > num_lists * max_ids:
        raise invalid(
            name,
            f"holds {num_ids} token ids, at most {max_ids} fit into the context",
            "context_length_exceeded",
        )


def _least_strings(raw: bytes) -> int:
    """No more strings than there are: an opening quote never follows a backslash."""
    return (raw.count(b'"') - raw.count(b'\\"')) // 2


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
