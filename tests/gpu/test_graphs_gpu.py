"""Graphs against eager steps on a GPU, block by block; 16 bits against float32."""

from pathlib import Path

import pytest
import torch
from step_driver import NUM_BLOCKS, Ask, StepDriver, make_driver

from nvserve.kernels.dispatch import HAS_TRITON
from nvserve.protocol.messages import Chunks, NewRows, SchedulerOutput, TableChanges, pack_ids
from nvserve.protocol.sampling import SamplingParams
from nvserve.scripts.model_facts import DEMO_MODEL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CANARY = 77.0
BLOCK_SIZE = 4


def make(tmp_path: Path, dtype: str, *, is_eager: bool, captures_ahead: bool = True) -> StepDriver:
    folder = tmp_path / f"{dtype}-{is_eager}"
    folder.mkdir()
    changes: dict[str, object] = {"device": "cuda", "dtype": dtype, "enforce_eager": is_eager}
    driver = make_driver(DEMO_MODEL, folder, max_num_seqs=42, **changes)
    while captures_ahead and driver.runner.capture_next():
        pass
    return driver


def asks(batch: int) -> list[Ask]:
    """Greedy and random ones, of many lengths, which end at different steps."""
    sampling = [SamplingParams(temperature=t, ignore_eos=True) for t in (0.0, 0.8)]
    prompts = [[(5 * i + n) % 900 + 5 for i in range(1 + 5 * n % 23)] for n in range(batch)]
    return [Ask(p, 3 + n % 4, sampling[n % 2], seed=n) for n, p in enumerate(prompts)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_are_eager_steps_and_touch_only_blocks_of_their_rows(
    tmp_path: Path, dtype: str
) -> None:
    eager, graphs = (make(tmp_path, dtype, is_eager=is_eager) for is_eager in (True, False))
    for driver in (eager, graphs):
        driver._free.reverse()  # the last block of the pool comes first
        for keys, values in driver.runner.cache.layers:
            keys[1:], values[1:] = CANARY, CANARY
    num_used = 0
    for batch in [*range(17, 0, -1), 24, 25, 33, 40, 41, 3]:
        chosen = asks(batch)
        needed = sum(-(-(len(a.prompt) + a.num_new) // BLOCK_SIZE) for a in chosen)
        num_used = max(num_used, needed)
        ids = graphs.generate(chosen)
        if dtype == "float32":
            assert ids == eager.generate(chosen), f"batch {batch}"
        assert all(token >= 0 for tokens in ids for token in tokens)
    assert num_used < NUM_BLOCKS - 20
    for keys, values in graphs.runner.cache.layers:
        for pool in (keys, values):
            assert (pool[1 : NUM_BLOCKS - num_used] == CANARY).all(), "an unused block was written"
            assert (pool[-1] != CANARY).any(), "the last block was not used"


def test_graphs_captured_behind_steps_that_run_are_eager_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nvserve.workers.graphs.CAPTURE_EVERY_S", 0.0)
    eager = make(tmp_path, "float32", is_eager=True)
    graphs = make(tmp_path, "float32", is_eager=False, captures_ahead=False)
    assert graphs.runner.graphs is not None
    for batch in (40, 1, 17, 3, 24, 8, 33, 2):
        assert graphs.generate(asks(batch)) == eager.generate(asks(batch)), f"batch {batch}"
    assert graphs.runner.graphs.num_captured > 6


def last_logits(driver: StepDriver, prompt: list[int]) -> torch.Tensor:
    """Logits behind every token of a prompt, one chunk in slot 0; float32 [T, V]."""
    runner = driver.runner
    num_blocks = -(-len(prompt) // BLOCK_SIZE)
    tables = TableChanges([0], [0], [num_blocks], pack_ids(list(range(1, num_blocks + 1))))
    new = NewRows([0], [SamplingParams()], [0], [b""], [b""])
    with torch.inference_mode():
        runner._staging.begin()
        runner.batch.apply(SchedulerOutput(0, 0, new=new, tables=tables))
        chunks = Chunks([0], [0], [len(prompt)], pack_ids(prompt), [True])
        inputs = runner.batch.chunk_inputs(runner.batch.upload_chunks(chunks))
        hidden = runner.model.forward(inputs, runner.cache, runner.backend)
        runner._staging.end()
        return runner.model.logits(hidden).float()


def test_16_bit_logits_are_close_to_float32(tmp_path: Path) -> None:
    exact, rounded = (make(tmp_path, dtype, is_eager=True) for dtype in ("float32", "bfloat16"))
    for length in (1, 2, 16, 33, 100):
        prompt = [(11 * i) % 900 + 5 for i in range(length)]
        expected = last_logits(exact, prompt)
        distance = (last_logits(rounded, prompt) - expected).abs().amax(dim=1)
        limit = 2e-2 * expected.abs().amax(dim=1)
        assert (distance <= limit).all(), f"length {length}: {(distance / limit).max():.2f}"


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_a_full_tail_has_its_kernels_before_the_first_request_needs_it(tmp_path: Path) -> None:
    from nvserve.kernels.sampling_select import _select_kernel
    from nvserve.kernels.sampling_triton import _scan_kernel

    driver = make(tmp_path, "bfloat16", is_eager=True)
    thread = driver.runner._full_tail
    assert thread is not None
    thread.join(60.0)
    assert not thread.is_alive()

    def num_compiled() -> list[int]:
        caches = [kernel.device_caches[0] for kernel in (_select_kernel, _scan_kernel)]
        return [len(cache[0]) for cache in caches]

    before = num_compiled()
    assert min(before) > 0
    nucleus = SamplingParams(temperature=0.8, top_p=0.9, ignore_eos=True)
    driver.generate([Ask([7 + n, 8], 3, nucleus, seed=n) for n in range(3)])
    assert num_compiled() == before
