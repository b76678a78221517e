"""Where a completion's tokens lie in its text, whole and streamed: characters of several tokens."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from api.frontend_process import DEMO_MODEL, MODEL_NAME, FrontendProcess
from openai.types import CompletionChoice
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

TOKENIZER = Tokenizer.from_file(f"{DEMO_MODEL}/tokenizer.json")
TEXT = "a한글😀日本é…z"


@pytest.fixture
def client(shared: FrontendProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{shared.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def offsets_of(ids: list[int], *, skip_special: bool = True) -> list[int]:
    """What the text before each token is long, by the tokenizer itself."""
    texts = [
        TOKENIZER.decode(ids[:count], skip_special_tokens=skip_special) for count in range(len(ids))
    ]
    return [len(text.rstrip("\ufffd")) for text in texts]


@pytest.mark.parametrize("skip_special", [True, False])
def test_offsets_count_the_texts_characters(
    shared: FrontendProcess, client: openai.OpenAI, skip_special: bool
) -> None:
    assert shared.core is not None
    ids = TOKENIZER.encode(TEXT, add_special_tokens=False).ids
    shared.core.script = ids = [*ids[:4], 2, *ids[4:], 3, ids[-1]]
    more = {"skip_special_tokens": skip_special}
    whole = client.completions.create(
        model=MODEL_NAME, prompt="x", max_tokens=len(ids), logprobs=0, extra_body=more
    )
    columns = whole.choices[0].logprobs
    assert columns is not None
    assert columns.text_offset is not None
    assert columns.text_offset == offsets_of(ids, skip_special=skip_special)
    assert whole.choices[0].text[columns.text_offset[-1] :] == "z"
    streamed: list[int] = []
    for chunk in client.completions.create(
        model=MODEL_NAME, prompt="x", max_tokens=len(ids), logprobs=0, extra_body=more, stream=True
    ):
        assert chunk.choices[0].logprobs is not None
        streamed += chunk.choices[0].logprobs.text_offset or []
    assert streamed == columns.text_offset


def test_offsets_begin_behind_a_character_that_the_prompt_left_unfinished(
    shared: FrontendProcess,
) -> None:
    assert shared.core is not None
    first, *rest = TOKENIZER.encode("한", add_special_tokens=False).ids
    assert rest
    shared.core.script = [*rest, *TOKENIZER.encode("z", add_special_tokens=False).ids]
    body = {"prompt": [first], "max_tokens": len(rest) + 1, "logprobs": 0}
    status, answer = shared.post("/v1/completions", body)
    assert status == 200, answer
    assert answer["choices"][0]["text"] == "한z", json.dumps(answer)
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0] * len(rest) + [1]


def test_an_echo_of_ids_shows_special_tokens_as_the_output_does(shared: FrontendProcess) -> None:
    assert shared.core is not None
    ids = TOKENIZER.encode("<|user|>한<|end|>").ids
    shared.core.script = [2, 3]
    body = {"prompt": ids, "max_tokens": 2, "echo": True}
    for skip_special in (True, False):
        _, answer = shared.post("/v1/completions", body | {"skip_special_tokens": skip_special})
        expected = TOKENIZER.decode([*ids, 2, 3], skip_special_tokens=skip_special)
        assert answer["choices"][0]["text"] == expected
    _, answer = shared.post("/v1/completions", body | {"skip_special_tokens": False, "logprobs": 0})
    offsets = answer["choices"][0]["logprobs"]["text_offset"]
    assert offsets == offsets_of([*ids, 2, 3], skip_special=False)


@pytest.fixture(scope="module")
def of_words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FrontendProcess, Path]]:
    """A model whose decoder drops the space before the first word."""
    folder = tmp_path_factory.mktemp("words") / "model"
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    words = {word: index for index, word in enumerate(["<s>", "</s>", "▁a", "▁bc", "▁def"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="▁a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    process = FrontendProcess(model=str(folder))
    try:
        process.ready()
        process.new_core()
        yield process, path
    finally:
        process.close()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("skip_special", [False, True])
@pytest.mark.parametrize("prompt", [[0, 2, 3, 1, 4], "a bc def"])
def test_an_echos_offsets_count_a_space_that_only_the_first_word_loses(
    of_words: tuple[FrontendProcess, Path],
    prompt: list[int] | str,
    skip_special: bool,
    is_stream: bool,
) -> None:
    frontend, path = of_words
    tokenizer = Tokenizer.from_file(str(path))
    assert frontend.core is not None
    frontend.core.script = [3, 4]
    with openai.OpenAI(
        base_url=f"{frontend.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        more = {"skip_special_tokens": skip_special}
        text, tokens, offsets = "", [], []
        for choice in _choices(client, is_stream, prompt=prompt, extra_body=more):
            text += choice.text
            if choice.logprobs is not None:
                tokens += choice.logprobs.tokens or []
                offsets += choice.logprobs.text_offset or []
    is_hidden = skip_special or isinstance(prompt, str)
    ids = [*(prompt if isinstance(prompt, list) else tokenizer.encode(prompt).ids), 3, 4]
    assert text == tokenizer.decode(ids, skip_special_tokens=is_hidden)
    begun = [tokenizer.decode(ids[:k], skip_special_tokens=is_hidden) for k in range(len(ids))]
    assert offsets == list(map(len, begun))
    assert len(tokens) == len(ids)


def _choices(client: openai.OpenAI, is_stream: bool, **body: Any) -> Iterator[CompletionChoice]:
    """Of one completion with an echo and logprobs, whole or in chunks."""
    body |= {"model": MODEL_NAME, "echo": True, "logprobs": 0, "max_tokens": 2}
    if is_stream:
        for chunk in client.completions.create(**body, stream=True):
            yield from chunk.choices
    else:
        yield from client.completions.create(**body).choices
