"""Compiles grammars in helper threads, before their requests are accepted.

At most two compile at once, and one that is late is refused although its thread cannot be stopped;
who waits behind such threads for too long is refused for load. Hands submits back with the result;
decides nothing else.
"""

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from nvserve.core.constraint import Matcher
from nvserve.core.errors import RequestRefused
from nvserve.protocol.messages import RefusalKind, Submit

logger = logging.getLogger(__name__)

NUM_THREADS: Final = 2
COMPILE_LIMIT_S: Final = 5.0
QUEUE_LIMIT_S: Final = 20.0  # for a thread to become free
RETRY_AFTER_S: Final = 2.0

Compile = Callable[[str], Matcher]  # raises RequestRefused


@dataclass(slots=True, eq=False)
class _Job:
    submit: Submit
    queued_s: float
    begun_s: float = 0.0
    future: "Future[Matcher] | None" = None


Compiled = tuple[Submit, Matcher | RequestRefused]


class CompileQueue:
    """Submits whose grammars are not ready. `fileno` becomes readable when one may be."""

    def __init__(self, compile_grammar: Compile) -> None:
        self._compile: Final = compile_grammar
        self._threads: Final = ThreadPoolExecutor(NUM_THREADS, "grammar")
        self._jobs: dict[int, _Job] = {}  # by request id, oldest first
        self._waiting: deque[_Job] = deque()
        self._num_free = NUM_THREADS
        # Counts the threads that became free.
        self._wake: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._jobs

    @property
    def request_ids(self) -> list[int]:
        return list(self._jobs)

    @property
    def is_idle(self) -> bool:
        """Nothing is to be taken, and no thread will become free."""
        return not self._jobs and self._num_free == NUM_THREADS

    def fileno(self) -> int:
        return self._wake

    def add(self, submit: Submit, now_s: float) -> None:
        """Compile the grammar of a submit; times are monotonic seconds."""
        job = _Job(submit, now_s)
        self._jobs[submit.request_id] = job
        self._waiting.append(job)
        self._begin(now_s)

    def drop(self, request_id: int) -> None:
        """Nobody waits for it any more; a thread at work on its grammar finishes for nothing."""
        job = self._jobs.pop(request_id)
        if job.future is None:
            self._waiting.remove(job)

    def pop_passed(self, now: float) -> list[Submit]:
        """Let go of those whose deadline, like `now` in UNIX seconds, has passed."""
        passed = [job.submit for job in self._jobs.values() if 0 < job.submit.deadline <= now]
        for submit in passed:
            self.drop(submit.request_id)
        return passed

    def clear(self) -> None:
        self._jobs.clear()
        self._waiting.clear()

    def take(self, now_s: float) -> list[Compiled]:
        """Submits that are ready, refused by the compiler, or late; each is handed out once."""
        self._collect_threads()
        compiled = []
        for job in list(self._jobs.values()):
            result = self._result(job, now_s)
            if result is not None:
                self.drop(job.submit.request_id)
                compiled.append((job.submit, result))
        self._begin(now_s)
        return compiled

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, now_s: float) -> None:
        while self._num_free and self._waiting:
            job = self._waiting.popleft()
            job.begun_s = now_s
            self._num_free -= 1
            job.future = self._threads.submit(self._compile, job.submit.sampling.grammar)
            job.future.add_done_callback(self._on_done)

    def _on_done(self, _: "Future[Matcher]") -> None:
        """Runs in the thread, behind the setting of its result."""
        os.eventfd_write(self._wake, 1)

    def _collect_threads(self) -> None:
        with contextlib.suppress(BlockingIOError):  # none is ready; one may be late all the same
            self._num_free += os.eventfd_read(self._wake)

    def _result(self, job: _Job, now_s: float) -> Matcher | RequestRefused | None:
        if job.future is not None and job.future.done():
            error = job.future.exception()
            if error is None:
                return job.future.result()
            if isinstance(error, RequestRefused):
                return error
            logger.error("the grammar compiler failed", exc_info=error)
            return RequestRefused("grammar", "grammar: the compiler failed on it")
        if job.submit.is_replay:
            return None  # it was accepted once, so it compiles; never refused
        if job.future is not None and now_s - job.begun_s > COMPILE_LIMIT_S:
            return RequestRefused(
                "grammar", f"grammar: takes more than {COMPILE_LIMIT_S:g} s to compile"
            )
        if job.future is None and now_s - job.queued_s > QUEUE_LIMIT_S:
            text = "too many grammars are being compiled"
            return RequestRefused("", text, RefusalKind.BUSY, RETRY_AFTER_S)
        return None
