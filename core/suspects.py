"""The search for a request that kills steps: who is suspected, and who may run meanwhile.

Requests that were in flight when a step failed become suspects. They return in halves, with nobody
else in the step, and each crash halves again; a suspect that crashes a step alone is condemned. The
number of strikes is the only memory: the frontend keeps it, so that a search survives the core that
began it. Decides; preempts nobody.
"""

from typing import Final

from nvserve.core.request import Request

TOKENS_BEYOND: Final = 2  # past the crash position before a suspect is innocent
MAX_TOKENS_LOST: Final = 2  # in flight at the crash, beyond the returned ones


class Suspects:
    """The suspected requests and those of them on trial now."""

    def __init__(self) -> None:
        self._suspects: Final[dict[int, Request]] = {}
        self._trial: Final[dict[int, Request]] = {}

    def __len__(self) -> int:
        return len(self._suspects)

    def add(self, request: Request) -> None:
        """Suspect a request that has strikes."""
        assert request.strikes > 0
        request.clear_at = len(request.tokens) + MAX_TOKENS_LOST + TOKENS_BEYOND
        self._suspects[request.request_id] = request

    def accuse(self, requests: list[Request]) -> Request | None:
        """Blame all that were in flight at a crash; the one to fail, if it is found now.

        One that has ended since gets no strike, but who was there with it was not alone.
        """
        self._trial.clear()
        is_found = len(requests) == 1 and requests[0].request_id in self._suspects
        for request in requests:
            if not request.is_finished:
                request.strikes += 1
                self.add(request)
        return requests[0] if is_found else None

    def absolve(self) -> list[Request]:
        """Clear those on trial that ended or came far enough, and return those that go on.

        Called after each commit.
        """
        cleared = []
        for request in list(self._trial.values()):
            if request.is_finished or len(request.tokens) >= request.clear_at:
                request.strikes = 0
                self.forget(request)
                if not request.is_finished:
                    cleared.append(request)
        return cleared

    def forget(self, request: Request) -> None:
        self._suspects.pop(request.request_id, None)
        self._trial.pop(request.request_id, None)

    def admits(self, request: Request) -> bool:
        """May this request be in a step now?"""
        return not self._suspects or request.request_id in self._trial

    def open_trial(self) -> None:
        """Put the next group on trial when none is: half of those with most strikes."""
        if self._trial or not self._suspects:
            return
        most = max(request.strikes for request in self._suspects.values())
        group = [request for request in self._suspects.values() if request.strikes == most]
        group.sort(key=lambda request: request.order)
        for request in group[: (len(group) + 1) // 2]:
            self._trial[request.request_id] = request

    def check(self) -> None:
        assert self._trial.keys() <= self._suspects.keys()
        assert not any(request.is_finished for request in self._suspects.values())
