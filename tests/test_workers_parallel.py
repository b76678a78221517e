"""Exchanges between ranks, with threads of one process in place of the group; and pool sizes."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvserve.protocol.config import Config, ModelFacts
from nvserve.protocol.progress import ProgressPage, read_page
from nvserve.workers.kv_cache import KvCache, available_memory_bytes, block_bytes, num_cpu_blocks
from nvserve.workers.models.config import Shard
from nvserve.workers.models.llama import read_llama
from nvserve.workers.parallel import TensorParallel
from nvserve.workers.step_result import ModelRefused


class Together:
    """all_gather for ranks that are threads: the last one to arrive hands out everyone's part."""

    def __init__(self, size: int) -> None:
        self.parts: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=30)

    def gather(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        self.parts[rank] = x.clone()
        self.barrier.wait()
        stacked = torch.stack(self.parts)
        self.barrier.wait()
        return stacked


def on_ranks(
    size: int, monkeypatch: pytest.MonkeyPatch, run: Callable[[TensorParallel], object]
) -> list[object]:
    """What `run` returns on each of `size` ranks."""
    together = Together(size)
    monkeypatch.setattr(TensorParallel, "all_gather", lambda s, x: together.gather(s.rank, x))
    results: list[object] = [None] * size

    def work(rank: int) -> None:
        results[rank] = run(TensorParallel(rank, size))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return results


VALUES = torch.tensor([[1.0, 5.0, -2.0, float("-inf")], [3.0, 5.0, -1.0, float("-inf")]])
IDS = torch.tensor([[10, 20, 30, 40], [110, 120, 130, 140]])


def test_the_best_value_wins_and_ties_go_to_the_lowest_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = on_ranks(
        2, monkeypatch, lambda p: [t.tolist() for t in p.best(VALUES[p.rank], IDS[p.rank])]
    )
    assert results == [[[3.0, 5.0, -1.0, float("-inf")], [110, 20, 130, 40]]] * 2


def test_a_nan_on_any_rank_shows_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.tensor([[1.0, float("nan")], [float("nan"), 2.0]])
    results = on_ranks(
        2, monkeypatch, lambda p: p.best(values[p.rank], IDS[p.rank, :2])[0].isnan().tolist()
    )
    assert results == [[True, True]] * 2


def test_sums_add_in_rank_order_and_round_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = torch.tensor([[2.0**24], [1.0], [1.0], [-(2.0**24)]])
    results = on_ranks(4, monkeypatch, lambda p: p.all_reduce(parts[p.rank]).tolist())
    assert results == [[0.0]] * 4  # the exact sum is 2: any other order would show
    narrow = torch.tensor([[256.0], [1.0], [1.0], [1.0]]).bfloat16()
    results = on_ranks(4, monkeypatch, lambda p: p.all_reduce(narrow[p.rank]).tolist())
    assert results == [[260.0]] * 4  # 259 in float32; bfloat16 sums would stay at 256


def test_gathered_logits_lose_their_padding_and_are_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [torch.tensor([[0.0, 1.0], [10.0, 11.0]]), torch.tensor([[2.0, -1.0], [12.0, -1.0]])]
    results = on_ranks(2, monkeypatch, lambda p: p.gather_logits(shards[p.rank], 3).tolist())
    assert results == [[[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]] * 2
    own = torch.zeros(1, 3)
    TensorParallel().gather_logits(own, 3).add_(1.0)
    assert own.sum() == 0.0


def test_collectives_beat_the_page_also_for_a_single_rank(tmp_path: Path) -> None:
    page = ProgressPage(str(tmp_path / "page"))
    page.step = 17
    TensorParallel(page=page).all_reduce(torch.zeros(1))
    snapshot = read_page(str(tmp_path / "page"))
    assert snapshot is not None
    assert snapshot.step == 17


# -- the pool ------------------------------------------------------------------------------------


def make_config(**changes: int) -> Config:
    facts = ModelFacts("LlamaForCausalLM", 97, 2, 4, 4096)
    settings = {"max_model_len": 2048, "max_num_seqs": 64, **changes}
    return Config("m", facts, ["m"], **settings)  # type: ignore[arg-type]


SHARD = Shard(
    read_llama(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 97,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        }
    ),
    rank=1,
    size=2,
)


def test_block_bytes_are_the_memory_of_a_block() -> None:
    device, dtype = torch.device("cpu"), torch.bfloat16
    cache = KvCache(SHARD, num_blocks=5, block_size=16, device=device, dtype=dtype)
    total = sum(keys.nbytes + values.nbytes for keys, values in cache.layers)
    assert total == 5 * block_bytes(SHARD, 16, dtype)
    assert cache.layers[2][1].shape == (5, 16, 2, 8)
    assert cache.layers[2][1].is_contiguous()


def test_the_default_pool_serves_all_slots_with_a_thousand_tokens() -> None:
    assert num_cpu_blocks(make_config(), 1000, 10**12) == 64 * 1024 // 16 + 1
    assert num_cpu_blocks(make_config(max_num_seqs=1), 1000, 10**12) == 4 * 2048 // 16 + 1


def test_the_default_pool_stays_within_its_share_of_the_memory() -> None:
    assert num_cpu_blocks(make_config(), 1000, 4_000_000) == 1000 + 1
    assert num_cpu_blocks(make_config(tp_size=4), 1000, 4_000_000) == 250 + 1


def test_memory_too_small_for_one_request_is_refused_with_both_numbers() -> None:
    with pytest.raises(ModelRefused, match=r"only 100 KV blocks.*2048 needs 128"):
        num_cpu_blocks(make_config(), 1000, 400_000)


def test_available_memory_is_some_of_the_machine() -> None:
    fields = Path("/proc/meminfo").read_text().split()
    total = int(fields[fields.index("MemTotal:") + 1]) * 1024
    assert 0 < available_memory_bytes() < total
