"""`nvserve bench serve` as a command, against a small server of the test's own."""

import asyncio
import json
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from nvserve.scripts.bench.serve import serve

WAIT_S = 20


class FakeServer:
    """An OpenAI-like server in a thread; `bodies` are the completion requests it got."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.failures = 0  # answers with 503 still to give
        self._loop = asyncio.new_event_loop()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._is_up.wait(WAIT_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._is_up.set()
        async with server:
            await self._stop.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = int(head.lower().partition("content-length:")[2].split()[0])
                body = await reader.readexactly(length)
                writer.write(self._answer(head, body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client is done
        finally:
            writer.close()

    def _answer(self, head: str, body: bytes) -> bytes:
        if head.startswith("GET /v1/models "):
            content = json.dumps({"data": [{"id": "fake-model"}]})
            return f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n{content}".encode()
        if self.failures:
            self.failures -= 1
            return b"HTTP/1.1 503 Loading\r\nContent-Length: 0\r\n\r\n"
        self.heads.append(head)
        request = json.loads(body)
        self.bodies.append(request)
        count = request["max_tokens"]
        events = ['{"choices":[{"text":"x"}]}'] * count
        usage = {"prompt_tokens": len(request.get("prompt", [])), "completion_tokens": count}
        events += [json.dumps({"choices": [], "usage": usage}), "[DONE]"]
        stream = "".join(f"data: {event}\n\n" for event in events)
        kind = "Content-Type: text/event-stream\r\n"
        return f"HTTP/1.1 200 OK\r\n{kind}Content-Length: {len(stream)}\r\n\r\n{stream}".encode()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


def bench(url: str, *flags: str) -> Result:
    common = ["--base-url", url, "--num-prompts", "6", "--random-input-len", "4"]
    lengths = ["--random-output-len", "3", "--num-warmups", "0"]
    return CliRunner().invoke(serve, [*common, *lengths, *flags])


def test_a_run_writes_the_result_of_exactly_the_requests_it_sent(
    server: FakeServer, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "result.json"
    run = bench(server.url, "--output", str(path), "--save-detailed", "--temperature", "0.5")
    assert run.exit_code == 0, run.output
    result = json.loads(path.read_text())
    assert (result["model_id"], result["request_rate"]) == ("fake-model", "inf")
    assert (result["completed"], result["failed"], result["num_prompts"]) == (6, 0, 6)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (24, 18)
    assert result["generated_texts"] == ["xxx"] * 6
    assert len(server.bodies) == 7  # one to see that the server is there
    body = server.bodies[-1]
    assert (body["model"], body["max_tokens"], body["stream"]) == ("fake-model", 3, True)
    assert (body["ignore_eos"], body["temperature"]) == (True, 0.5)
    assert len(body["prompt"]) == 4
    assert "Successful requests:" in run.output


def test_a_sweep_holds_one_result_a_load_and_draws_them(server: FakeServer, tmp_path: Path) -> None:
    output, plot = tmp_path / "sweep.json", tmp_path / "sweep.svg"
    flags = ["--sweep", "1,2,4", "--sweep-over", "max-concurrency"]
    run = bench(server.url, *flags, "--output", str(output), "--plot", str(plot))
    assert run.exit_code == 0, run.output
    results = json.loads(output.read_text())["sweep"]
    assert [result["max_concurrency"] for result in results] == [1, 2, 4]
    assert [result["completed"] for result in results] == [6, 6, 6]
    assert ET.fromstring(plot.read_text()).tag.endswith("svg")


def test_no_prompt_is_sent_twice_or_the_server_would_know_its_beginning(server: FakeServer) -> None:
    run = bench(server.url, "--sweep", "1,1,2", "--sweep-over", "max-concurrency")
    assert run.exit_code == 0, run.output
    prompts = {tuple(body["prompt"]) for body in server.bodies}
    assert len(prompts) == len(server.bodies) == 3 * 6 + 1  # and one to see that it is there


def test_a_server_that_is_still_loading_is_waited_for(server: FakeServer) -> None:
    server.failures = 1
    run = bench(server.url)
    assert run.exit_code == 0, run.output
    assert server.failures == 0


def test_a_failed_request_makes_the_exit_status_non_zero_and_is_told(server: FakeServer) -> None:
    server.failures = 2
    run = bench(server.url, "--ready-check-timeout-sec", "0")
    assert run.exit_code == 1
    assert "the first request failed: HTTP 503" in run.output


def test_the_api_key_goes_into_the_request_and_not_into_the_result(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVSERVE_API_KEY", "very-secret")
    path = tmp_path / "result.json"
    run = bench(server.url, "--output", str(path))
    assert run.exit_code == 0, run.output
    assert all("Authorization: Bearer very-secret" in head for head in server.heads)
    assert "very-secret" not in path.read_text() + run.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--plot", "x.svg"], "needs --sweep"),
        (["--goodput", "itl:3"], "itl:3"),
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["--dataset-path", "x"], "needs --dataset-name"),
        (["--percentile-metrics", "speed"], "'speed' is none of"),
        (["--metric-percentiles", "101"], "at most 100"),
        (["--sweep", "1,fast"], "not a list of numbers"),
        (["--sweep", ","], "',' holds no number"),
        (["--request-rate", "0"], "must be positive"),
        (["--extra-body", "[]"], "must be a JSON object"),
        (["--base-url", "here"], "--base-url: 'here' is no http:// or https:// URL"),
        (["--base-url", "http://a..b"], "--base-url: 'http://a..b' is no URL"),
        (["--dataset-name", "custom", "--dataset-path", "/"], "--dataset-path: cannot read /"),
        (["--sweep", "1", "--request-rate", "2"], "--request-rate is what --sweep sets"),
        (["--sweep", "1.5", "--sweep-over", "max-concurrency"], "whole numbers"),
        (["--save-detailed"], "--save-detailed needs --output"),
        (["--result-dir", "x"], "--result-dir needs --save-result"),
    ],
)
def test_a_wrong_flag_is_one_clear_error(flags: list[str], message: str) -> None:
    run = bench("http://127.0.0.1:1", *flags)
    assert run.exit_code == 2
    assert message in run.output


def test_random_ids_for_a_chat_are_refused_before_any_request(server: FakeServer) -> None:
    run = bench(server.url, "--endpoint", "/v1/chat/completions")
    assert run.exit_code == 1
    assert "a chat takes text" in run.output
    assert server.bodies == []
