"""The ZMQ client protocol: what a client and the frontend's door say to each other.

A client connects a DEALER socket and sends one message per single-part frame, msgpack maps with
the message's name under "type". Unset fields may be left out. Of a ZMQ message of several frames
nothing is kept.

| direction        | messages                                       |
|------------------|------------------------------------------------|
| client -> server | Hello first, then Submit and Abort in any order |
| server -> client | Welcome, Accepted, Emit, Finished, Error, Beat  |

1. `Hello(version, api_key)` is answered by `Welcome`, or by `Error` without an id, after which the
   server forgets the connection. Anything before a Hello is dropped.
2. `Submit(id, ...)`: `id` is the client's own and unique among its open requests. The answer is
   `Accepted(id, seed, ...)`, or `Error(id, ...)`, which ends the request.
3. `Emit(id, first, ...)` carries the output tokens from index `first` on and the text that became
   certain with them; text that may still turn into a stop string waits. Then exactly one `Finished`
   or `Error`. `Abort(id)` ends a request without another message for it; unknown ids are ignored.
4. While a request is open the server sends a `Beat` at least every BEAT_S. A client that hears
   nothing for SILENCE_S takes the server for dead.
5. Resuming: the server keeps nothing for a client that left. The client submits the same prompt,
   params and the `seed` of Accepted again, with the token ids it holds in `emitted`. Output goes on
   at index len(emitted), and no text is sent twice.

Token ids travel as little-endian int32 bytes. Knows shapes of messages only.
"""

from typing import Any, Final, TypeVar

import msgspec

CLIENT_PROTOCOL: Final = 1  # Hello.version
BEAT_S: Final = 0.5
SILENCE_S: Final = 5.0
MAX_CLIENT_FRAME_BYTES: Final = 16 << 20  # a larger frame ends the connection


class StructuredOutputs(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The form that the output must have; exactly one of these."""

    json: Any = None  # a JSON schema: an object, or its text
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # Lark or EBNF
    json_object: bool | None = None  # any JSON object


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling as a client names it, over HTTP and ZMQ alike; None takes the default."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str | int, float] | None = None  # token id, in JSON as text -> bias
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    priority: int | None = None  # lower runs first
    cache_salt: str | None = None  # requests of different salts share no cached prefix
    structured_outputs: StructuredOutputs | None = None


class ClientParams(SamplingFields, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The parameters of a ZMQ submit."""

    logprobs: int | None = None  # best alternatives reported per token, 0 = the chosen one alone
    prompt_logprobs: int | None = None  # the same for the prompt's tokens, from the second one on
    timeout_s: float | None = None  # from its arrival; a later end is an error with status 504


class ClientMessage(
    msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, gc=False
):
    """Base of all client messages: immutable maps, tagged with the class name."""


# -- client -> server ------------------------------------------------------------------------------


class Hello(ClientMessage, frozen=True, kw_only=True, tag=True):
    """First on every connection."""

    version: int
    api_key: str = ""


class Submit(ClientMessage, frozen=True, kw_only=True, tag=True):
    """Start a request, or go on with one: `emitted` holds the output ids the client has."""

    id: int
    prompt: str = ""  # text, or else:
    prompt_ids: bytes = b""  # int32
    params: ClientParams = msgspec.field(default_factory=ClientParams)
    emitted: bytes = b""


class Abort(ClientMessage, frozen=True, kw_only=True, tag=True):
    """Forget a request; nothing follows for it."""

    id: int


# -- server -> client ------------------------------------------------------------------------------


class Welcome(ClientMessage, frozen=True, kw_only=True, tag=True):
    """The connection is open."""

    version: int
    model: str
    max_model_len: int


class Accepted(ClientMessage, frozen=True, kw_only=True, tag=True):
    """The request will end in exactly one Finished or Error."""

    id: int
    seed: int  # the one given, or the one drawn
    num_prompt_tokens: int


class TokenLogprob(ClientMessage, frozen=True, kw_only=True, tag=False):
    """One output token's log-probability and those of the best alternatives, best first.

    Tuples, since garbage collections stop looking at those: an answer may have thousands.
    """

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Emit(ClientMessage, frozen=True, kw_only=True, tag=True):
    """New output tokens and the text that became certain with them.

    Where asked for, the scores of the prompt come first, in emits of their own or with tokens.
    """

    id: int
    first: int  # index of the first of these tokens in the output
    tokens: bytes  # int32
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    prompt_first: int = 0  # position in the prompt of the first of:
    prompt_logprobs: list[TokenLogprob] | None = None


class Finished(ClientMessage, frozen=True, kw_only=True, tag=True):
    """The request is complete; `finish_reason` is "stop" or "length"."""

    id: int
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0


class Error(ClientMessage, frozen=True, kw_only=True, tag=True):
    """A request (or, without id, the connection) has failed; `status` as over HTTP."""

    id: int | None = None
    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None  # when another try makes sense, as over HTTP


class Beat(ClientMessage, frozen=True, kw_only=True, tag=True):
    """The server lives and works on this client's requests."""


ToServer = Hello | Submit | Abort
ToClient = Welcome | Accepted | Emit | Finished | Error | Beat

T = TypeVar("T")

_ENCODER: Final = msgspec.msgpack.Encoder()
_TO_SERVER: Final[msgspec.msgpack.Decoder[ToServer]] = msgspec.msgpack.Decoder(ToServer)
_TO_CLIENT: Final[msgspec.msgpack.Decoder[ToClient]] = msgspec.msgpack.Decoder(ToClient)


class BadClientFrame(ValueError):
    """A frame that is no message of the expected direction; `detail` is safe to send back."""


def encode_client(message: ToServer | ToClient) -> bytes:
    """A message as one frame."""
    return _ENCODER.encode(message)


def decode_to_server(frame: bytes) -> ToServer:
    """A client's message, or BadClientFrame."""
    return _decode(_TO_SERVER, frame)


def decode_to_client(frame: bytes) -> ToClient:
    """The server's message, or BadClientFrame."""
    return _decode(_TO_CLIENT, frame)


def _decode(decoder: "msgspec.msgpack.Decoder[T]", frame: bytes) -> T:
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise BadClientFrame(str(error)) from error
