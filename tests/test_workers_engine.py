"""What an engine does around its steps: positions at the end, memory that is still read, graphs."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from step_driver import Ask, begin_epoch, greedy_reference, make_engine, save_model

from nvserve.kernels.attention import select_backend
from nvserve.protocol.control import StartEpoch
from nvserve.workers import loader
from nvserve.workers.engine import TorchEngine
from nvserve.workers.runner import Runner
from nvserve.workers.step_result import ModelRefused

CPU = torch.device("cpu")
LIMIT_S = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    return folder, save_model(folder, "LlamaForCausalLM")


@pytest.mark.parametrize("max_model_len", [2, 10, 16, 17])
def test_the_longest_context_may_end_inside_a_block(
    max_model_len: int, model: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, reference = model
    changes = {"max_model_len": max_model_len, "max_num_batched_tokens": 256, "block_size": 16}
    driver = begin_epoch(make_engine(folder, tmp_path, **changes), tmp_path)
    count = max_model_len - 1
    assert driver.generate([Ask([5], count)]) == [greedy_reference(reference, [5], count)]


def test_steps_come_after_the_warm_up_has_left_the_device(
    model: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its staged copies are in the memory that the steps' copies take."""
    events: list[str] = []
    is_done = iter([True, False, False, True])  # first: before the epoch

    def look(_: TorchEngine) -> bool:
        events.append("look")
        return next(is_done)

    warm_up = Runner.warm_up

    def note(runner: Runner, num_tokens: int) -> None:
        events.append("warm-up")
        warm_up(runner, num_tokens)

    monkeypatch.setattr(TorchEngine, "_is_device_done", look)
    monkeypatch.setattr(Runner, "warm_up", note)
    engine = make_engine(model[0], tmp_path)
    start = StartEpoch(0, 1, 0, num_kv_blocks=50)
    engine.begin(start, str(tmp_path), lambda _: events.append("wait"), lambda *_: None)
    assert events == ["look", "warm-up", "look", "wait", "look", "wait", "look"]


def test_a_warm_up_that_hangs_is_an_error_in_the_end(
    model: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nvserve.workers.engine.COMPILE_LIMIT_S", 0.1)
    is_done = iter([True])
    monkeypatch.setattr(TorchEngine, "_is_device_done", lambda _: next(is_done, False))
    with pytest.raises(RuntimeError, match=r"the warm-up did not end in 0\.1 s"):
        begin_epoch(make_engine(model[0], tmp_path), tmp_path)


def test_a_rank_without_peers_compiles_while_it_loads(
    model: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, loading, compiled = loader.load, threading.Event(), threading.Event()

    def load_beside(*arguments: Any) -> None:
        loading.set()
        assert compiled.wait(LIMIT_S)
        load(*arguments)

    def compile_kernels(_: Runner, num_tokens: int) -> None:
        assert loading.wait(LIMIT_S)
        compiled.set()

    monkeypatch.setattr(loader, "load", load_beside)
    monkeypatch.setattr(Runner, "compile_kernels", compile_kernels)
    driver = begin_epoch(make_engine(model[0], tmp_path), tmp_path)
    assert driver.generate([Ask([5], 3)]) == [greedy_reference(model[1], [5], 3)]


def test_a_compilation_that_fails_ends_the_start(
    model: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_kernels(_: Runner, num_tokens: int) -> None:
        raise RuntimeError("ptxas is missing")

    monkeypatch.setattr(Runner, "compile_kernels", compile_kernels)
    with pytest.raises(RuntimeError, match="ptxas is missing"):
        begin_epoch(make_engine(model[0], tmp_path), tmp_path)


def test_a_pool_larger_than_the_memory_is_refused_with_its_size(
    model: tuple[Path, Any], tmp_path: Path
) -> None:
    start = StartEpoch(0, 1, 0, num_kv_blocks=2**31 - 1)
    engine = make_engine(model[0], tmp_path, block_size=65536)
    with pytest.raises(ModelRefused, match=r"2147483647 KV blocks \(--num-kv-blocks\) take"):
        engine.begin(start, str(tmp_path), lambda _: None, lambda *_: None)


def test_attention_that_asks_the_device_is_in_no_graph(
    model: tuple[Path, Any], tmp_path: Path
) -> None:
    engine = make_engine(model[0], tmp_path)
    backend = select_backend(CPU, torch.float32, 64, 16, "torch")
    runner = SimpleNamespace(
        model=SimpleNamespace(device=torch.device("cuda")), backend=backend, graphs=None
    )
    assert not engine._wants_graphs(cast(Runner, runner))
    runner.backend = SimpleNamespace(name="triton", can_be_captured=True)
    assert engine._wants_graphs(cast(Runner, runner))
