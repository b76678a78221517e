"""Takes fields that ask for nothing out of a chat's messages: those that are null, and readings.

A reply that a client sends back as it came has fields that this server does not know: OpenAI's
client writes all of its own. Whatever it is called, null asks for nothing; and what that client has
read out of content and arguments says what these say already. So nothing is ignored.
"""

from typing import Any, Final

import msgspec

MAX_ITEMS: Final = 1 << 19  # as dear to decode as bulk.FREE_BYTES of anything; texts have fewer
READINGS: Final = frozenset({"parsed", "parsed_arguments"})  # left in a reply by parse and stream

_encode: Final = msgspec.json.Encoder().encode
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_anything: Final = msgspec.json.Decoder()


def are_worth_a_look(error: msgspec.ValidationError) -> bool:
    """Whether a body was refused for a field in a message."""
    text = str(error)
    return text.startswith("Object contains unknown field") and " `$.messages[" in text


def without_nulls(raw: bytes) -> bytes:
    """A body with messages, less such fields; the same where it has too many parts to look.

    Raises what a decoder does.
    """
    if sum(map(raw.count, (b",", b"{", b"["))) > MAX_ITEMS:
        return raw
    fields = _fields.decode(raw)
    if "messages" not in fields:  # a field of another name may look like one of them
        return raw
    messages = _anything.decode(fields["messages"])
    return _encode(fields | {"messages": _without_nulls(messages)})


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_nulls(one)
            for name, one in value.items()
            if one is not None and name not in READINGS
        }
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
