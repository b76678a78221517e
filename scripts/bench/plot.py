"""A small chart as plain SVG: panels above each other, lines with markers over one shared x axis.

Numbers in, text out; knows nothing of what is drawn.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

# Okabe and Ito's colours, which colour-blind readers can tell apart
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
WIDTH: Final = 720
PANEL_HEIGHT: Final = 220
LEFT: Final = 76
RIGHT: Final = 24
TOP: Final = 56  # of the whole chart: its title
HEAD: Final = 44  # of a panel: its title and legend
FOOT: Final = 22  # of a panel: tick labels
BOTTOM: Final = 32  # of the whole chart: the x axis label
LOG_RATIO: Final = 16  # from here on the x axis is logarithmic
NUM_TICKS: Final = 5
STEPS: Final = (1.0, 2.0, 2.5, 5.0, 10.0)  # of ticks, times a power of ten


@dataclass(frozen=True, slots=True)
class Line:
    """Points in ascending x, joined."""

    label: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines that share a y axis, which begins at zero."""

    title: str
    lines: Sequence[Line]


def nice_ticks(high: float, num_ticks: int = NUM_TICKS) -> list[float]:
    """Round numbers from 0 up to the first one not below `high`."""
    if not 0 < high < math.inf:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(high / num_ticks))
    step = next(s * power for s in STEPS if s * power * num_ticks >= high * (1 - 1e-9))
    count = math.ceil(high / step * (1 - 1e-9))
    return [i * step for i in range(count + 1)]


def format_number(value: float) -> str:
    """A tick label: no more digits than needed, thousands grouped."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"


class XAxis:
    """Maps x to pixels, logarithmically when the values span a wide range."""

    def __init__(self, values: Iterable[float]) -> None:
        self.values: Final = sorted(set(values)) or [0.0, 1.0]
        low, high = self.values[0], self.values[-1]
        self.is_log: Final = low > 0 and high / low >= LOG_RATIO
        self._low: Final = self._scale(low) if self.is_log else 0.0
        self._span: Final = (self._scale(high) - self._low) or 1.0

    def _scale(self, value: float) -> float:
        return math.log(value) if self.is_log else value

    def pixel(self, value: float) -> float:
        share = (self._scale(value) - self._low) / self._span
        pad = 24 if self.is_log else 0  # the lowest value would sit on the y axis
        return LEFT + pad + share * (WIDTH - LEFT - RIGHT - pad - 12)

    def ticks(self) -> list[float]:
        """Measured values where they are few, else round numbers."""
        if self.is_log or len(self.values) <= 8:
            kept: list[float] = []
            for value in self.values:
                if not kept or self.pixel(value) - self.pixel(kept[-1]) >= 36:
                    kept.append(value)
            return kept
        return [tick for tick in nice_ticks(self.values[-1]) if tick <= self.values[-1]]


def draw_chart(title: str, panels: Sequence[Panel], *, x_label: str) -> str:
    """The chart as one SVG document."""
    axis = XAxis(x for panel in panels for line in panel.lines for x, _ in line.points)
    height = TOP + len(panels) * PANEL_HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(LEFT, 30, title, size=16, weight="bold"),
    ]
    for place, panel in enumerate(panels):
        parts += _draw_panel(panel, axis, TOP + place * PANEL_HEIGHT)
    middle = (LEFT + WIDTH - RIGHT) / 2
    scale = " (logarithmic)" if axis.is_log else ""
    parts.append(_text(middle, height - 12, x_label + scale, anchor="middle"))
    return "\n".join([*parts, "</svg>", ""])


def _draw_panel(panel: Panel, axis: XAxis, top: float) -> list[str]:
    bottom = top + PANEL_HEIGHT - FOOT
    ticks = nice_ticks(max((y for line in panel.lines for _, y in line.points), default=0.0))

    def pixel(value: float) -> float:
        return bottom - value / ticks[-1] * (bottom - top - HEAD)

    parts = [_text(LEFT, top + 16, panel.title, weight="bold"), *_legend(panel.lines, top + 34)]
    for tick in ticks:
        y = pixel(tick)
        colour = "#333333" if tick == 0 else "#dddddd"
        parts.append(_rule(LEFT, y, WIDTH - RIGHT, y, colour))
        parts.append(_text(LEFT - 8, y + 4, format_number(tick), anchor="end"))
    for tick in axis.ticks():
        x = axis.pixel(tick)
        parts.append(_rule(x, bottom, x, bottom + 4, "#333333"))
        parts.append(_text(x, bottom + 17, format_number(tick), anchor="middle"))
    for place, line in enumerate(panel.lines):
        points = [(axis.pixel(x), pixel(y)) for x, y in line.points]
        parts += _draw_line(points, COLOURS[place % len(COLOURS)])
    return parts


def _draw_line(points: Sequence[tuple[float, float]], colour: str) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>', *dots]


def _legend(lines: Sequence[Line], y: float) -> list[str]:
    parts, x = [], float(LEFT)
    for place, line in enumerate(lines):
        colour = COLOURS[place % len(COLOURS)]
        parts.append(_rule(x, y - 4, x + 18, y - 4, colour, width=3))
        parts.append(_text(x + 24, y, line.label))
        x += 24 + 7 * len(line.label) + 22
    return parts


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str, width: int = 1) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{colour}" stroke-width="{width}"/>'
    )


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}" fill="#222222">{escape(text)}</text>'
    )
