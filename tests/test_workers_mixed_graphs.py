"""Mixed steps padded to their buckets, with a stand-in for CUDA that replays by calling."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from step_driver import Ask, StepDriver, greedy_reference, make_driver, save_model

from nvserve.protocol.messages import Chunks, pack_ids
from nvserve.workers.batch import ChunkArrays
from nvserve.workers.graphs import DecodeGraphs, GraphPool
from nvserve.workers.mixed_graphs import MAX_CHUNKS, MixedGraphs

NUM_NEW = 8
PROMPT_LENGTHS = [1, 3, 17, 40, 64, 5, 90, 2]


class Recorded:
    """Like a CUDA graph: fixed output memory, filled by every replay."""

    def __init__(self, function: Callable[[], torch.Tensor]) -> None:
        self._function = function
        self.output = torch.full((64,), -7, dtype=torch.int32)
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        ids = self._function()
        self.output[: len(ids)] = ids


class RecordingPool:
    """Captures without running, as CUDA does."""

    is_due = True

    def __init__(self) -> None:
        self.graphs: list[Recorded] = []

    def rehearse(self, function: Callable[[], object]) -> None:
        function()

    def capture(self, function: Callable[[], Any]) -> tuple[Recorded, torch.Tensor]:
        self.graphs.append(Recorded(function))
        return self.graphs[-1], self.graphs[-1].output


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]], list[Any]]:
    folder = tmp_path_factory.mktemp("model")
    reference = save_model(folder, "LlamaForCausalLM")
    prompts = [[(7 * i + 3 * n) % 97 for i in range(n)] for n in PROMPT_LENGTHS]
    return folder, prompts, [greedy_reference(reference, p, NUM_NEW) for p in prompts]


def padded_driver(folder: Path, launch_dir: Path) -> tuple[StepDriver, RecordingPool]:
    torch.set_num_threads(1)
    driver = make_driver(folder, launch_dir)
    runner, pool = driver.runner, RecordingPool()
    runner._mixed_graphs = MixedGraphs(
        cast(GraphPool, pool), runner.mixed_step, runner.batch, runner._staging
    )
    return driver, pool


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
def test_padded_steps_sample_what_unpadded_ones_do(
    model: tuple[Path, list[list[int]], list[Any]], tmp_path: Path, chunk_tokens: int
) -> None:
    folder, prompts, expected = model
    driver, pool = padded_driver(folder, tmp_path)
    asks = [Ask(prompt, NUM_NEW, start_step=i) for i, prompt in enumerate(prompts)]
    assert driver.generate(asks, chunk_tokens=chunk_tokens) == expected
    assert sum(graph.num_replays for graph in pool.graphs) >= len(prompts)
    assert not driver.runner.batch.lengths[driver.runner.batch.scratch]


def test_capturing_ahead_of_any_step_changes_no_request(
    model: tuple[Path, list[list[int]], list[Any]], tmp_path: Path
) -> None:
    folder, prompts, expected = model
    driver, pool = padded_driver(folder, tmp_path)
    graphs = driver.runner._mixed_graphs
    assert graphs is not None
    with torch.inference_mode():
        while graphs.capture_next():
            pass
    num_captured = len(pool.graphs)
    assert driver.generate([Ask(prompt, NUM_NEW) for prompt in prompts]) == expected
    assert len(pool.graphs) == num_captured, "every bucket was there"


class FullPool(RecordingPool):
    """Has no memory for any graph."""

    def capture(self, function: Callable[[], Any]) -> tuple[Recorded, torch.Tensor]:
        raise torch.OutOfMemoryError("no room for a graph")


def test_steps_go_on_without_the_graphs_that_could_not_be_captured(
    model: tuple[Path, list[list[int]], list[Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, prompts, expected = model
    torch.set_num_threads(1)
    runner = (driver := make_driver(folder, tmp_path)).runner
    pool, batch = cast(GraphPool, FullPool()), runner.batch
    functions = (runner.plain_step, runner.decode_forward)
    runner.graphs = DecodeGraphs(pool, *functions, batch.rows, batch.padding, len(prompts))
    runner._mixed_graphs = MixedGraphs(pool, runner.mixed_step, batch, runner._staging)
    asks = [Ask(prompt, NUM_NEW, start_step=i) for i, prompt in enumerate(prompts)]
    assert driver.generate(asks, chunk_tokens=7) == expected
    kinds = {record.message for record in caplog.records}
    assert kinds == {"steps of one kind go without a CUDA graph: no room for a graph"}
    while runner.capture_next():
        pass
    assert runner.graphs.num_captured == 0


def test_captures_write_to_no_block_but_scratch(
    model: tuple[Path, list[list[int]], list[Any]], tmp_path: Path
) -> None:
    """Rows of requests that ended are in the list until core's next step; their blocks are not."""
    folder, prompts, _ = model
    driver, pool = padded_driver(folder, tmp_path)
    runner, batch = driver.runner, driver.runner.batch
    driver.generate([Ask(prompt, NUM_NEW) for prompt in prompts])
    batch.rows[: len(prompts)] = torch.arange(len(prompts))
    assert (batch.lengths[: len(prompts)] > 0).all()
    functions = (runner.plain_step, runner.decode_forward)
    rows = (batch.rows, batch.padding)
    decode_graphs = DecodeGraphs(cast(GraphPool, pool), *functions, *rows, len(prompts))
    kept = [batch.lengths, batch.last_token, batch.block_table]
    kept += [part[1:] for layer in runner.cache.layers for part in layer]
    before = [tensor.clone() for tensor in kept]
    assert runner._mixed_graphs is not None
    with torch.inference_mode():
        for graphs in (decode_graphs, runner._mixed_graphs):
            while graphs.capture_next():
                pass
    batch.last_token[batch.scratch] = before[1][batch.scratch]  # scratch, too
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))


def test_padding_is_one_chunk_of_the_scratch_slot_and_empty_ones() -> None:
    chunks = Chunks([5, 2], [0, 8], [3, 2], pack_ids([1, 2, 3, 4, 5]), [False, True])
    padded = ChunkArrays.of(chunks).padded(9, 4, scratch=16)
    assert padded.tokens.tolist() == [1, 2, 3, 4, 5, 0, 0, 0, 0]
    assert padded.positions.tolist() == [0, 1, 2, 8, 9, 0, 1, 2, 3]
    assert padded.token_slots.tolist() == [5, 5, 5, 2, 2, 16, 16, 16, 16]
    assert padded.slots.tolist() == [5, 2, 16, 16]
    assert padded.ends.tolist() == [3, 10, 4, 0]
    assert padded.lengths.tolist() == [3, 10, 0, 0]
    assert padded.cu_seqlens.tolist() == [0, 3, 5, 9, 9]
    assert padded.sampling_slots.tolist() == [2, 16, 16, 16]
    assert padded.last_rows.tolist() == [4, 0, 0, 0]
    assert all(start % 2 == 0 for start in np.cumsum(padded.sizes()))


def test_a_step_without_a_bucket_is_left_to_the_eager_path(
    model: tuple[Path, list[list[int]], list[Any]], tmp_path: Path
) -> None:
    driver, _ = padded_driver(model[0], tmp_path)
    graphs = driver.runner._mixed_graphs
    assert graphs is not None
    many = MAX_CHUNKS
    crowd = Chunks(list(range(many)), [0] * many, [1] * many, bytes(4 * many), [True] * many)
    long = Chunks([0], [0], [129], bytes(4 * 129), [True])
    assert graphs.step(crowd, 0) is None
    assert graphs.step(long, 0) is None
