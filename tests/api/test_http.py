"""The HTTP API of the real frontend process, driven by the official client."""

import asyncio
import json
import time
from collections.abc import Iterator

import openai
import pytest
from api.fake_core import EOS, FakeCore, busy, tokens_of
from api.frontend_process import DEMO_MODEL, LABEL, MODEL_NAME, FrontendProcess
from openai.types.chat import ChatCompletionMessageParam
from tokenizers import Tokenizer

from nvserve.protocol.control import State
from nvserve.protocol.messages import Finish, FinishReason, RefusalKind, Submit, unpack_ids

TOKENIZER = Tokenizer.from_file(f"{DEMO_MODEL}/tokenizer.json")
PROMPT = "To be, or not"
CHAT: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Who is there?"}]


def text_of(prompt: str, count: int) -> str:
    return TOKENIZER.decode(tokens_of(TOKENIZER.encode(prompt).ids, count))


@pytest.fixture
def client(frontend: FrontendProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{frontend.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def test_a_completion_has_text_usage_and_reason(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=9, temperature=0)
    assert answer.choices[0].text == text_of(PROMPT, 9)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    num_prompt = len(TOKENIZER.encode(PROMPT).ids)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, 9)


def test_a_stream_equals_the_whole_answer_and_reports_usage_once(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL_NAME,
        prompt=PROMPT,
        max_tokens=9,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks[:-1]) == text_of(PROMPT, 9)
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * 8 + ["length"]
    assert [c.usage is None for c in chunks] == [True] * 9 + [False]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {}])
def test_no_usage_comes_unasked(frontend: FrontendProcess, options: object) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2, "stream": True, "stream_options": options}
    headers = {"content-type": "application/json"}
    status, answer = frontend.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
    assert status == 200
    assert b"usage" not in answer
    assert answer.endswith(b"data: [DONE]\n\n")


