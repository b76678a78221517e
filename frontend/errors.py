"""The one error a client can cause, and its OpenAI form on the wire."""

import msgspec


class ApiError(Exception):
    """Becomes an HTTP status with `{"error": {...}}`; `param` names the request field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        """OpenAI's error type of this status."""
        by_status = {
            401: "authentication_error",
            404: "not_found_error",
            429: "rate_limit_error",
            503: "service_unavailable_error",
            504: "timeout_error",
        }
        default = "invalid_request_error" if self.status < 500 else "server_error"
        return by_status.get(self.status, default)

    def body(self) -> bytes:
        """The JSON document `{"error": {"message", "type", "param", "code"}}`."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.kind,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 for one field; the message starts with its name."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


class StartFailure(Exception):
    """The frontend cannot start; the message is one line a user understands."""


def raise_again(error: ApiError | None) -> None:
    """Raise another one like it, if there is one.

    A raised error holds the frames that it passed, and with them whatever holds the error itself.
    """
    if error is not None:
        raise ApiError(
            error.status,
            error.message,
            param=error.param,
            code=error.code,
            retry_after_s=error.retry_after_s,
        )


def deadline_passed() -> ApiError:
    """The 504 of a request whose own time-out has passed."""
    return ApiError(504, "the request's deadline passed", code="deadline_exceeded")
