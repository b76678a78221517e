"""A request's own deadline ends it also where no core is there to do so."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from api.fake_core import EVENT_LIMIT_S, FakeCore, tokens_of
from api.frontend_process import FrontendProcess

from nvserve.protocol.codec import encode
from nvserve.protocol.control import Peers
from nvserve.protocol.messages import Abort, Submit

Answer = tuple[int, dict[str, Any]]


def ask(frontend: FrontendProcess, prompt: list[int], timeout_s: float | None = None) -> Answer:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    headers = {} if timeout_s is None else {"x-request-timeout": str(timeout_s)}
    return frontend.post("/v1/completions", body, **headers)


def assert_late(answer: Answer) -> None:
    status, body = answer
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded"), body


def assert_served(future: "Future[Answer]", prompt: list[int]) -> None:
    status, body = future.result(EVENT_LIMIT_S)
    assert status == 200, body
    assert body["choices"][0]["token_ids"] == tokens_of(prompt, 8)


def test_a_request_that_waits_for_a_core_ends_at_its_deadline() -> None:
    frontend = FrontendProcess()
    try:
        frontend.ready()
        with ThreadPoolExecutor(1) as pool:
            patient = pool.submit(ask, frontend, [1])
            frontend.wait_metric("nvserve:frontend_open_requests", 1)
            assert_late(ask(frontend, [2], timeout_s=0.1))
            choices = {"prompt": [[3], [4]], "n": 2, "max_tokens": 8}
            late = frontend.post("/v1/completions", choices, **{"x-request-timeout": "0.1"})
            assert_late(late)
            frontend.wait_metric("nvserve:frontend_open_requests", 1)
            core = frontend.new_core()
            assert_served(patient, [1])
        assert len(core.of_type(Submit)) == 1
    finally:
        frontend.close()


def test_a_core_that_is_gone_or_silent_keeps_nobody_beyond_the_deadline(
    frontend: FrontendProcess, core: FakeCore
) -> None:
    core.most_tokens = 3
    assert_late(ask(frontend, [1], timeout_s=0.3))
    core.wait_until(lambda core: len(core.of_type(Abort)) == 1)
    core.is_silent = True
    assert_late(ask(frontend, [2], timeout_s=0.1))
    core.kill()
    assert_late(ask(frontend, [3], timeout_s=0.1))


def test_a_request_behind_suspects_ends_at_its_deadline(
    frontend: FrontendProcess, core: FakeCore
) -> None:
    core.most_tokens = 2
    with ThreadPoolExecutor(1) as pool:
        suspect = pool.submit(ask, frontend, [1])
        core.wait_until(lambda core: [len(one.output) for one in core.running.values()] == [2])
        core.kill()
        trial = frontend.core = FakeCore(frontend.launch_dir, frontend.life, 1_000, most_tokens=1)
        frontend.control.send(encode(Peers(frontend.life, 1_000, is_blamed=True)))
        trial.wait_until(lambda core: len(core.of_type(Submit)) == 1)
        assert_late(ask(frontend, [2], timeout_s=0.1))
        assert len(trial.of_type(Submit)) == 1
        trial.most_tokens = None
        assert_served(suspect, [1])