def test_chat_renders_the_template_and_streams_a_role_first(
    client: openai.OpenAI, core: FakeCore
) -> None:
    whole = client.chat.completions.create(
        model=MODEL_NAME,
        messages=CHAT,
        max_tokens=5,
        temperature=0,
    )
    (submit,) = core.of_type(Submit)
    rendered = "<|begin|><|user|>Who is there?<|end|><|assistant|>"
    assert unpack_ids(submit.prompt) == TOKENIZER.encode(rendered, add_special_tokens=False).ids
    assert whole.choices[0].message.role == "assistant"
    chunks = list(
        client.chat.completions.create(
            model=MODEL_NAME,
            messages=CHAT,
            max_tokens=5,
            temperature=0,
            stream=True,
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_chat_takes_the_rest_of_the_context_by_default(
    client: openai.OpenAI, core: FakeCore
) -> None:
    core.script = []
    client.chat.completions.create(model=MODEL_NAME, messages=CHAT)
    (submit,) = core.of_type(Submit)
    assert submit.sampling.max_tokens == 512 - len(submit.prompt) // 4


def test_async_streams_run_side_by_side(frontend: FrontendProcess) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(
            model=MODEL_NAME, prompt=f"{PROMPT} {number}", max_tokens=20, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{frontend.url}/v1", api_key="none", max_retries=0, timeout=60
        ) as client:
            return await asyncio.gather(*(one(client, number) for number in range(32)))

    texts = asyncio.run(all_of_them())
    assert texts == [text_of(f"{PROMPT} {number}", 20) for number in range(32)]


def test_n_choices_have_seeds_of_their_own_and_one_prompt_count(
    client: openai.OpenAI, core: FakeCore
) -> None:
    answer = client.completions.create(
        model=MODEL_NAME, prompt=[PROMPT, "Who"], max_tokens=4, n=3, seed=-5, temperature=1.0
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    submits = core.of_type(Submit)
    assert len({submit.seed for submit in submits[:3]}) == 3
    assert [s.seed for s in submits[:3]] == [s.seed for s in submits[3:]]
    for choice, submit in zip(answer.choices, submits, strict=True):
        expected = tokens_of(unpack_ids(submit.prompt), 4, submit.seed)
        assert choice.text == TOKENIZER.decode(expected)
    assert answer.usage is not None
    prompts = [len(TOKENIZER.encode(text).ids) for text in (PROMPT, "Who")]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (sum(prompts), 24)


def test_a_stop_string_across_tokens_ends_the_stream_and_tells_core(
    client: openai.OpenAI, core: FakeCore
) -> None:
    core.script = TOKENIZER.encode("ABCDEFGHIJ and more", add_special_tokens=False).ids
    core.most_tokens = len(core.script)  # the end is not for core to find
    chunks = list(
        client.completions.create(
            model=MODEL_NAME, prompt=PROMPT, max_tokens=20, stop=["DEFGHIJ"], stream=True
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == "ABC"
    assert chunks[-1].choices[0].finish_reason == "stop"
    core.wait_until(lambda core: bool(core.of_type(Finish)))
    assert not core.running


def test_an_unfinished_stop_string_is_released_at_the_end(
    client: openai.OpenAI, core: FakeCore
) -> None:
    core.script = TOKENIZER.encode("ABCDEF", add_special_tokens=False).ids
    answer = client.completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=20, stop="DEFG")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ABCDEF", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(core.script) + 1  # EOS counts, unseen


def test_echo_repeats_the_prompt_in_both_forms(client: openai.OpenAI) -> None:
    whole = client.completions.create(
        model=MODEL_NAME, prompt=PROMPT, max_tokens=3, temperature=0, echo=True
    )
    stream = client.completions.create(
        model=MODEL_NAME, prompt=PROMPT, max_tokens=3, temperature=0, echo=True, stream=True
    )
    expected = PROMPT + text_of(PROMPT, 3)
    assert whole.choices[0].text == expected
    assert "".join(chunk.choices[0].text for chunk in stream) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_zero_echoes_without_asking_core(
    frontend: FrontendProcess, core: FakeCore, stream: bool
) -> None:
    body = {"prompt": "a b c", "echo": True, "max_tokens": 0, "stream": stream}
    raw = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    status, answer = frontend.request("POST", "/v1/completions", raw, headers)
    assert status == 200
    assert b'"text":"a b c"' in answer
    assert b'"finish_reason":"length"' in answer
    assert not core.of_type(Submit)


def test_logprobs_come_in_both_forms(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL_NAME,
        messages=CHAT,
        max_tokens=2,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(len(t.top_logprobs), t.logprob) for t in logprobs.content] == [(2, -0.5)] * 2
    plain = client.completions.create(
        model=MODEL_NAME, prompt=PROMPT, max_tokens=2, logprobs=2, temperature=0
    )
    columns = plain.choices[0].logprobs
    assert columns is not None
    assert columns.token_logprobs == [-0.5, -0.5]
    assert columns.tokens is not None
    assert "".join(columns.tokens) == plain.choices[0].text
    assert columns.text_offset == [0, len(columns.tokens[0])]


def test_token_ids_are_returned_when_asked_for(frontend: FrontendProcess) -> None:
    body = {"prompt": [9, 8, 7], "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    _, answer = frontend.post("/v1/completions", body)
    assert answer["choices"][0]["token_ids"] == tokens_of([9, 8, 7], 3)
    assert answer["choices"][0]["prompt_token_ids"] == [9, 8, 7]


@pytest.mark.parametrize(
    ("kind", "status"),
    [(RefusalKind.INVALID, 400), (RefusalKind.BUSY, 429), (RefusalKind.DRAINING, 503)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_core_is_the_status_of_the_response(
    frontend: FrontendProcess, core: FakeCore, kind: RefusalKind, status: int, stream: bool
) -> None:
    core.refusal = busy(kind, "r7 needs 17 blocks, the pool has 16", 2.0)
    got, answer = frontend.post("/v1/completions", {"prompt": "x", "stream": stream})
    assert got == status
    assert answer["error"]["message"] == "r7 needs 17 blocks, the pool has 16"
    assert (frontend.last_headers["retry-after"] == "2") == (status != 400)


@pytest.mark.parametrize(
    ("finish", "status", "code"),
    [
        (FinishReason.DEADLINE, 504, "deadline_exceeded"),
        (FinishReason.ENGINE_FAULT, 500, "engine_fault"),
        (FinishReason.ABORT, 503, "aborted"),
    ],
)
def test_a_request_that_core_ends_is_an_error_in_both_forms(
    frontend: FrontendProcess, core: FakeCore, finish: FinishReason, status: int, code: str
) -> None:
    core.finish_with = finish
    got, answer = frontend.post("/v1/completions", {"prompt": "x"})
    assert (got, answer["error"]["code"]) == (status, code)
    with (
        openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.APIError) as caught,
    ):
        list(client.completions.create(model=MODEL_NAME, prompt="x", stream=True))
    assert caught.value.code == code


def test_a_grammar_that_cannot_go_on_is_the_clients_error(
    frontend: FrontendProcess, core: FakeCore
) -> None:
    core.finish_with = FinishReason.GRAMMAR
    for fields, param in (
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ):
        got, answer = frontend.post("/v1/completions", {"prompt": "x", **fields})
        assert (got, answer["error"]["code"]) == (400, "grammar_error")
        assert answer["error"]["param"] == param
        with (
            openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0) as client,
            pytest.raises(openai.APIError) as caught,
        ):
            list(
                client.completions.create(
                    model=MODEL_NAME, prompt="x", stream=True, extra_body=fields
                )
            )
        assert (caught.value.code, caught.value.param) == ("grammar_error", param)


def test_health_and_ready_tell_the_launchers_state(frontend: FrontendProcess) -> None:
    frontend.wait_connected()
    assert json.loads(frontend.get("/health")[1]) == {"status": "ok", "reason": ""}
    frontend.tell(State.RECOVERING, "worker 1 died")
    status, body = frontend.get("/ready")
    assert (status, json.loads(body)["reason"]) == (503, "worker 1 died")
    assert json.loads(frontend.get("/health")[1])["status"] == "recovering"
    frontend.tell(State.FAILED, "too many restarts")
    assert frontend.get("/health")[0] == 503
    status, answer = frontend.post("/v1/completions", {"prompt": "x"})
    assert status == 503
    assert "too many restarts" in answer["error"]["message"]


def test_ready_knows_of_a_step_as_soon_as_its_tokens_are_there(
    frontend: FrontendProcess, client: openai.OpenAI
) -> None:
    """However rare the statistics of core are, and whoever dies next."""
    frontend.wait_connected()
    begun = time.monotonic()
    client.completions.create(model=MODEL_NAME, prompt=[1, 2], max_tokens=2)
    frontend.tell(State.RECOVERING, "worker 1 died")
    status, body = frontend.get("/ready")
    assert status == 503
    assert 0.0 <= json.loads(body)["last_step_age_s"] <= time.monotonic() - begun + 0.001


def test_the_age_of_a_step_is_never_negative(frontend: FrontendProcess, core: FakeCore) -> None:
    """The wall clock was set back behind it."""
    frontend.wait_connected()
    core.stats_changes = {"last_step_time": time.time() + 3600.0, "num_blocks": 1001}
    frontend.wait_metric("nvserve:num_kv_blocks", 1001)
    assert json.loads(frontend.get("/ready")[1])["last_step_age_s"] == 0.0
    frontend.wait_metric("nvserve:last_step_age_seconds", 0)


def test_models_and_tokens(frontend: FrontendProcess, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL_NAME]
    assert client.models.retrieve(MODEL_NAME).id == MODEL_NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")
    _, tokens = frontend.post("/tokenize", {"prompt": PROMPT})
    assert tokens["tokens"] == TOKENIZER.encode(PROMPT).ids
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 512)
    _, text = frontend.post("/detokenize", {"tokens": tokens["tokens"]})
    assert text == {"prompt": "<|begin|>" + PROMPT}
    _, chat = frontend.post("/tokenize", {"messages": CHAT, "add_generation_prompt": False})
    assert chat["tokens"][-1] == EOS


def test_metrics_count_requests() -> None:
    frontend = FrontendProcess()
    try:
        frontend.ready()
        frontend.new_core()
        frontend.post("/v1/completions", {"prompt": "x", "max_tokens": 3})
        lines = frontend.get("/metrics")[1].decode().splitlines()
    finally:
        frontend.close()
    assert f"nvserve:request_generation_tokens_sum{LABEL} 3.0" in lines
    assert f"nvserve:time_to_first_token_seconds_count{LABEL} 1.0" in lines
    assert f"nvserve:inter_token_latency_seconds_count{LABEL} 2.0" in lines
    assert any(line.startswith("nvserve:worker_restarts_total") for line in lines)


def test_unknown_paths_and_methods_have_openai_errors(frontend: FrontendProcess) -> None:
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/", 404),
    ):
        got, body = frontend.request(method, path)
        assert got == status
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_the_request_id_is_echoed_only_when_it_is_sane(frontend: FrontendProcess) -> None:
    frontend.request("GET", "/health", headers={"x-request-id": "abc-1"})
    assert frontend.last_headers["x-request-id"] == "abc-1"
    frontend.request("GET", "/health", headers={"x-request-id": "x" * 500})
    assert len(frontend.last_headers["x-request-id"]) == 32
