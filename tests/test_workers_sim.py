"""The simulated device: tokens that follow from seed and position, steps that take their time."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvserve.protocol.config import Config, ModelFacts
from nvserve.protocol.control import StartEpoch
from nvserve.protocol.messages import Chunks, NewRows, SchedulerOutput, pack_ids, unpack_ids
from nvserve.protocol.progress import ProgressPage
from nvserve.protocol.sampling import SamplingParams
from nvserve.workers.sim import SimEngine
from nvserve.workers.step_result import ModelRefused, Pending

WARM, GREEDY = SamplingParams(), SamplingParams(0.0)
SOURCES = Path(__file__).parents[1] / ".src"


def make_engine(folder: Path, **changes: float) -> SimEngine:
    facts = ModelFacts("LlamaForCausalLM", 50, 1, 1, 4096, eos_token_ids=[2, 7])
    config = Config("m", facts, ["m"], device="sim", max_num_seqs=8, **changes)  # type: ignore[arg-type]
    engine = SimEngine(config, ProgressPage(str(folder / "page")))
    begin(engine)
    return engine


def begin(engine: SimEngine, num_kv_blocks: int = 100) -> int:
    start = StartEpoch(0, 1, 0, num_kv_blocks)
    return engine.begin(start, "", lambda s: None, lambda phase, done: None).num_kv_blocks


def tokens(pending: Pending) -> list[int]:
    deadline = time.monotonic() + 10
    while not pending.is_done():
        assert time.monotonic() < deadline
    return unpack_ids(pending.result().tokens)


def prefill(
    slot: int, prompt: list[int], seed: int, kind: SamplingParams = WARM
) -> SchedulerOutput:
    return SchedulerOutput(
        0,
        0,
        new=NewRows([slot], [kind], [seed], [b""], [b""]),
        chunks=Chunks([slot], [0], [len(prompt)], pack_ids(prompt), [True]),
    )


def generate(engine: SimEngine, slot: int, prompt: list[int], seed: int, num_new: int) -> list[int]:
    """One request alone, its slot freed at the end."""
    output = tokens(engine.launch(prefill(slot, prompt, seed)))
    output += tokens(engine.launch(SchedulerOutput(0, 1, joins=[slot])))
    while len(output) < num_new:
        output += tokens(engine.launch(SchedulerOutput(0, 2)))
    assert tokens(engine.launch(SchedulerOutput(0, 3, freed=[slot]))) == []
    return output


def test_tokens_do_not_depend_on_slot_or_replay(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    whole = generate(engine, 0, [1, 2, 3], seed=9, num_new=20)
    assert generate(engine, 5, [1, 2, 3], seed=9, num_new=20) == whole
    assert generate(engine, 1, [1, 2, 3, *whole[:8]], seed=9, num_new=12) == whole[8:]
    assert generate(engine, 1, [1, 2, 3], seed=10, num_new=20) != whole


def test_tokens_lie_in_the_vocabulary_and_never_end_a_request(tmp_path: Path) -> None:
    output = generate(make_engine(tmp_path), 0, [1], seed=1, num_new=2000)
    assert set(output) == set(range(50)) - {2, 7}


def test_greedy_requests_ignore_their_seed(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    first = tokens(engine.launch(prefill(0, [1, 2], 5, GREEDY)))
    assert tokens(engine.launch(prefill(1, [1, 2], 6, GREEDY))) == first


def test_rows_come_in_the_order_of_the_decode_list_then_the_chunks(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    expected = {seed: generate(engine, 0, [1, 2], seed=seed, num_new=3) for seed in (1, 2, 3)}
    tokens(engine.launch(prefill(4, [1, 2], seed=1)))
    tokens(engine.launch(prefill(3, [1, 2], seed=2)))
    assert tokens(engine.launch(SchedulerOutput(0, 2, joins=[4, 3]))) == [
        expected[1][1],
        expected[2][1],
    ]
    mixed = prefill(6, [1, 2], seed=3)
    assert tokens(engine.launch(mixed)) == [expected[1][2], expected[2][2], expected[3][0]]


def test_a_step_takes_its_fixed_time_and_its_tokens_time(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, sim_step_ms=20.0, sim_token_ms=5.0)
    began = time.monotonic()
    first = engine.launch(prefill(0, [1] * 4, seed=0))
    second = engine.launch(SchedulerOutput(0, 1, joins=[0]))
    assert not first.is_done()
    assert first.poll_ms() <= 40
    tokens(second)
    elapsed_ms = (time.monotonic() - began) * 1000
    assert elapsed_ms >= 65.0  # 20 + 4 * 5, then 20 + 5: one after the other
    assert first.result().forward_ms == 40.0


def test_the_pool_is_as_large_as_the_launcher_says_or_the_limits_want(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    assert begin(engine, 77) == 77
    assert begin(engine, 0) == 4 * 4096 // 16 + 1


def test_a_pool_that_holds_no_whole_request_is_refused() -> None:
    from nvserve.workers.pool_size import with_scratch

    facts = ModelFacts("LlamaForCausalLM", 50, 1, 1, 4096)
    config = Config("m", facts, ["m"], max_model_len=4096, block_size=16)
    assert with_scratch(config, 256) == 257
    with pytest.raises(ModelRefused, match=r"only 255 KV blocks fit in memory.*needs 256"):
        with_scratch(config, 255)


def test_neither_the_entry_nor_the_simulated_device_imports_torch() -> None:
    code = (
        "import sys, nvserve.workers.main, nvserve.workers.sim;"
        " sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    environment = {"PYTHONPATH": str(SOURCES), "PYTHONSAFEPATH": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
