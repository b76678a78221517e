"""Numbers on a command line; `nan` is neither too small nor too large, so it passes any range."""

import math
from typing import Any, Final

import click


class FiniteFloat(click.FloatRange):
    """A number of this range that is neither nan nor infinite."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


SECONDS: Final = FiniteFloat(0, min_open=True)
