"""What one request costs the loop: long work stops for others, and when its client hangs up."""

import asyncio
import contextlib
import gc
import json
from collections.abc import AsyncIterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from frontend_loop_rig import LIMIT_S, MAX_MODEL_LEN, Client, Served, run

from nvserve.frontend import http, id_texts, params, service, turns
from nvserve.frontend.schema import CompletionBody
from nvserve.protocol.control import Condition, State

IDS = [72, 101, 300, 33] * 2_500


class Waiting:
    """Who waits for a plan, however long."""

    def timeout_s(self) -> None:
        pass

    def check_client(self) -> None:
        pass


@pytest.fixture
def one_stride_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PIECE_S", 0.0)


@pytest.mark.usefixtures("one_stride_a_turn")
def test_others_run_between_pieces_of_a_long_text_of_ids(tmp_path: Path) -> None:
    async def story(served: Served) -> None:
        client = Client("/detokenize", {"tokens": IDS})
        num_turns = await served.answer(client)
        text = served.tokenizer.vocabulary.decode(IDS, skip_special=False)
        assert json.loads(client.answer) == {"prompt": text}
        assert num_turns >= len(IDS) // id_texts.STRIDE_IDS

    run(tmp_path, story)


@pytest.mark.usefixtures("one_stride_a_turn")
def test_an_echo_of_many_ids_is_given_up_when_its_client_has_gone(tmp_path: Path) -> None:
    """It is never submitted: without a core, it would wait for an answer."""

    async def story(served: Served) -> None:
        client = Client("/v1/completions", {"prompt": [IDS, IDS], "echo": True})
        await served.answer(client, lambda num: setattr(client, "is_gone", num > 10))
        assert client.answer == b""

    run(tmp_path, story)


async def drained(served: Served, client: Client, limit_s: float = LIMIT_S) -> bool:
    """Drain once the body was read; whether it has its answer, which comes, when that is over."""
    answering = asyncio.create_task(served.answer(client))
    async with asyncio.timeout(LIMIT_S):
        while not client.is_read:
            await asyncio.sleep(0)
        assert not client.answer
        await served.service.drain(limit_s)
        is_answered = bool(client.answer)
        await answering
    return is_answered


@pytest.mark.usefixtures("one_stride_a_turn")
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": [IDS, IDS], "echo": True}, 503),
        ("/v1/completions", {"prompt": "a b c " * 1000}, 503),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 3000}]}, 503),
        ("/tokenize", {"prompt": "a b c " * 1000}, 200),
        ("/detokenize", {"tokens": IDS}, 200),
    ],
    ids=["echo", "text", "chat", "tokenize", "detokenize"],
)
def test_a_drain_waits_for_what_is_being_planned(
    path: str, body: Any, status: int, tmp_path: Path
) -> None:
    async def story(served: Served) -> None:
        client = Client(path, body)
        assert await drained(served, client)
        assert client.status == status
        assert status == 200 or b"the server is shutting down" in client.answer

    run(tmp_path, story)


@pytest.mark.usefixtures("one_stride_a_turn")
def test_a_drain_ends_long_work_when_its_time_is_up(tmp_path: Path) -> None:
    async def story(served: Served) -> None:
        client = Client("/detokenize", {"tokens": IDS})
        await drained(served, client, limit_s=0.0)
        assert client.status == 503
        assert b"the server is shutting down" in client.answer

    run(tmp_path, story)


def test_a_request_that_the_end_of_a_failed_server_finds_is_told_of_the_failure(
    tmp_path: Path,
) -> None:
    async def story(served: Served) -> None:
        client = Client("/v1/completions", {"prompt": "x"})
        async with waiting_for_core(served, client):
            served.service.condition = Condition(State.FAILED, "no GPU is left")
        assert client.status == 503
        assert b"the server has failed: no GPU is left" in client.answer

    run(tmp_path, story)


def test_a_reader_that_takes_nothing_does_not_hold_up_the_loops_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StillReader(Client):
        async def send(self, message: MutableMapping[str, Any]) -> None:
            await asyncio.Event().wait()

    async def story(served: Served) -> None:
        client = StillReader("/v1/completions", {"prompt": "x"})
        is_cut = asyncio.Event()
        client.transport.abort = is_cut.set
        async with asyncio.timeout(LIMIT_S), waiting_for_core(served, client):
            pass
        assert is_cut.is_set()

    monkeypatch.setattr(http, "FAREWELL_LIMIT_S", 0.01)
    run(tmp_path, story)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_drain_ends_uploads(path: str, tmp_path: Path) -> None:
    async def story(served: Served) -> None:
        client = Client(path, {"prompt": "x"}, is_whole=False)
        assert await drained(served, client)
        assert client.status == 503
        assert b"the server is shutting down" in client.answer
        late = Client(path, {"prompt": "x"}, is_whole=False)
        await served.answer(late)
        assert (late.status, late.is_read) == (503, False)

    run(tmp_path, story)


