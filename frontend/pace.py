"""How long a client that finds the queue full should wait, from how fast requests have been ending.

Pure: core's totals and their times in, seconds out.
"""

from collections import deque
from typing import Final

WINDOW_S: Final = 10.0  # of the totals that are looked at
MIN_WAIT_S: Final = 1.0  # also while nothing has ended yet
MAX_WAIT_S: Final = 60.0


class Pace:
    """Seconds from one end of a request to the next, measured while there is work."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()  # (time, requests ended until then)
        self._between_ends_s = 0.0  # 0 = not known

    def note(self, num_ended: int, now: float, *, is_busy: bool) -> None:
        """Take core's total at a time, in seconds; a total that falls is that of another life."""
        marks = self._marks
        if not is_busy or (marks and (num_ended < marks[-1][1] or now < marks[-1][0])):
            marks.clear()
        marks.append((now, num_ended))
        while len(marks) > 2 and marks[1][0] <= now - WINDOW_S:
            marks.popleft()
        elapsed_s, ended = now - marks[0][0], num_ended - marks[0][1]
        if ended:
            self._between_ends_s = elapsed_s / ended
        elif self._between_ends_s:  # it takes at least this long now
            self._between_ends_s = max(self._between_ends_s, elapsed_s)

    def wait_s(self, num_waiting: int) -> float:
        """Until as many requests as wait now have ended."""
        return min(MAX_WAIT_S, max(MIN_WAIT_S, num_waiting * self._between_ends_s))
