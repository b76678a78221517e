"""The whole engine on a GPU: the demo model in float32 says what `transformers` says on a CPU."""

import random
from collections.abc import Iterator

import pytest
import torch
from reference import Reference, ReferenceModel
from tokenizers import Tokenizer

from nvserve.scripts.llm import LLM, SamplingParams
from nvserve.scripts.model_facts import DEMO_MODEL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_TOKENS = 40
WORDS = "king queen lord love death night crown sword heaven mother brother fool"


@pytest.fixture(scope="module")
def references() -> list[Reference]:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    chance, words = random.Random(0), WORDS.split()
    texts = [
        f"{chance.choice(words).upper()}:\nThe {' '.join(chance.sample(words, 5))}"
        for _ in range(200)
    ]
    prompts = [tokenizer.encode(text).ids for text in texts]
    return ReferenceModel(DEMO_MODEL).clear_references(prompts, NUM_TOKENS, frozenset(), 41)


@pytest.fixture(scope="module", params=["graphs", "eager"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    is_eager = request.param == "eager"
    with LLM(device="cuda", dtype="float32", enforce_eager=is_eager, num_kv_blocks=3000) as engine:
        yield engine


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def test_every_batch_size_gives_the_reference_ids(llm: LLM, references: list[Reference]) -> None:
    for batch in [*range(17, 0, -1), 24, 25, 33, 40, 41, 3]:
        chosen = references[:batch]
        answers = llm.generate([list(one.prompt) for one in chosen], params(NUM_TOKENS))
        ids = [tuple(answer.outputs[0].token_ids) for answer in answers]
        assert ids == [one.ids for one in chosen], f"batch {batch}"


def test_contexts_up_to_the_longest_agree_with_the_reference(llm: LLM) -> None:
    chance = random.Random(1)
    model = ReferenceModel(DEMO_MODEL)
    for length in (1, 15, 16, 17, 511, 4080):
        prompts = [[0, *(chance.randrange(5, 1000) for _ in range(length - 1))] for _ in range(8)]
        num_tokens = min(NUM_TOKENS, 4096 - length)
        [wanted] = model.clear_references(prompts, num_tokens, frozenset(), 1)
        [answer] = llm.generate([list(wanted.prompt)], params(num_tokens))
        assert tuple(answer.outputs[0].token_ids) == wanted.ids, f"context {length}"


def test_a_seeded_sample_is_the_same_alone_and_in_company(
    llm: LLM, references: list[Reference]
) -> None:
    seeded = SamplingParams(temperature=0.9, seed=7, max_tokens=30, ignore_eos=True)
    prompt = list(references[0].prompt)
    [alone] = llm.generate([prompt], seeded)
    company = [SamplingParams(temperature=1.3, max_tokens=30, ignore_eos=True) for _ in range(9)]
    crowd = llm.generate(
        [prompt, *(list(one.prompt) for one in references[1:10])], [seeded, *company]
    )
    assert crowd[0].outputs[0].token_ids == alone.outputs[0].token_ids