@pytest.mark.parametrize("is_drained", [False, True], ids=["client gone", "drained"])
def test_prompts_are_encoded_as_long_as_they_have_a_future(
    is_drained: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(served: Served) -> None:
        client = Client("/v1/completions", {"prompt": ["a b c"] * 100})
        encode, groups = served.tokenizer.encode, []

        async def end(texts: list[str], **options: Any) -> list[list[int]]:
            groups.append(texts)
            client.is_gone = len(groups) == 2 and not is_drained
            served.service.is_draining = len(groups) == 2 and is_drained
            return await encode(texts, **options)

        monkeypatch.setattr(served.tokenizer, "encode", end)
        await served.answer(client)
        assert client.status == (503 if is_drained else 0)
        assert len(groups) == 2

    monkeypatch.setattr(service, "GROUP_CHARS", 10)
    run(tmp_path, story)


@pytest.mark.usefixtures("one_stride_a_turn")
def test_others_run_between_long_prompts_of_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So its client is found gone before all are packed."""
    num_prompts = 50

    async def story(served: Served) -> None:
        client = Client("/v1/completions", {"prompt": [[7] * 100] * num_prompts})
        await served.answer(client, lambda num: setattr(client, "is_gone", num > num_prompts // 2))
        assert client.answer == b""  # and it was not submitted

    monkeypatch.setattr(service, "INLINE_IDS", 1000)
    run(tmp_path, story)


def test_bad_words_are_encoded_once_however_many_rooms_prompts_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, encoded = params._bad_words, []

    def count(words: Sequence[str], tokenizer: Any) -> list[list[int]]:
        encoded.append(words)
        return encode(words, tokenizer)

    async def story(served: Served) -> None:
        prompts: Any = [[5] * (MAX_MODEL_LEN - room) for room in (3, 1, 2)]
        body = CompletionBody(prompt=prompts, bad_words=["king"])
        plan = await served.service.plan_completion(body, Waiting())
        assert [one.max_tokens for one in plan.sampling] == [3, 1, 2]
        assert encoded == [["king"]]

    monkeypatch.setattr(params, "_bad_words", count)
    run(tmp_path, story)


@contextlib.asynccontextmanager
async def waiting_for_core(served: Served, client: Client) -> AsyncIterator[None]:
    """While its request is submitted, and not answered."""
    answering = asyncio.create_task(served.answer(client))
    while not len(served.service.engine.journal) and not answering.done():
        await asyncio.sleep(0)
    try:
        yield
    finally:
        answering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await answering


def test_a_request_that_the_loops_end_finds_is_answered(tmp_path: Path) -> None:
    async def story(served: Served) -> None:
        client = Client("/v1/completions", {"prompt": "x"})
        async with waiting_for_core(served, client):
            pass  # its task is cancelled, as are those that a last drain could not end
        assert client.status == 503
        assert b"the server is shutting down" in client.answer

    run(tmp_path, story)


def test_a_request_that_waits_keeps_no_list_of_its_ids(tmp_path: Path) -> None:
    """Each garbage collection would look at every one of them."""
    num_ids = 3001

    async def story(served: Served) -> None:
        client = Client("/v1/completions", {"prompt": [7] * num_ids})
        async with waiting_for_core(served, client):
            [entry] = served.service.engine.journal
            assert len(entry.prompt) == 4 * num_ids
            lists = [one for one in gc.get_objects() if type(one) is list]
            assert not [one for one in lists if len(one) == num_ids]

    run(tmp_path, story)


def test_a_chat_that_waits_keeps_no_object_of_its_tools(tmp_path: Path) -> None:
    """As above: a request may have thousands."""
    schema = json.dumps({"type": "object", "properties": {"peculiar": {"enum": ["a", "b"]}}})

    async def story(served: Served) -> None:
        function = {"name": "f", "parameters": json.loads(schema)}
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
        }
        client = Client("/v1/chat/completions", body)
        del body, function
        async with waiting_for_core(served, client):
            [entry] = served.service.engine.journal
            assert "peculiar" in entry.sampling.grammar
            gc.collect()
            dicts = [one for one in gc.get_objects() if type(one) is dict]
            assert not [one for one in dicts if "peculiar" in one]

    run(tmp_path, story)
