"""What the engine tells the owner of a request."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from nvserve.frontend.errors import ApiError
from nvserve.protocol.messages import FinishReason, Logprobs


class EmitExtras(msgspec.Struct, frozen=True):
    """Logprobs of an emit; rows index its ids, of which the first `num_skipped` are not new.

    Rows of `prompt_logprobs` are positions in the prompt.
    """

    num_skipped: int
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None = None


class Listener(Protocol):
    """What one request's owner is told, each on the event loop and in this order."""

    def on_accepted(self) -> None:
        """Core has taken the request; told once, though core may take it again after its death."""

    def on_refused(self, error: ApiError) -> None:
        """Core has not taken it; nothing follows."""

    def on_tokens(
        self, tokens: Sequence[int], finish: FinishReason, cached: int, emit: EmitExtras | None
    ) -> None:
        """New output ids, each exactly once; a finish other than NONE is the last call."""

    def on_failure(self, error: Exception) -> None:
        """An earlier call raised: our own fault, and the last call."""
