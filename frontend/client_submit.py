"""How both Python clients open a request: its token ids, its parameters and its frame, checked.

An argument that cannot travel is the caller's error, told by its name; nothing of it is kept. Knows
no socket.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol, runtime_checkable

import msgspec

from nvserve.frontend.client_session import Request, RequestError, Session
from nvserve.protocol.client_messages import (
    MAX_CLIENT_FRAME_BYTES,
    ClientParams,
    Error,
    Submit,
    encode_client,
)

NO_PROMPT: Final = "neither a string nor a list of token ids"
NO_IDS: Final = "no list of token ids"
NOT_ENCODED: Final = (ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError)


@runtime_checkable
class Tensor(Protocol):
    """An array of NumPy or another library, none of which is imported here."""

    def tolist(self) -> object: ...


def as_sequence(given: object) -> Sequence[object] | None:
    """What is indexed by position, the rows of an array as a list; else None.

    Bytes are none, although they are a sequence of numbers: they would be taken for ids.
    """
    if isinstance(given, bytes | bytearray | memoryview):
        return None
    if isinstance(given, Sequence):
        return given
    rows = given.tolist() if isinstance(given, Tensor) else None
    return rows if isinstance(rows, list) else None


def token_ids(given: object, name: str, *, refusal: str = NO_PROMPT) -> "array[int]":
    """Ids as int32; TypeError for anything but a sequence of integers, ValueError beyond 32 bits.

    Whether the model has such tokens is for the server to say.
    """
    ids = None if isinstance(given, str) else as_sequence(given)
    if isinstance(ids, array) and ids.typecode == "i":
        return ids
    if ids is not None:
        try:
            return array("i", ids)  # type: ignore[arg-type]  # it checks every item itself
        except TypeError:
            pass
        except OverflowError as error:
            raise ValueError(f"{name} holds a token id that does not fit in 32 bits") from error
    raise TypeError(f"{name} is {refusal}, but {type(given).__name__}: {given!r:.60}")


def open_request(
    session: Session,
    prompt: str | Sequence[int],
    emitted: Sequence[int],
    params: dict[str, Any],
) -> tuple[Request, bytes]:
    """A new request and its frame; one that cannot be sent is not kept, to be sent again later."""
    text = prompt if isinstance(prompt, str) else ""
    column = b"" if isinstance(prompt, str) else token_ids(prompt, "prompt").tobytes()
    held = token_ids(emitted, "emitted", refusal=NO_IDS)
    request = session.open(text, column, ClientParams(**params), held)
    try:
        return request, frame_of(request.submit)
    except BaseException:
        session.close(request)
        raise


def frame_of(submit: Submit) -> bytes:
    """The submit as one frame; ValueError naming the field that cannot travel, or a RequestError.

    A frame over the door's limit would end the connection, and each one after it once more.
    """
    try:
        frame = encode_client(submit)
    except NOT_ENCODED as error:
        for name, value in _fields(submit):
            if _size(value) < 0:
                raise ValueError(f"{name} cannot be sent: {error}") from error
        raise
    if len(frame) > MAX_CLIENT_FRAME_BYTES:
        name = max(_fields(submit), key=lambda field: _size(field[1]))[0]
        text = f"{name}: the request has {len(frame)} bytes, at most {MAX_CLIENT_FRAME_BYTES}"
        raise RequestError(Error(id=submit.id, status=400, message=text, param=name))
    return frame


def resubmit_frames(session: Session) -> Iterator[bytes]:
    """What makes the open requests go on; one that has outgrown a frame ends with its error."""
    for submit in session.resubmit():
        request = session.requests.get(submit.id)
        if request is None:  # closed while those before it were sent
            continue
        try:
            frame = frame_of(submit)
        except RequestError as error:
            request.error = error
            del session.requests[submit.id]
            continue
        yield frame


def _fields(submit: Submit) -> Iterator[tuple[str, object]]:
    yield "prompt", submit.prompt or submit.prompt_ids
    yield "emitted", submit.emitted
    yield from msgspec.structs.asdict(submit.params).items()


def _size(value: object) -> int:
    """Bytes on the wire, -1 when it has no form there."""
    try:
        return len(msgspec.msgpack.encode(value))
    except NOT_ENCODED:
        return -1
