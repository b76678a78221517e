"""The two refusals of core: of a submit (the client's fault) and of a worker's answer (ours)."""

from nvserve.protocol.messages import RefusalKind


class RequestRefused(Exception):
    """A submit that is not taken; becomes one Refused message."""

    def __init__(
        self,
        param: str,
        message: str,
        kind: RefusalKind = RefusalKind.INVALID,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.message = message
        self.kind = kind
        self.retry_after_s = retry_after_s


class EpochFault(Exception):
    """A worker's report that ends the epoch, never the process."""

    def __init__(self, rank: int, step: int, reason: str, *, is_blamed: bool = True) -> None:
        super().__init__(reason)
        self.rank = rank
        self.step = step
        self.reason = reason
        self.is_blamed = is_blamed  # requests in flight may be the cause
