"""A histogram that costs a bisection: the library's own takes a lock for every observation.

For one event loop; its family is built when scraped.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client.core import HistogramMetricFamily


class Histogram:
    """Counts by upper bound, and the sum of what was observed."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name: Final = name
        self._text: Final = text
        self._bounds: Final = list(bounds)
        self._counts: Final = [0] * (len(bounds) + 1)  # the last one is beyond all bounds
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, labels: dict[str, str]) -> HistogramMetricFamily:
        """What a scrape shows."""
        family = HistogramMetricFamily(self._name, self._text, labels=list(labels))
        family.add_metric(list(labels.values()), list(self._buckets()), self._sum)
        return family

    def _buckets(self) -> Iterator[tuple[str, float]]:
        names = [*map(str, self._bounds), "+Inf"]
        yield from zip(names, accumulate(self._counts), strict=True)
