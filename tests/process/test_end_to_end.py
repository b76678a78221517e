"""Real launches on the demo model: every way of cutting the work says what `transformers` says."""

import asyncio
import random
import urllib.request
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from process.server import Server, served, wait_for
from reference import Reference, ReferenceModel
from tokenizers import Tokenizer

from nvserve.scripts.model_facts import DEMO_MODEL

NUM_TOKENS = 32
WORDS = "king queen lord love death night crown sword heaven mother brother fool honest friend"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def references(tokenizer: Tokenizer) -> list[Reference]:
    """64 different prompts; their beginnings are shared by some, so that prefixes hit."""
    chance, words = random.Random(0), WORDS.split()
    prompts = []
    for index in range(110):
        begin = "KING RICHARD III:\nMy lords, before I speak of war and of the crown,\n"
        text = f"The {' '.join(chance.sample(words, 6))}"
        prompts.append(tokenizer.encode((begin if index % 2 else "") + text).ids)
    return ReferenceModel(DEMO_MODEL).clear_references(prompts, NUM_TOKENS, frozenset(), 64)


@dataclass
class Answer:
    """What one client got."""

    ids: list[int]
    text: str
    usage: Any
    finish_reason: str | None


async def _stream(client: openai.AsyncOpenAI, prompt: list[int], num_tokens: int) -> Answer:
    answer = Answer([], "", None, None)
    stream = await client.completions.create(
        model="demo",
        prompt=prompt,
        max_tokens=num_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    async for chunk in stream:
        if chunk.usage is not None:
            answer.usage = chunk.usage
        for choice in chunk.choices:
            answer.text += choice.text
            answer.ids += (choice.model_extra or {}).get("token_ids") or []
            answer.finish_reason = choice.finish_reason or answer.finish_reason
    return answer


def ask_all(url: str, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[Answer]:
    """All prompts at once, each in a stream of its own, by the official client."""

    async def run() -> list[Answer]:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=240, max_retries=0
        ) as client:
            return await asyncio.gather(
                *(_stream(client, prompt, num_tokens) for prompt in prompts)
            )

    return asyncio.run(run())


def metrics(url: str) -> dict[str, float]:
    """The samples of /metrics, labels summed up."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    totals: dict[str, float] = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = name.split("{")[0]
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def check(answers: list[Answer], references: list[Reference], tokenizer: Tokenizer) -> None:
    for answer, reference in zip(answers, references, strict=True):
        assert tuple(answer.ids) == reference.ids
        assert answer.text == tokenizer.decode(list(reference.ids))
        assert answer.finish_reason == "length"
        assert answer.usage.completion_tokens == NUM_TOKENS
        assert answer.usage.prompt_tokens == len(reference.prompt)


@pytest.mark.parametrize(
    "flags",
    [
        ["--tp", "1"],
        ["--tp", "2", "--max-num-batched-tokens", "7", "--max-num-seqs", "6"],
        ["--tp", "4", "--max-num-batched-tokens", "16", "--no-enable-prefix-caching"],
        ["--tp", "1", "--max-num-batched-tokens", "1", "--max-num-seqs", "1"],
    ],
    ids=lambda flags: " ".join(flags),
)
def test_sixteen_streams_equal_their_references(
    flags: list[str], references: list[Reference], tokenizer: Tokenizer
) -> None:
    with served(Server.launch("--spares", "0", *flags)) as server:
        url = server.wait_ready()
        for batch in (16, 1, 5):
            chosen = references[:batch]
            check(ask_all(url, [list(one.prompt) for one in chosen]), chosen, tokenizer)


def test_a_pool_so_small_that_requests_keep_being_preempted_changes_no_answer(
    tokenizer: Tokenizer,
) -> None:
    words = WORDS.split()
    prompts = [tokenizer.encode(f"{one} and {other}").ids for one in words for other in words]
    num_tokens, num_requests = 120, 12
    flags = ["--max-model-len", "144", "--num-kv-blocks", "18", "--block-size", "8"]
    with served(Server.launch("--spares", "0", *flags)) as server:
        references = ReferenceModel(DEMO_MODEL).clear_references(
            prompts, num_tokens, frozenset(), num_requests
        )
        url = server.wait_ready()
        num_preemptions = 0.0
        for _ in range(4):  # how often who is preempted hangs on the order of arrival
            answers = ask_all(url, [list(one.prompt) for one in references], num_tokens)
            assert [tuple(answer.ids) for answer in answers] == [one.ids for one in references]
            after = wait_for("stats", lambda: _settled(url))
            num_preemptions = after["nvserve:num_preemptions_total"]
            if num_preemptions >= 2 * num_requests:
                break
        assert num_preemptions >= 2 * num_requests, f"only {num_preemptions} preemptions"


def _settled(url: str) -> dict[str, float] | None:
    """The metrics once nothing runs."""
    found = metrics(url)
    is_idle = found["nvserve:num_requests_running"] == 0 == found["nvserve:num_requests_waiting"]
    return found if is_idle and found["nvserve:kv_cache_usage_perc"] == 0 else None


def test_64_streams_and_a_client_that_leaves(
    references: list[Reference], tokenizer: Tokenizer
) -> None:
    with served(Server.launch("--spares", "0", "--tp", "2")) as server:
        url = server.wait_ready()
        check(ask_all(url, [list(one.prompt) for one in references]), references, tokenizer)
        before = wait_for("stats", lambda: _settled(url))["nvserve:generation_tokens_total"]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0)
        stream = client.completions.create(
            model="demo",
            prompt="To be",
            max_tokens=4000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        wait_for("running", lambda: metrics(url)["nvserve:kv_cache_usage_perc"] > 0)
        stream.close()
        after = wait_for("blocks back", lambda: _settled(url))
        assert after["nvserve:generation_tokens_total"] < before + 4000, "it ran to its end"
        client.close()
