"""Deadlines come in order, and the heap does not grow with requests that ended."""

from nvserve.core.deadlines import Deadlines


def test_passed_deadlines_come_earliest_first() -> None:
    deadlines = Deadlines()
    alive = {1, 2, 3}
    for deadline, request_id in ((5.0, 1), (3.0, 2), (9.0, 3)):
        deadlines.add(deadline, request_id, alive)
    assert list(deadlines.pop_passed(5.0)) == [2, 1]
    assert list(deadlines.pop_passed(5.0)) == []
    assert list(deadlines.pop_passed(9.0)) == [3]


def test_entries_of_ended_requests_are_dropped() -> None:
    deadlines = Deadlines()
    alive: set[int] = set()
    for request_id in range(10_000):
        alive = {request_id}
        deadlines.add(1e9, request_id, alive)
    assert len(deadlines) < 10
