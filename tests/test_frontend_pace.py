"""Retry-After: the time in which a full queue is served, as far as it can be known."""

import pytest

from nvserve.frontend.pace import MAX_WAIT_S, MIN_WAIT_S, WINDOW_S, Pace


def busy(pace: Pace, *, begin: float, rate: float, seconds: float, start: int = 0) -> int:
    """Requests end at this rate, told four times a second; the total at the end."""
    total = start
    for quarter in range(1, round(seconds * 4) + 1):
        total = start + int(rate * quarter / 4)
        pace.note(total, begin + quarter / 4, is_busy=True)
    return total


def test_before_anything_ended_the_wait_is_the_shortest() -> None:
    pace = Pace()
    assert pace.wait_s(1000) == MIN_WAIT_S
    busy(pace, begin=0.0, rate=0.0, seconds=3)
    assert pace.wait_s(1000) == MIN_WAIT_S


@pytest.mark.parametrize(("rate", "waiting", "wait_s"), [(20, 200, 10), (50, 1000, 20), (4, 12, 3)])
def test_the_wait_is_the_queue_over_the_rate(rate: float, waiting: int, wait_s: float) -> None:
    pace = Pace()
    busy(pace, begin=100.0, rate=rate, seconds=30)
    assert pace.wait_s(waiting) == pytest.approx(wait_s, rel=0.1)


def test_the_wait_is_bounded() -> None:
    pace = Pace()
    busy(pace, begin=0.0, rate=2, seconds=20)
    assert pace.wait_s(1000) == MAX_WAIT_S
    assert pace.wait_s(0) == MIN_WAIT_S


def test_only_recent_seconds_count() -> None:
    pace = Pace()
    total = busy(pace, begin=0.0, rate=100, seconds=60)
    busy(pace, begin=60.0, rate=10, seconds=WINDOW_S + 1, start=total)
    assert pace.wait_s(100) == pytest.approx(10, rel=0.1)


def test_idle_time_is_no_slowness() -> None:
    pace = Pace()
    total = busy(pace, begin=0.0, rate=20, seconds=10)
    for second in range(100):
        pace.note(total, 10.0 + second, is_busy=False)
    assert pace.wait_s(200) == pytest.approx(10, rel=0.1)


def test_a_standstill_makes_the_wait_longer() -> None:
    pace = Pace()
    total = busy(pace, begin=0.0, rate=20, seconds=20)
    for second in range(1, 13):
        pace.note(total, 20.0 + second, is_busy=True)
    assert pace.wait_s(5) > 40


def test_the_totals_of_a_new_core_begin_again() -> None:
    pace = Pace()
    busy(pace, begin=0.0, rate=20, seconds=20)
    busy(pace, begin=30.0, rate=20, seconds=5)
    assert pace.wait_s(200) == pytest.approx(10, rel=0.2)
