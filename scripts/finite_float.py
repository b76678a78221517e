"""Numbers on a command line; `nan` is neither too small nor too large, so it passes any range."""

import math
from typing import Any, Final

import click


class FiniteFloat(click.FloatRange):
    """A number of this range that is neither nan nor infinite."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return _finite(super().convert(value, param, ctx), self, param, ctx)


class _AnyFiniteFloat(click.types.FloatParamType):
    """One whose bounds are for others to check; a range without any would show as `x<=None`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return _finite(super().convert(value, param, ctx), self, param, ctx)


def _finite(
    number: float,
    kind: "click.ParamType[Any]",
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> float:
    if not math.isfinite(number):
        kind.fail(f"{number} is no finite number.", param, ctx)
    return number


FINITE: Final = _AnyFiniteFloat()
SECONDS: Final = FiniteFloat(0, min_open=True)
