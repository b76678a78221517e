"""The bytes of the ZMQ door: whole messages out of any pieces, and bounds before they come."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvserve.frontend.zmtp import (
    GREETING,
    Frame,
    Incoming,
    Reply,
    WireError,
    encode_frame,
    encode_ping,
)

LIMIT = 1000
READY_BODY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
READY = b"\x04" + bytes([len(READY_BODY)]) + READY_BODY


def part(body: bytes, flags: int = 0) -> bytes:
    return bytes([flags | 2]) + struct.pack(">Q", len(body)) + body


def greeted() -> Incoming:
    incoming = Incoming(LIMIT)
    incoming.feed(GREETING + READY)
    assert isinstance(incoming.next(), Reply)
    assert incoming.next() is None
    assert incoming.is_ready
    return incoming


def everything(incoming: Incoming) -> list[Frame | Reply]:
    found = []
    while (one := incoming.next()) is not None:
        found.append(one)
    return found


@given(
    st.lists(
        st.one_of(
            st.lists(st.binary(max_size=400), min_size=1, max_size=3),
            st.binary(max_size=16),
        ),
        max_size=8,
    ),
    st.lists(st.integers(1, 50)),
)
def test_messages_come_whole_out_of_any_pieces(
    said: list[list[bytes] | bytes], sizes: list[int]
) -> None:
    """A list is a message of so many frames, bytes are the context of a PING."""
    raw, expected = GREETING + READY, list[Frame | Reply]()
    for one in said:
        if isinstance(one, bytes):
            raw += bytes([4, len(one) + 7]) + b"\x04PING\0\0" + one
            expected.append(Reply(bytes([4, len(one) + 5]) + b"\x04PONG" + one))
            continue
        raw += b"".join(part(body, flags=1) for body in one[:-1])
        raw += b"".join(encode_frame(one[-1]))
        expected.append(Frame(one[-1] if len(one) == 1 else None))
    incoming, found = Incoming(LIMIT), list[Frame | Reply]()
    for size in sizes:
        incoming.feed(raw[:size])
        raw = raw[size:]
        found += everything(incoming)
    incoming.feed(raw)
    found += everything(incoming)
    assert isinstance(found[0], Reply)
    assert found[1:] == expected
    assert len(incoming) == 0


def test_nothing_is_kept_of_a_message_without_end() -> None:
    incoming = greeted()
    for _ in range(1000):
        incoming.feed(part(b"x" * LIMIT, flags=1))
        assert incoming.next() is None
        assert len(incoming) == 0
    incoming.feed(part(b"the end") + part(b"another"))
    assert everything(incoming) == [Frame(None), Frame(b"another")]


@pytest.mark.parametrize("flags", [0, 1, 4])
@pytest.mark.parametrize("num_bytes", [LIMIT + 1, 2**63, 2**64 - 1])
def test_a_frame_over_the_limit_is_found_by_its_header(flags: int, num_bytes: int) -> None:
    incoming = greeted()
    incoming.feed(bytes([flags | 2]) + struct.pack(">Q", num_bytes))
    with pytest.raises(WireError, match=f"{num_bytes} bytes, at most {LIMIT}"):
        incoming.next()


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n",
        b"\xff" + b"\0" * 8 + b"\x7e",
        GREETING[:10] + b"\x01",
        GREETING.replace(b"NULL\0\0", b"PLAIN\0"),
        GREETING + b"\x00\x01x",
        GREETING + b"\x04\x05\x04PING",
        GREETING + READY.replace(b"DEALER", b"SUBSUB"),
        GREETING + READY[:-1].replace(bytes([len(READY_BODY)]), bytes([len(READY_BODY) - 1])),
        GREETING + b"\x04\x06\x05READY",
        GREETING + READY + b"\x08\x00",
        GREETING + READY + b"\x05\x00",
    ],
)
def test_what_is_no_zmtp_of_ours_ends_the_connection(raw: bytes) -> None:
    incoming = Incoming(LIMIT)
    incoming.feed(raw)
    with pytest.raises(WireError):
        everything(incoming)


@pytest.mark.parametrize("num_bytes", [0, 1, 255, 256, 70_000])
def test_a_frame_of_ours_is_read_by_the_same_rules(num_bytes: int) -> None:
    incoming = Incoming(70_000)
    incoming.feed(GREETING + READY)
    everything(incoming)
    incoming.feed(b"".join(encode_frame(b"x" * num_bytes)) + encode_ping())
    assert incoming.next() == Frame(b"x" * num_bytes)
    assert isinstance(incoming.next(), Reply)
