"""Which pages of other origins a browser may let talk to this server. Off unless configured."""

from collections.abc import Sequence
from typing import Final

Headers = list[tuple[bytes, bytes]]

PREFLIGHT_AGE_S: Final = 600
METHODS: Final = b"GET, POST"
SHOWN_HEADERS: Final = b"x-request-id, retry-after"


class Cors:
    """The origins that are allowed; "*" allows all. Credentials are never part of it."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins: Final = frozenset(origin.encode() for origin in origins)

    @property
    def is_on(self) -> bool:
        return bool(self._origins)

    def headers(self, origin: bytes | None) -> Headers:
        """For every answer to a page of this origin."""
        if origin is None or not self._origins:
            return []
        if b"*" in self._origins:
            allowed = b"*"
        elif origin in self._origins:
            allowed = origin
        else:
            return [(b"vary", b"origin")]
        return [
            (b"access-control-allow-origin", allowed),
            (b"access-control-expose-headers", SHOWN_HEADERS),
            (b"vary", b"origin"),
        ]

    def preflight(self, origin: bytes | None, asked_headers: bytes | None) -> Headers | None:
        """The answer to a browser that asks first; None when it may not go on."""
        headers = self.headers(origin)
        if not headers or headers[0][0] == b"vary":
            return None
        return [
            (b"access-control-allow-methods", METHODS),
            (b"access-control-allow-headers", asked_headers or b"content-type, authorization"),
            (b"access-control-max-age", b"%d" % PREFLIGHT_AGE_S),
        ]
