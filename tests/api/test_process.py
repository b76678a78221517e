"""The frontend as a child: how it starts, fails to start and leaves, and that it stays quick."""

import json
import os
import resource
import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from api.fake_core import EVENT_LIMIT_S
from api.frontend_process import FrontendProcess

from nvserve.protocol.codec import encode
from nvserve.protocol.control import Exit, Failed
from nvserve.protocol.messages import Hello
from nvserve.protocol.progress import Phase, page_path, read_page


def test_a_model_without_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    frontend = FrontendProcess(model=str(tmp_path))
    try:
        assert "tokenizer.json is missing" in frontend.expect(Failed).message
        assert frontend.exit_code() == 2
    finally:
        frontend.close()


def test_a_taken_zmq_port_is_one_clear_line() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    taken = context.socket(zmq.ROUTER)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    frontend = FrontendProcess(zmq_endpoint=f"tcp://127.0.0.1:{port}")
    try:
        message = frontend.expect(Failed).message
        assert (
            f"cannot open the ZMQ door at tcp://127.0.0.1:{port}: Address already in use" in message
        )
        assert frontend.exit_code() == 2
    finally:
        taken.close(linger=0)
        context.term()
        frontend.close()


def test_it_leaves_when_told_and_when_its_launcher_is_gone(frontend: FrontendProcess) -> None:
    frontend.control.send(encode(Exit()))
    assert frontend.exit_code() == 0
    orphan = FrontendProcess()
    orphan.ready()
    orphan.control.close()
    assert orphan.exit_code() == 1
    orphan.close()


def test_without_an_endpoint_there_is_no_zmq_door() -> None:
    frontend = FrontendProcess(zmq_endpoint="")
    try:
        assert frontend.ready().zmq_endpoint == ""
        sockets = [os.readlink(fd) for fd in Path(f"/proc/{frontend.process.pid}/fd").iterdir()]
        assert sockets
        assert frontend.get("/health")[0] == 200
    finally:
        frontend.close()


def test_the_progress_page_is_beaten_from_the_loop(shared: FrontendProcess) -> None:
    path = page_path(shared.launch_dir, "frontend", 0)
    shared.get("/health")
    first = page = read_page(path)
    assert first is not None
    deadline = time.monotonic() + EVENT_LIMIT_S
    while page is not None and page.time_s == first.time_s:
        assert page.phase is Phase.SERVING
        assert time.monotonic() < deadline, "it stands still"
        page = read_page(path)
    assert page is not None


@pytest.mark.parametrize("size", [200_000, 5_000_000])
def test_long_prompts_do_not_stop_the_others(shared: FrontendProcess, size: int) -> None:
    body = json.dumps({"prompt": "word " * (size // 5)}).encode()
    headers = {"content-type": "application/json"}

    def post() -> int:
        return shared.request("POST", "/v1/completions", body, headers)[0]

    def slowest() -> float:
        """Of the answers that others get meanwhile."""
        waits = [0.0]
        with ThreadPoolExecutor(8) as pool:
            futures = [pool.submit(post) for _ in range(8)]
            while not all(future.done() for future in futures):
                started = time.monotonic()
                assert shared.get("/health")[0] == 200
                waits.append(time.monotonic() - started)
            assert [future.result() for future in futures] == [400] * 8
        return max(waits)

    # What the frontend does is done in each round, what else runs on this machine is not.
    rounds = (slowest() for _ in range(5))
    assert any(wait_s < 0.5 for wait_s in rounds)


def test_it_takes_as_many_descriptors_as_it_may() -> None:
    """A shell's usual limit is less than a full queue of clients."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        frontend = FrontendProcess()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    try:
        frontend.ready()
        soft, hard = resource.prlimit(frontend.process.pid, resource.RLIMIT_NOFILE)
        assert soft == (min(65536, hard) if hard != resource.RLIM_INFINITY else 65536)
    finally:
        frontend.close()


def test_a_frontend_full_of_clients_has_room_for_another_core(frontend: FrontendProcess) -> None:
    """ZeroMQ would end it."""
    _, hard = resource.prlimit(frontend.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(frontend.process.pid, resource.RLIMIT_NOFILE, (128, hard))
    host, _, door = frontend.endpoint.removeprefix("tcp://").rpartition(":")
    with ExitStack() as stack:
        by_http = []
        for number in range(300):
            port = frontend.port if number % 2 else int(door)
            connection = socket.create_connection((host, port), timeout=EVENT_LIMIT_S)
            stack.callback(connection.close)
            by_http += [connection] if number % 2 else []
        answered = select.select(by_http, [], [], EVENT_LIMIT_S)[0]
        assert answered[0].recv(65536).startswith(b"HTTP/1.1 503 "), "it is not full"
        frontend.new_core().wait_until(lambda core: bool(core.of_type(Hello)))
    frontend.wait_connected()
    assert frontend.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


def test_nothing_stays_open_after_a_burst(shared: FrontendProcess) -> None:
    with ThreadPoolExecutor(16) as pool:
        bodies = [{"prompt": [number + 1], "n": 4} for number in range(64)]
        answers = list(pool.map(lambda body: shared.post("/v1/completions", body)[0], bodies))
    assert answers == [200] * 64
    shared.wait_metric("nvserve:frontend_open_requests", 0)
