"""Asks for /health and /ready from the side while a server recovers, and judges the answers."""

import asyncio
import json
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from chaos.client import Client

PERIOD_S = 0.05
ANSWER_LIMIT_S = 5.0  # the cores are shared with the load and with those that start
END_LIMIT_S = 30.0


@dataclass(frozen=True)
class Look:
    """One question; `code` is 0 when it was not answered, and `body` then says why."""

    path: str
    code: int
    body: dict[str, Any]
    took_s: float


class HealthWatch:
    """Use as a context: asks on a thread of its own until the end of it."""

    def __init__(self, url: str) -> None:
        self.looks: list[Look] = []
        self._client = Client(url)
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_stopping.set()
        self._thread.join(END_LIMIT_S)
        assert not self._thread.is_alive(), "a question hangs"

    def judge(self) -> list[dict[str, Any]]:
        """Alive all the time; what /ready said while it was not, for `assert_explained`.

        Which may be nothing: a recovery can be shorter than a moment in which this process, or the
        machine, stands still.
        """
        wrong = [
            look
            for look in self.looks
            if look.took_s > ANSWER_LIMIT_S
            or look.code not in ((200,) if look.path == "/health" else (200, 503))
        ]
        assert not wrong, wrong[:5]
        not_ready = [look.body for look in self.looks if look.code == 503]
        for body in not_ready:
            assert body["status"] == "recovering", body
            assert body["last_step_age_s"] >= 0.0, body
        return not_ready

    def _run(self) -> None:
        while not self._is_stopping.wait(PERIOD_S):
            for path in ("/health", "/ready"):
                self.looks.append(self._look(path))

    def _look(self, path: str) -> Look:
        begun = time.monotonic()
        try:
            code, text = self._client.fetch(path)
            body = json.loads(text)
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError) as error:
            code, body = 0, {"error": repr(error)}
        return Look(path, code, body, time.monotonic() - begun)


def assert_explained(not_ready: list[dict[str, Any]]) -> None:
    """In a row of recoveries /ready was 503, with a reason."""
    assert not_ready, "/ready was never 503"
    assert any(body["reason"] for body in not_ready), f"no reason in {not_ready[:5]}"
