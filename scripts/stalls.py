"""Finds an epoch in which everybody lives and nothing happens: a step or its answer was lost.

Pure: progress pages in, a verdict out.
"""

from nvserve.protocol.control import Role
from nvserve.protocol.progress import IDLE, Phase
from nvserve.scripts.hangs import Observation


class StallWatch:
    """Remembers since when core has had requests while all ranks wait for a step."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, int]] = []
        self._since = 0.0

    def is_stalled(
        self, observations: list[Observation], now: float, *, awake_since: float, limit_s: float
    ) -> bool:
        """Every rank has waited with the same steps for longer than `limit_s`, core has not.

        Time before `awake_since` does not count: nobody ran.
        """
        watched = [seen for seen in observations if seen.is_serving or seen.child.role is Role.CORE]
        steps: list[tuple[int, int]] = []
        for seen in watched:
            wanted = {Phase.SERVING} if seen.child.role is Role.CORE else IDLE
            if seen.page is None or seen.page.phase not in wanted:
                steps = []
                break
            steps.append((seen.page.epoch, seen.page.step))
        if len(steps) < 2 or steps != self._steps:
            self._steps, self._since = steps, now
            return False
        return now - max(self._since, awake_since) > limit_s
