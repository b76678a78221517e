"""`--endpoint` of the commands that ask a running server: no address is told before its use."""

from typing import Any, Final
from urllib.parse import urlsplit

import click

SCHEMES: Final = ("http", "https")


class Address(click.ParamType[str]):
    """`http://HOST:PORT`, or `HOST:PORT` for short; always with its scheme afterwards."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        url = value if "://" in value else f"http://{value}"
        try:
            parts = urlsplit(url)
            _ = parts.port, (parts.hostname or "").encode("idna")  # raise when they are none
        except ValueError as error:
            self.fail(f"{value!r} is no http:// address: {error}", param, ctx)
        if parts.scheme not in SCHEMES or not parts.hostname:
            self.fail(f"{value!r} is no http:// address", param, ctx)
        return str(url)
