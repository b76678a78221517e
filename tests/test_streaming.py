"""A stream that opens with the logprobs of a long prompt: in turns, and whole or not at all."""

import asyncio
import json
from array import array
from collections.abc import Callable, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from frontend_loop_rig import Client, Served, run

from nvserve.frontend import logprob_form, streaming, turns
from nvserve.frontend.errors import ApiError
from nvserve.frontend.listener import EmitExtras
from nvserve.protocol.messages import FinishReason, Logprobs

IDS = [72, 101, 300, 33] * 1_000
SPECIAL_IDS = [1, 2]
BODY = {"prompt": IDS, "echo": True, "logprobs": 1, "stream": True, "max_tokens": 1}


@pytest.fixture(autouse=True)
def one_stride_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PIECE_S", 0.0)


def scored(rows: range) -> Logprobs:
    return Logprobs(
        rows=list(rows),
        chosen=array("f", [-0.5] * len(rows)).tobytes(),
        num_tops=[1] * len(rows),
        top_ids=array("i", [5] * len(rows)).tobytes(),
        top_values=array("f", [-0.25] * len(rows)).tobytes(),
    )


class Core:
    """Takes each request, and has all of its output in the next turn of the loop.

    Or only the first token of it, with `finish` of NONE.
    """

    def __init__(
        self,
        served: Served,
        monkeypatch: pytest.MonkeyPatch,
        finish: FinishReason = FinishReason.LENGTH,
    ) -> None:
        self.listeners: list[Any] = []
        self.num_aborts = 0
        self._finish = finish
        monkeypatch.setattr(served.service.engine, "submit", self._submit)
        monkeypatch.setattr(served.service.engine, "abort", self._abort)

    def _submit(self, listener: Any, **_: Any) -> Any:
        self.listeners.append(listener)
        asyncio.get_running_loop().call_soon(self._begin, listener)
        return SimpleNamespace()

    def _begin(self, listener: Any) -> None:
        listener.on_accepted()
        extras = EmitExtras(0, scored(range(1)), scored(range(1, listener.num_prompt_tokens)))
        listener.on_tokens([7], self._finish, 0, extras)

    def _abort(self, entry: Any) -> None:
        self.num_aborts += 1


class StillReader(Client):
    """Takes the status line, and nothing else until it is cut."""

    def __init__(self) -> None:
        super().__init__("/v1/completions", BODY)
        self.is_waited_for = asyncio.Event()
        self._is_cut = asyncio.Event()
        self.transport.abort = self.cut

    def cut(self) -> None:
        self.is_gone = True
        self._is_cut.set()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            self.is_waited_for.set()
            await self._is_cut.wait()
        else:
            await super().send(message)


def stream(
    folder: Path, monkeypatch: pytest.MonkeyPatch, on_turn: Callable[[Served, Client], None]
) -> list[bytes]:
    """The events of BODY. `on_turn` is called each time others have the loop behind its status."""
    client = Client("/v1/completions", BODY)

    async def story(served: Served) -> None:
        def turn(_: int) -> None:
            if client.status:
                on_turn(served, client)

        Core(served, monkeypatch)
        await served.answer(client, turn)

    run(folder, story)
    assert client.status == 200
    return client.answer.split(b"\n\n")


def test_others_run_between_strides_of_an_echo_with_logprobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_turns = 0

    def count(served: Served, client: Client) -> None:
        nonlocal num_turns
        num_turns += 1

    opening, delta, done, rest = stream(tmp_path, monkeypatch, count)
    assert num_turns >= len(IDS) // logprob_form.STRIDE_TOKENS
    [choice] = json.loads(opening.removeprefix(b"data: "))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * (len(IDS) - 1)
    [choice] = json.loads(delta.removeprefix(b"data: "))["choices"]
    assert (choice["finish_reason"], len(choice["logprobs"]["tokens"])) == ("length", 1)
    assert (done, rest) == (b"data: [DONE]", b"")


def test_an_opening_that_a_drain_ends_is_an_error_event_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drains: list[asyncio.Task[None]] = []

    def drain(served: Served, client: Client) -> None:
        if not drains:
            drains.append(asyncio.create_task(served.service.drain(0.0)))

    error, done, rest = stream(tmp_path, monkeypatch, drain)
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "aborted"
    assert (done, rest) == (b"data: [DONE]", b"")


def test_an_opening_is_given_up_when_its_client_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(served: Served, client: Client) -> None:
        client.is_gone = True

    assert stream(tmp_path, monkeypatch, leave) == [b""]


def test_an_echo_that_has_no_text_is_streamed_with_its_logprobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = BODY | {"prompt": SPECIAL_IDS}
    streamed = Client("/v1/completions", body)
    whole = Client("/v1/completions", body | {"stream": False})

    async def story(served: Served) -> None:
        Core(served, monkeypatch)
        for client in (streamed, whole):
            await served.answer(client)

    run(tmp_path, story)
    *events, _, _ = streamed.answer.split(b"\n\n")
    parts = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    [choice] = json.loads(whole.answer)["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(SPECIAL_IDS) + 1
    assert "".join(part["text"] for part in parts) == choice["text"]
    for name, column in choice["logprobs"].items():
        assert [one for part in parts for one in part["logprobs"][name]] == column


def test_a_reader_that_takes_no_opening_is_cut_when_too_much_is_held_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "MAX_HELD_BYTES", 10_000)

    async def story(served: Served) -> None:
        reader = StillReader()
        core = Core(served, monkeypatch, FinishReason.NONE)
        answering = asyncio.create_task(served.answer(reader))
        await reader.is_waited_for.wait()
        assert len(reader.answer) == 0
        extras = EmitExtras(0, scored(range(1)), None)
        num_tokens = 0
        while not reader.is_gone and num_tokens < 1000:
            core.listeners[0].on_tokens([7], FinishReason.NONE, 0, extras)
            num_tokens += 1
        assert reader.is_gone
        assert num_tokens > 10
        assert core.num_aborts == 1
        await answering

    run(tmp_path, story)


def test_core_is_told_of_a_failed_opening_while_its_reader_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(served: Served) -> None:
        reader = StillReader()
        core = Core(served, monkeypatch, FinishReason.NONE)

        def fail(_: int) -> None:
            if reader.status:
                served.service.turns.end(ApiError(503, "the long work of others"))

        answering = asyncio.create_task(served.answer(reader, fail))
        await reader.is_waited_for.wait()
        assert b"the long work of others" in reader.answer
        assert core.num_aborts == 1
        reader.cut()
        await answering

    run(tmp_path, story)
