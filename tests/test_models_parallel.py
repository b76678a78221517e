"""How far a model can be cut: every number of ranks gives the ids of one rank, or a refusal."""

from pathlib import Path

import pytest
from step_driver import Ask, Case, greedy_reference, run_ranks, save_model

from nvserve.workers.models.config import Shard, check_parallel
from nvserve.workers.models.llama import read_llama
from nvserve.workers.step_result import ModelRefused

FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "head_dim": 8,
}
PROMPTS = [[5, 6, 7], list(range(20)), [96, 0, 96, 1]]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size"),
    [(8, 1, 2), (8, 2, 2), (8, 4, 2), (8, 1, 4), (8, 2, 4), (8, 4, 4), (8, 8, 4), (6, 3, 3)],
)
def test_every_query_head_finds_its_kv_head_on_its_rank(
    num_heads: int, num_kv_heads: int, size: int
) -> None:
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    config = read_llama({**FIELDS, **heads})
    check_parallel(config, size)
    for rank in range(size):
        shard = Shard(config, rank, size)
        group = shard.num_heads // shard.num_kv_heads
        for head in range(shard.num_heads):
            global_head = rank * shard.num_heads + head
            kv_head = shard.first_kv_head + head // group
            assert kv_head == global_head // (num_heads // num_kv_heads)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "reason"),
    [
        (8, 4, 3, "--tp 3 cannot split 4 KV heads / 8 query heads"),
        (6, 6, 4, "--tp 4 cannot split 6 KV heads / 6 query heads"),
        (6, 3, 2, "--tp 2 cannot split 3 KV heads / 6 query heads"),
        (12, 6, 4, "--tp 4 cannot split 6 KV heads / 12 query heads"),
        (8, 3, 1, "num_key_value_heads 3 does not divide num_attention_heads 8"),
        (16, 16, 64, "--tp 64 cannot split 16 KV heads / 16 query heads"),
    ],
)
def test_sizes_that_do_not_fit_the_heads_are_refused(
    num_heads: int, num_kv_heads: int, size: int, reason: str
) -> None:
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    with pytest.raises(ModelRefused, match=reason):
        check_parallel(read_llama({**FIELDS, **heads}), size)


def test_a_size_that_does_not_divide_the_feed_forward_is_refused() -> None:
    fields = {**FIELDS, "num_attention_heads": 8, "intermediate_size": 97}
    with pytest.raises(ModelRefused, match="intermediate_size 97"):
        check_parallel(read_llama(fields), 2)


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 5, 8, 9, 97, 100])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_vocabulary_shards_cover_every_id_once(vocab_size: int, size: int) -> None:
    config = read_llama({**FIELDS, "vocab_size": vocab_size, "num_attention_heads": 8})
    shards = [Shard(config, rank, size) for rank in range(size)]
    covered = [shard.first_token_id + row for shard in shards for row in range(shard.num_token_ids)]
    assert covered == list(range(vocab_size))
    assert all(shard.num_token_ids <= shard.vocab_width for shard in shards)


@pytest.mark.parametrize(
    ("architecture", "num_kv_heads", "vocab_size", "size"),
    [
        ("LlamaForCausalLM", 1, 96, 2),  # one KV head on two ranks, and every bias
        ("Qwen2ForCausalLM", 2, 98, 4),  # replicated with biases, padded vocabulary
        ("Qwen3ForCausalLM", 4, 5, 4),  # a rank of padding only
    ],
)
def test_ranks_generate_what_transformers_does(
    tmp_path: Path, architecture: str, num_kv_heads: int, vocab_size: int, size: int
) -> None:
    changes: dict[str, object] = {"num_key_value_heads": num_kv_heads, "vocab_size": vocab_size}
    if architecture == "LlamaForCausalLM":
        changes |= {"attention_bias": True, "mlp_bias": True}
    if architecture == "Qwen3ForCausalLM":
        changes["head_dim"] = 16
    model = save_model(tmp_path / "model", architecture, **changes)
    prompts = [[token % vocab_size for token in prompt] for prompt in PROMPTS]
    cases = [Case([Ask(prompt, 10) for prompt in prompts], 7)]
    expected = [greedy_reference(model, prompt, 10) for prompt in prompts]
    assert run_ranks(tmp_path / "model", tmp_path, size, cases) == [expected]
