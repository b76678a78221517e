"""What the ZMQ door knows of one client, and the small translations between messages and plans."""

from typing import Final

import msgspec

from nvserve.frontend.bulk import FREE_BYTES, is_bulky_frame
from nvserve.frontend.errors import ApiError
from nvserve.frontend.generation import Choice, Generation
from nvserve.frontend.params import Limits, check_ids, check_prompt_size
from nvserve.frontend.zmq_wire import Wire
from nvserve.protocol.client_messages import (
    Accepted,
    BadClientFrame,
    Emit,
    Error,
    Submit,
    ToServer,
    decode_to_server,
)
from nvserve.protocol.messages import unpack_ids


class _IdOnly(msgspec.Struct):
    """What an error needs of a submit that is otherwise malformed."""

    id: int | None = None


class Request:
    """One request of a connection; emits wait in `early` until Accepted is out.

    `submit` is there until it is planned: a prompt may be large, and the plan holds what counts.
    """

    def __init__(self, submit: Submit, num_bytes: int) -> None:
        self.id: Final = submit.id
        self.submit: Submit | None = submit
        self.num_bytes: Final = num_bytes  # of its frame
        self.generation: Generation | None = None
        self.is_gone = False
        self.early: list[Emit] | None = []
        self.num_sent = len(submit.emitted) // 4  # output tokens the client has

    def take_submit(self) -> Submit:
        """What is to be planned, once."""
        submit, self.submit = self.submit, None
        assert submit is not None, "a submit is planned once"
        return submit

    def check_wanted(self) -> None:
        """A 499 once nobody wants it any more."""
        if self.is_gone:
            raise ApiError(499, "aborted")

    def abort(self) -> None:
        """Nobody wants it any more."""
        self.is_gone = True
        if self.generation is not None:
            self.generation.abort()


class Connection:
    """One client that said Hello."""

    def __init__(self, wire: Wire) -> None:
        self.wire: Final = wire
        self.requests: dict[int, Request] = {}
        self.num_planned_bytes = 0  # of submits that are being planned
        self.is_held = False


def prompt_of(submit: Submit, limits: Limits) -> str | list[int]:
    if bool(submit.prompt) == bool(submit.prompt_ids):
        raise ApiError(400, "prompt: give either prompt or prompt_ids", param="prompt")
    check_prompt_size(len(submit.prompt_ids) // 4, limits)
    return submit.prompt or _ids_of(submit.prompt_ids, "prompt_ids")


def emitted_of(submit: Submit, limits: Limits, max_tokens: int) -> list[int]:
    if len(submit.emitted) // 4 > max_tokens:
        raise ApiError(400, "emitted: is longer than max_tokens", param="emitted")
    emitted = _ids_of(submit.emitted, "emitted")
    check_ids(emitted, limits, "emitted")
    return emitted


def _ids_of(column: bytes, param: str) -> list[int]:
    if len(column) % 4:
        raise ApiError(400, f"{param}: {len(column)} bytes are not whole int32 ids", param=param)
    return unpack_ids(column)


def message_of(frame: bytes) -> ToServer:
    """The message in a frame, or BadClientFrame; large parameters are refused undecoded."""
    try:
        is_bulky = is_bulky_frame(frame)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise BadClientFrame(str(error)) from error
    if is_bulky:
        raise BadClientFrame(f"larger than {FREE_BYTES} bytes - at `$.params`")
    return decode_to_server(frame)


def id_of(frame: bytes) -> int | None:
    try:
        return msgspec.msgpack.decode(frame, type=_IdOnly).id
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None


def accepted_message(request_id: int, choice: Choice) -> Accepted:
    return Accepted(id=request_id, seed=choice.seed, num_prompt_tokens=choice.num_prompt_tokens)


def error_message(request_id: int | None, error: ApiError) -> Error:
    return Error(
        id=request_id,
        status=error.status,
        message=error.message,
        param=error.param,
        code=error.code,
        retry_after_s=error.retry_after_s,
    )
