"""What both Python clients share: the open requests and what each message does to them.

Pure: messages in, pieces and messages out. After a new connection `resubmit` gives the messages
that make every open request go on where it stands. Knows no socket and no clock.
"""

from array import array
from dataclasses import dataclass, field

import msgspec

from nvserve.protocol.client_messages import (
    Abort,
    Accepted,
    Beat,
    ClientParams,
    Emit,
    Error,
    Finished,
    Submit,
    ToClient,
    TokenLogprob,
    Welcome,
)


class RequestError(Exception):
    """The server refused or failed a request; `status` as over HTTP."""

    def __init__(self, error: Error) -> None:
        super().__init__(f"{error.status}: {error.message}")
        self.status = error.status
        self.message = error.message
        self.param = error.param
        self.code = error.code
        self.retry_after_s = error.retry_after_s


class Piece(msgspec.Struct, frozen=True):
    """New output of one request."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None  # scores of the prompt, continued


class Result(msgspec.Struct, frozen=True):
    """A finished request."""

    text: str
    token_ids: list[int]
    finish_reason: str  # "stop" or "length"
    seed: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None  # of the prompt's tokens from the second on


@dataclass(slots=True, eq=False)
class Request:
    """One open request. `output` holds every id received, so it can be submitted again.

    Pieces are made as they are taken. Those of other requests wait meanwhile, and an object for
    each would make garbage collections of the caller's process so long that streams pause.
    """

    submit: Submit
    output: "array[int]"
    seed: int | None = None
    texts: list[str] = field(default_factory=list)  # one for each piece
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    # Lengths of output, logprobs and prompt_logprobs: at the start, and with each piece.
    lengths: "array[int]" = field(init=False)
    num_taken: int = 0  # pieces that the caller has
    num_submits: int = 1
    finished: Finished | None = None
    error: RequestError | None = None

    def __post_init__(self) -> None:
        self.lengths = array("i", (len(self.output), 0, 0))

    @property
    def is_over(self) -> bool:
        return self.finished is not None or self.error is not None

    @property
    def has_piece(self) -> bool:
        """Has something come that the caller has not taken?"""
        return 3 * (self.num_taken + 1) < len(self.lengths)  # which grow last

    def take_piece(self) -> Piece:
        """The oldest piece that was not taken yet; there is one while `has_piece`."""
        number = self.num_taken
        self.num_taken += 1
        first, logprob, score, *ends = self.lengths[3 * number : 3 * number + 6]
        return Piece(
            self.texts[number],
            self.output[first : ends[0]].tolist(),
            None if self.submit.params.logprobs is None else self.logprobs[logprob : ends[1]],
            self.prompt_logprobs[score : ends[2]] or None,
        )

    def result(self) -> Result:
        """All of it; raises RequestError when it failed."""
        if self.error is not None:
            raise self.error
        assert self.finished is not None, "the request is over"
        params = self.submit.params
        return Result(
            text="".join(self.texts),
            token_ids=self.output.tolist(),
            finish_reason=self.finished.finish_reason,
            seed=self.seed or 0,
            num_prompt_tokens=self.finished.num_prompt_tokens,
            num_output_tokens=self.finished.num_output_tokens,
            num_cached_tokens=self.finished.num_cached_tokens,
            logprobs=None if params.logprobs is None else self.logprobs,
            prompt_logprobs=None if params.prompt_logprobs is None else self.prompt_logprobs,
        )


class Session:
    """The open requests of one client."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.welcome: Welcome | None = None
        self._counter = 0

    def open(
        self, prompt: str, prompt_ids: bytes, params: ClientParams, emitted: "array[int]"
    ) -> Request:
        """A new request; the caller sends its `submit`. `emitted` ids are not put out again."""
        self._counter += 1
        submit = Submit(
            id=self._counter,
            prompt=prompt,
            prompt_ids=prompt_ids,
            params=params,
            emitted=emitted.tobytes(),
        )
        request = Request(submit, emitted[:], seed=params.seed)
        self.requests[submit.id] = request
        return request

    def close(self, request: Request) -> Abort | None:
        """Forget a request; the message to send when the server still works on it."""
        if self.requests.pop(request.submit.id, None) is None or request.is_over:
            return None
        return Abort(id=request.submit.id)

    def take(self, message: ToClient) -> Request | None:
        """Apply a message: the request that has news. An error of the connection is raised."""
        match message:
            case Welcome():
                self.welcome = message
                return None
            case Beat():
                return None
            case Error(id=None):
                raise RequestError(message)
        request = self.requests.get(message.id) if message.id is not None else None
        if request is None:
            return None  # aborted by us; this was under way
        match message:
            case Accepted():
                request.seed = message.seed
            case Emit():
                _take_emit(request, message)
            case Finished():
                request.finished = message
                del self.requests[message.id]
            case Error():
                request.error = RequestError(message)
                del self.requests[request.submit.id]
        return request

    def lose(self) -> None:
        """The connection is gone; the next one begins with a Welcome of its own."""
        self.welcome = None

    def resubmit(self) -> list[Submit]:
        """A new connection knows nothing: what makes every open request go on."""
        return [_continued(request) for request in self.requests.values()]


def _take_emit(request: Request, emit: Emit) -> None:
    output, logprobs, scores = request.output, request.logprobs, request.prompt_logprobs
    assert emit.first == len(output), f"{emit.first} follows {len(output)} tokens"
    output.frombytes(emit.tokens)
    request.texts.append(emit.text)
    logprobs += emit.logprobs or ()
    # A server that starts the request anew sends its scores from the beginning.
    num_known = len(scores) + 1 - emit.prompt_first
    scores += (emit.prompt_logprobs or [])[max(0, num_known) :]
    request.lengths.extend((len(output), len(logprobs), len(scores)))


def _continued(request: Request) -> Submit:
    request.num_submits += 1
    params = msgspec.structs.replace(request.submit.params, seed=request.seed)
    request.submit = msgspec.structs.replace(
        request.submit, params=params, emitted=request.output.tobytes()
    )
    return request.submit
