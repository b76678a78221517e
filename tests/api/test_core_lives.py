"""Core dies and comes back; emits are lost, repeated and late: every text stays exact."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from api.fake_core import EVENT_LIMIT_S, FakeCore, tokens_of
from api.frontend_process import FrontendProcess

from nvserve.frontend.client import Client
from nvserve.protocol.messages import Abort, Emits, Submit, unpack_ids

COUNT = 40


def ask(frontend: FrontendProcess, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {
        "prompt": prompt,
        "max_tokens": COUNT,
        "temperature": 0,
        "return_token_ids": True,
    }
    status, answer = frontend.post("/v1/completions", body | more)
    assert status == 200, answer
    choice: dict[str, Any] = answer["choices"][0]
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    return choice


def ask_all(frontend: FrontendProcess, count: int) -> tuple[ThreadPoolExecutor, list[Future[Any]]]:
    pool = ThreadPoolExecutor(count)
    return pool, [pool.submit(ask, frontend, [number + 1]) for number in range(count)]


def assert_exact(futures: list[Future[Any]]) -> None:
    for number, future in enumerate(futures):
        assert future.result(EVENT_LIMIT_S)["token_ids"] == tokens_of([number + 1], COUNT)


def wait_stuck(core: FakeCore, num_requests: int) -> None:
    """Until so many requests have had all that this core gives them."""

    def is_stuck(core: FakeCore) -> bool:
        outputs = [len(request.output) for request in core.running.values()]
        return outputs == [core.most_tokens] * num_requests

    core.wait_until(is_stuck)


def test_running_requests_go_on_in_the_next_life_of_core(
    frontend: FrontendProcess, core: FakeCore
) -> None:
    core.most_tokens = 12
    pool, futures = ask_all(frontend, 8)
    with pool:
        wait_stuck(core, 8)
        arrivals = {submit.request_id: submit.arrival for submit in core.of_type(Submit)}
        second = frontend.new_core(most_tokens=20)
        wait_stuck(second, 8)
        third = frontend.new_core()
        assert_exact(futures)
    submits = third.of_type(Submit)
    assert len(submits) == 8
    for submit in submits:
        assert submit.is_replay
        assert submit.core_life == 2
        assert len(submit.emitted) >= 4 * 12
        assert submit.arrival == arrivals[submit.request_id]


def test_requests_wait_for_a_core_that_is_not_there_yet() -> None:
    frontend = FrontendProcess()
    try:
        frontend.ready()
        pool, futures = ask_all(frontend, 4)
        with pool:
            assert frontend.get("/health")[0] == 200
            assert frontend.get("/ready")[0] == 503
            core = frontend.new_core()
            assert_exact(futures)
        assert not any(submit.is_replay for submit in core.of_type(Submit))
    finally:
        frontend.close()


def test_a_full_queue_is_a_429_while_core_is_down() -> None:
    frontend = FrontendProcess(max_queued_requests=2)
    try:
        frontend.ready()
        pool, futures = ask_all(frontend, 2)
        with pool:
            frontend.wait_metric("nvserve:frontend_open_requests", 2)
            assert frontend.post("/v1/completions", {"prompt": [1]})[0] == 429
            assert int(frontend.last_headers["retry-after"]) >= 1
            frontend.new_core()
            assert_exact(futures)
    finally:
        frontend.close()


def test_what_core_cannot_answer_yet_is_not_sent_again(
    frontend: FrontendProcess, core: FakeCore
) -> None:
    """Its grammar is still being compiled; only what core knows nothing of was lost."""
    later = time.time() + 3600.0
    core.is_silent = True
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ask, frontend, [1])
        core.wait_until(lambda core: len(core.of_type(Submit)) == 1)
        [submit] = core.of_type(Submit)
        known = {"request_ids": [], "unanswered_ids": [submit.request_id], "time": later}
        core.stats_changes = known | {"num_blocks": 1001}
        frontend.wait_metric("nvserve:num_kv_blocks", 1001)
        core.stats_changes = known | {"num_blocks": 1002}
        frontend.wait_metric("nvserve:num_kv_blocks", 1002)
        assert len(core.of_type(Submit)) == 1
        frontend.wait_metric("nvserve:frontend_gaps_total", 0)
        core.stats_changes = known | {"unanswered_ids": []}
        core.wait_until(lambda core: len(core.of_type(Submit)) > 1)
        core.stats_changes = {}
        core.is_silent = False
        frontend.new_core()
        assert future.result(EVENT_LIMIT_S)["token_ids"] == tokens_of([1], COUNT)


def test_free_slots_count_while_core_is_there() -> None:
    """One request of more prompts than may wait is served where they need not wait."""
    frontend = FrontendProcess(max_queued_requests=2)
    try:
        frontend.ready()
        frontend.new_core()
        frontend.wait_connected()
        prompts = [[number + 1] for number in range(6)]
        body = {"prompt": prompts, "max_tokens": COUNT, "temperature": 0, "return_token_ids": True}
        status, answer = frontend.post("/v1/completions", body)
        assert status == 200, answer
        ids = [choice["token_ids"] for choice in answer["choices"]]
        assert ids == [tokens_of(prompt, COUNT) for prompt in prompts]
    finally:
        frontend.close()


def test_what_could_never_be_taken_whole_is_not_told_to_try_again() -> None:
    frontend = FrontendProcess(max_num_seqs=3, max_queued_requests=2)
    try:
        frontend.ready()
        frontend.new_core()
        frontend.wait_connected()
        body = {"prompt": [[1]] * 5, "max_tokens": 1}
        assert frontend.post("/v1/completions", body)[0] == 200
        for change, param in (({"prompt": [[1]] * 6}, "prompt"), ({"prompt": [1], "n": 6}, "n")):
            status, answer = frontend.post("/v1/completions", body | change)
            assert (status, answer["error"]["param"]) == (400, param)
        nothing = {"prompt": [[1]] * 6, "max_tokens": 0}
        assert frontend.post("/v1/completions", nothing)[0] == 200
    finally:
        frontend.close()


def repeat(emits: Emits) -> list[Emits]:
    return [emits, emits]


class Loser:
    """Drops every nth emits, but no last one: nothing would show that it was lost."""

    def __init__(self, period: int) -> None:
        self._period = period
        self._count = 0

    def __call__(self, emits: Emits) -> list[Emits]:
        self._count += 1
        return [] if self._count % self._period == 0 and not any(emits.finishes) else [emits]


def of_another_life(emits: Emits) -> list[Emits]:
    """A late copy of an older life, with tokens nobody may see."""
    wrong = msgspec.structs.replace(emits, tokens=b"\x09\0\0\0" * len(emits.request_ids))
    return [
        msgspec.structs.replace(wrong, core_life=emits.core_life - 1),
        msgspec.structs.replace(wrong, frontend_life=emits.frontend_life + 1),
        emits,
    ]


class Merger:
    """Holds emits back and sends two as one, as core does when it cannot send."""

    def __init__(self) -> None:
        self._held: Emits | None = None

    def __call__(self, emits: Emits) -> list[Emits]:
        if self._held is None and len(emits.request_ids) == 1 and not any(emits.finishes):
            self._held = emits
            return []
        held, self._held = self._held, None
        if held is None:
            return [emits]
        return [
            msgspec.structs.replace(
                emits, firsts=held.firsts, counts=[2], tokens=held.tokens + emits.tokens
            )
        ]


@pytest.mark.parametrize("alter", [repeat, of_another_life], ids=["repeated", "late"])
def test_repeated_and_late_emits_change_nothing(
    frontend: FrontendProcess, core: FakeCore, alter: Callable[[Emits], list[Emits]]
) -> None:
    core.alter = alter
    pool, futures = ask_all(frontend, 4)
    with pool:
        assert_exact(futures)


def test_merged_emits_are_taken_apart(frontend: FrontendProcess, core: FakeCore) -> None:
    core.alter = Merger()
    assert ask(frontend, [1])["token_ids"] == tokens_of([1], COUNT)


def test_a_stop_string_inside_merged_emits_ends_at_the_same_token(
    frontend: FrontendProcess, core: FakeCore
) -> None:
    core.script = [40, 41, 42, 43, 44, 45, 46, 47]
    plain = ask(frontend, [1], stop=_text(frontend, [43]))
    core.alter = Merger()
    assert ask(frontend, [1], stop=_text(frontend, [43])) == plain
    assert plain["token_ids"] == [40, 41, 42, 43]
    assert plain["finish_reason"] == "stop"


def _text(frontend: FrontendProcess, ids: list[int]) -> str:
    text: str = frontend.post("/detokenize", {"tokens": ids})[1]["prompt"]
    return text


@pytest.mark.parametrize("period", [3, 7])
def test_lost_emits_are_a_gap_and_the_request_starts_again_from_the_journal(
    frontend: FrontendProcess, core: FakeCore, period: int
) -> None:
    core.alter = Loser(period)
    pool, futures = ask_all(frontend, 4)
    with pool:
        assert_exact(futures)
    replays = [submit for submit in core.of_type(Submit) if submit.is_replay]
    assert len(replays) == len(core.of_type(Abort)) >= 4
    assert any(unpack_ids(submit.emitted) for submit in replays)


def test_logprobs_and_text_are_not_repeated_by_a_replay(
    frontend: FrontendProcess, core: FakeCore
) -> None:
    core.most_tokens = 6
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ask, frontend, [1], logprobs=1)
        wait_stuck(core, 1)
        frontend.new_core()
        choice = future.result(EVENT_LIMIT_S)
    assert len(choice["logprobs"]["tokens"]) == COUNT
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


def test_a_zmq_stream_goes_on_in_the_next_life_of_core(
    frontend: FrontendProcess, core: FakeCore
) -> None:
    core.most_tokens = 6

    def run() -> list[int]:
        with Client(frontend.endpoint) as client:
            return client.generate([1], max_tokens=COUNT, temperature=0.0).token_ids

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run)
        wait_stuck(core, 1)
        frontend.new_core()
        assert future.result(EVENT_LIMIT_S) == tokens_of([1], COUNT)


def test_emits_behind_a_stop_string_find_nobody(frontend: FrontendProcess, core: FakeCore) -> None:
    """Core goes on while our Finish is under way."""
    core.script = [40, 41, 42]
    core.alter = lambda emits: [emits, emits]
    assert ask(frontend, [1], stop=_text(frontend, [41]))["token_ids"] == [40, 41]
    core.script = [40, 41]
    assert ask(frontend, [1], stop=_text(frontend, [41]))["finish_reason"] == "stop"
