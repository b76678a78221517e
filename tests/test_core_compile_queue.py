"""Grammars compile in two threads at most; late, failed and unwanted ones hurt nobody."""

import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from model_check.answer import EveryThird
from model_check.cases import make_world
from msgspec.structs import replace

from nvserve.core.compile_queue import COMPILE_LIMIT_S, QUEUE_LIMIT_S, Compiled, CompileQueue
from nvserve.core.constraint import Matcher
from nvserve.core.errors import RequestRefused
from nvserve.protocol.messages import RefusalKind, Submit

EVENT_LIMIT_S = 30.0  # for whatever surely comes


class Compiler:
    """Compiles when told to, and counts how many it works on."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.num_working = self.most_working = 0
        self._lock = threading.Lock()

    def compile(self, grammar: str) -> Matcher:
        with self._lock:
            self.num_working += 1
            self.most_working = max(self.most_working, self.num_working)
        self.entered.release()
        assert self.go.acquire(timeout=EVENT_LIMIT_S)
        with self._lock:
            self.num_working -= 1
        if grammar == "bad":
            raise RequestRefused("grammar", "bad grammar")
        if grammar == "fault":
            raise KeyError("a fault of the compiler")
        return EveryThird(97, frozenset())


@contextmanager
def made() -> Iterator[tuple[CompileQueue, Compiler]]:
    compiler = Compiler()
    queue = CompileQueue(compiler.compile)
    try:
        yield queue, compiler
    finally:
        compiler.go.release(100)
        queue.close()


def submits(*grammars: str) -> list[Submit]:
    world = make_world()
    return [world.make_submit([2], grammar=grammar) for grammar in grammars]


def take(queue: CompileQueue, now_s: float = 0.0) -> list[Compiled]:
    """What comes out when the queue says that something may have."""
    readable, _, _ = select.select([queue], [], [], EVENT_LIMIT_S)
    assert readable
    return queue.take(now_s)


def test_two_compile_at_once_and_the_others_wait() -> None:
    with made() as (queue, compiler):
        asked = submits(*"abcde")
        for submit in asked:
            queue.add(submit, 0.0)
        assert len(queue) == 5
        for _ in range(2):  # both threads work before the first comes back
            assert compiler.entered.acquire(timeout=EVENT_LIMIT_S)
        done: list[int] = []
        for _ in asked:
            compiler.go.release()
            done += [submit.request_id for submit, _ in take(queue)]
        assert sorted(done) == [submit.request_id for submit in asked]
        assert compiler.most_working == 2
        assert queue.is_idle


@pytest.mark.parametrize("grammar", ["bad", "fault"])
def test_what_cannot_be_compiled_is_refused(grammar: str) -> None:
    with made() as (queue, compiler):
        queue.add(submits(grammar)[0], 0.0)
        compiler.go.release()
        [(_, result)] = take(queue)
        assert isinstance(result, RequestRefused)
        assert (result.param, result.kind) == ("grammar", RefusalKind.INVALID)


def test_a_late_one_is_refused_and_its_thread_comes_back_for_others() -> None:
    with made() as (queue, compiler):
        late, _, third = asked = submits("a", "b", "c")
        for submit in asked:
            queue.add(submit, 0.0)
        assert queue.take(COMPILE_LIMIT_S) == []
        refused = dict((s.request_id, r) for s, r in queue.take(COMPILE_LIMIT_S + 0.1))
        answer = refused[late.request_id]
        assert isinstance(answer, RequestRefused)
        assert answer.kind is RefusalKind.INVALID
        assert third.request_id in queue, "it has not begun"
        compiler.go.release(3)
        results: list[Compiled] = []
        deadline = time.monotonic() + EVENT_LIMIT_S
        while not results and time.monotonic() < deadline:
            results = take(queue, COMPILE_LIMIT_S + 0.2)
        assert [submit for submit, _ in results] == [third]


def test_who_waits_too_long_for_a_thread_is_refused_for_load() -> None:
    with made() as (queue, _):
        asked = submits("a", "b", "c")
        for submit in asked:
            queue.add(submit, 0.0)
        answers = {s.request_id: r for s, r in queue.take(QUEUE_LIMIT_S + 1)}
        answer = answers[asked[2].request_id]
        assert isinstance(answer, RequestRefused)
        assert answer.kind is RefusalKind.BUSY


def test_who_leaves_before_a_thread_is_free_leaves_nothing_behind() -> None:
    with made() as (queue, _):
        first, second, third, late = submits("a", "b", "c", "d")
        queue.add(first, 0.0)
        queue.add(second, 0.0)
        before = [sys.getrefcount(third), sys.getrefcount(late)]
        queue.add(third, 0.0)
        queue.drop(third.request_id)
        queue.add(late, 0.0)
        queue.take(QUEUE_LIMIT_S + 1)
        assert late.request_id not in queue
        assert [sys.getrefcount(third), sys.getrefcount(late)] == before


def test_a_replay_is_never_late() -> None:
    with made() as (queue, compiler):
        replay = replace(submits("a")[0], is_replay=True)
        queue.add(replay, 0.0)
        assert queue.take(1e6) == []
        compiler.go.release()
        [(submit, result)] = take(queue, 1e6)
        assert submit is replay
        assert not isinstance(result, RequestRefused)


def test_who_is_past_its_deadline_leaves_at_once_and_begins_nothing() -> None:
    with made() as (queue, compiler):
        begun, other, waiting, patient = submits("a", "b", "c", "d")
        begun = replace(begun, deadline=50.0, is_replay=True)
        waiting = replace(waiting, deadline=50.0)
        for submit in (begun, other, waiting, patient):
            queue.add(submit, 0.0)
        assert queue.pop_passed(49.9) == []
        assert queue.pop_passed(50.0) == [begun, waiting]
        assert queue.pop_passed(99.0) == [], "each is handed out once"
        assert queue.request_ids == [other.request_id, patient.request_id]
        compiler.go.release(100)
        results: list[Compiled] = []
        while len(queue):
            results += take(queue)
        assert {s.request_id for s, _ in results} == {other.request_id, patient.request_id}
        for _ in range(3):
            assert compiler.entered.acquire(timeout=EVENT_LIMIT_S)
        assert not compiler.entered.acquire(blocking=False), "nobody waited for the fourth"


@pytest.mark.parametrize("forget", [lambda q, s: q.drop(s.request_id), lambda q, s: q.clear()])
def test_nothing_comes_of_a_submit_that_is_dropped(
    forget: Callable[[CompileQueue, Submit], None],
) -> None:
    with made() as (queue, compiler):
        [submit] = submits("a")
        queue.add(submit, 0.0)
        assert compiler.entered.acquire(timeout=EVENT_LIMIT_S)
        forget(queue, submit)
        assert not queue.is_idle, "its thread still works"
        compiler.go.release()
        assert take(queue) == []
        assert queue.is_idle
        assert not select.select([queue], [], [], 0)[0], "a loop would never sleep again"
