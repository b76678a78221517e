"""Bytes <-> messages: one encoder, and one typed decoder per direction.

A frame that is malformed, or valid but of another direction, raises BadFrame and nothing else, so
that a main loop can count it and go on.
"""

from typing import Final, Generic, TypeVar

import msgspec

from nvserve.protocol import control, messages

T = TypeVar("T")

MAX_FRAME_BYTES: Final = 64 << 20  # the largest frame any socket of ours takes


class BadFrame(ValueError):
    """Bytes that are no message of the expected direction."""


_ENCODER: Final = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """A message as one frame."""
    return _ENCODER.encode(message)


class Decoder(Generic[T]):
    """Decodes one direction's union; raises BadFrame for everything else."""

    def __init__(self, union: object) -> None:
        self._decoder: Final[msgspec.msgpack.Decoder[T]] = msgspec.msgpack.Decoder(union)

    def __call__(self, frame: bytes) -> T:
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
            raise BadFrame(f"{len(frame)} bytes: {error}") from error


decode_to_core: Final[Decoder[messages.ToCore]] = Decoder(messages.ToCore)
decode_to_frontend: Final[Decoder[messages.ToFrontend]] = Decoder(messages.ToFrontend)
decode_to_worker: Final[Decoder[messages.ToWorker]] = Decoder(messages.ToWorker)
decode_from_worker: Final[Decoder[messages.FromWorker]] = Decoder(messages.FromWorker)
decode_to_child: Final[Decoder[control.FromLauncher]] = Decoder(control.FromLauncher)
decode_from_child: Final[Decoder[control.FromChild]] = Decoder(control.FromChild)
