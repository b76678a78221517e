"""`bench throughput`, `latency` and `startup`: their parts, and small runs of the demo model."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from nvserve.frontend.client_session import Piece
from nvserve.protocol.config import Config, ModelFacts
from nvserve.protocol.progress import Phase
from nvserve.scripts import embedded, python_child
from nvserve.scripts.bench import engine
from nvserve.scripts.bench.engine import format_table, parse_numbers
from nvserve.scripts.bench.floors import Floors, StepFloor
from nvserve.scripts.bench.latency import FURTHER, PARTS, latency, rig_figures
from nvserve.scripts.bench.model_shapes import SHAPES
from nvserve.scripts.bench.own_process import NotMeasured
from nvserve.scripts.bench.rig import StepTimes
from nvserve.scripts.bench.sampling_tail import measure_sampling
from nvserve.scripts.bench.startup import parse_details, startup
from nvserve.scripts.bench.throughput import add_floors, parse_output_lens, throughput
from nvserve.scripts.startup import StartTimes, describe_start

SMALL = ["--device", "cpu", "--num-kv-blocks", "200", "--max-num-seqs", "8"]


def step(
    device_ms: float, answer_ms: float, interval_ms: float, launch_ms: float = 0.0
) -> StepTimes:
    return StepTimes(
        plan_ms=0.25,
        send_ms=0.5,
        answer_ms=answer_ms,
        commit_ms=0.125,
        emit_ms=0.0625,
        device_ms=device_ms,
        launch_ms=launch_ms,
        interval_ms=interval_ms,
    )


def ready_details() -> list[str]:
    """What a launch prints after its ready line, from its own code."""
    facts = ModelFacts("L", vocab_size=9, num_layers=1, num_kv_heads=1, context_len=9)
    config = Config(model="/m", facts=facts, served_model_names=["m"])
    times = StartTimes(
        begun=100.0,
        ready={"core": 100.5, "frontend": 101.25, "worker 0": 102.0},
        phases={"worker 0": {"weights": 1.25, "warm-up": 0.5}},
        zmq_endpoint="tcp://127.0.0.1:5",
    )
    line, details = describe_start(config, "http://h:1", times, total_s=3.0, num_kv_blocks=7)
    assert embedded.READY_LINE.match(line)
    return details


def test_the_lines_of_a_start_are_understood() -> None:
    details = ready_details()
    found = [embedded.ZMQ_LINE.match(line) for line in details]
    assert [match.group(1) for match in found if match] == ["tcp://127.0.0.1:5"]
    assert found[-1], "the line that ends a start comes last"
    assert parse_details(details) == {
        "core started": 0.5,
        "frontend started": 1.2,
        "worker 0 started": 2.0,
        "worker 0: weights": 1.2,
        "worker 0: warm-up": 0.5,
    }


def test_the_parts_of_a_step_are_medians_of_the_right_runs() -> None:
    single = [step(4.0, 6.0, 9.0), step(4.0, 6.5, 9.0), step(4.0, 99.0, 9.0)]
    overlapped = [step(5.0, 8.0, 5.5, launch_ms) for launch_ms in (0.75, 0.25, 9.0)]
    figures = rig_figures(single=single, overlapped=overlapped, sampling_ms=1.5)
    assert figures == {
        "scheduler": 0.375,
        "message": 0.5,
        "graph launch": 0.75,
        "forward": 3.5,
        "emit": 0.0625,
        "exchange": 2.5,
        "step, core": 5.5,
        "idle": 0.5,
    }
    assert set(figures) <= set(PARTS | FURTHER)
    empty = rig_figures(single=[], overlapped=[], sampling_ms=1.5)
    assert set(empty.values()) == {None}


def test_where_the_host_is_the_device_nothing_is_launched() -> None:
    steps = [step(5.0, 8.0, 5.5)] * 3
    figures = rig_figures(single=steps, overlapped=steps, sampling_ms=1.5)
    assert figures["graph launch"] is None


def test_forward_is_the_whole_step_of_a_device_that_does_not_sample() -> None:
    steps = [step(5.0, 8.0, 5.5)] * 3
    figures = rig_figures(single=steps, overlapped=steps, sampling_ms=None)
    assert figures["forward"] == 5.0


def test_a_tail_that_cannot_be_measured_is_told_with_its_reason() -> None:
    with pytest.raises(NotMeasured, match="no CUDA device"):
        measure_sampling(SHAPES["qwen3-0.6b"], [1], device="cuda", dtype="bfloat16")


def test_a_step_is_divided_by_its_own_floor() -> None:
    step = StepFloor(bytes_ms=1.5, floor_ms=2.0, loaded_floor_ms=2.4, projections_ms=1.0)
    floors = Floors("gpu", 4.2, 3.9, {8: step})
    steps: dict[int, dict[str, float | None]] = {8: {"step_ms": 3.0, "median_step_ms": 2.9}}
    assert add_floors(steps, floors)[8] == {
        "step_ms": 3.0,
        "median_step_ms": 2.9,
        "bytes_ms": 1.5,
        "floor_ms": 2.0,
        "loaded_floor_ms": 2.4,
        "ratio": 1.5,
        "loaded_ratio": pytest.approx(1.25),
    }
    assert add_floors(steps, None)[8]["ratio"] is None


def test_tokens_that_arrive_together_are_a_step_each() -> None:
    meters = iter(range(10))

    def pieces(request: object, limit_s: float) -> Iterator[Piece]:
        return (Piece("", [5] * num_tokens) for num_tokens in (2, 1, 2, 0, 2))

    client = SimpleNamespace(submit=lambda prompt, **_: prompt, pieces=pieces, result=pieces)
    full = engine.decode_full_batch(
        SimpleNamespace(client=client),  # type: ignore[arg-type]  # of an LLM it uses this
        [[5]],
        7,
        0.0,
        read_meters=lambda: {"used": next(meters)},
    )
    assert full.num_steps == 5  # behind the first piece
    assert full.used == {"used": 1}


def test_a_table_aligns_numbers_to_the_right_and_texts_to_the_left() -> None:
    rows: list[list[object]] = [["a", 1, 2.5], ["bcd", 100, None]]
    assert format_table(["x", "n", "ms"], rows).splitlines() == [
        "x      n     ms",
        "a      1  2.500",
        "bcd  100      -",
    ]


@pytest.mark.parametrize("text", ["", "0", "1,x", "-3"])
def test_a_list_of_other_things_than_positive_integers_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="positive integers"):
        parse_numbers("--batches", text)


@pytest.mark.parametrize("text", ["16", "16,16", "144,16", "1,2,3", "1,2", "16,23"])
def test_output_lengths_must_be_a_shorter_and_a_longer_one(text: str) -> None:
    with pytest.raises(click.BadParameter, match="shorter"):
        parse_output_lens(text)


def status_of(*phases: Phase | None) -> dict[str, Any]:
    """Of core, and of ranks in these phases."""
    pages = [page and {"phase": page.name.lower()} for page in (Phase.SERVING, *phases)]
    processes = [{"rank": rank - 1, "page": page} for rank, page in enumerate(pages)]
    return {"state": "ready", "processes": processes}


def test_workers_are_calm_when_all_of_them_wait_with_nothing_left_to_prepare() -> None:
    waiting, ahead = Phase.WAITING, Phase.PREPARING_AHEAD
    assert engine.are_calm(status_of(waiting))
    assert engine.are_calm(status_of(waiting, waiting))
    for phases in ([], [None], [ahead], [waiting, ahead], [Phase.FORWARD], [Phase.LOADING]):
        assert not engine.are_calm(status_of(*phases))


def test_a_step_is_timed_once_no_graph_is_left_and_the_wait_has_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch = SimpleNamespace(announcement=SimpleNamespace(url="http://127.0.0.1:8000"))
    started = engine.Started(launch, 1.0, 1.0)  # type: ignore[arg-type]  # no engine of its own
    phases = iter([Phase.FORWARD, Phase.PREPARING_AHEAD, Phase.PREPARING_AHEAD, Phase.WAITING])
    monkeypatch.setattr(engine, "find_server", lambda port: Path(str(port)))
    monkeypatch.setattr(engine, "order", lambda directory, asked: status_of(next(phases)))
    started.settle()
    assert not list(phases), "it looked until they were calm, and no further"
    monkeypatch.setattr(engine, "SETTLE_LIMIT_S", 0.05)
    monkeypatch.setattr(engine, "order", lambda *_: status_of(Phase.PREPARING_AHEAD))
    with pytest.raises(engine.BenchError, match="still prepare themselves"):
        started.settle()


def test_a_model_that_is_neither_folder_nor_shape_is_one_clear_error() -> None:
    run = CliRunner().invoke(throughput, ["--model", "gpt-5"])
    assert run.exit_code == 2
    assert "no model folder, and none of qwen3-0.6b" in run.output


def test_a_model_folder_is_read_as_the_engine_reads_it(tmp_path: Path) -> None:
    """Also what config.json leaves to the family, and the context that a window leaves."""
    fields = SHAPES["qwen3-0.6b"].config_json() | {"head_dim": None}
    del fields["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    shape = engine._read_shape("it", tmp_path)
    assert (shape.head_dim, shape.context_len, shape.is_tied) == (128, 32_768, True)
    window = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (tmp_path / "config.json").write_text(json.dumps(fields | window | {"sliding_window": 64}))
    assert engine._read_shape("it", tmp_path).context_len == 64


def test_a_folder_that_cannot_be_served_is_told_with_its_reason(tmp_path: Path) -> None:
    run = CliRunner().invoke(throughput, ["--model", str(tmp_path)])
    assert run.exit_code == 2
    assert "no config.json" in run.output
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    run = CliRunner().invoke(throughput, ["--model", str(tmp_path)])
    assert run.exit_code == 2
    assert "architecture GPT2LMHeadModel is not supported" in run.output


# -- whole runs on the demo model ------------------------------------------------------------------


def run_json(command: click.Command, path: Path, *flags: str) -> dict[str, Any]:
    run = CliRunner().invoke(command, [*SMALL, "--output", str(path), *flags])
    assert run.exit_code == 0, run.output
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_child.environment()["PYTHONPATH"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_throughput_measures_mix_and_steps_of_the_demo_model(tmp_path: Path) -> None:
    mix = ["--num-requests", "4", "--min-len", "3", "--max-input-len", "9", "--max-output-len", "6"]
    steps = ["--batches", "1,3", "--context", "8", "--output-lens", "2,34", "--step-rounds", "1"]
    result = run_json(throughput, tmp_path / "r.json", *mix, *steps)
    assert len(result["mix"]) == 2
    assert all(one["out_tok_s"] > 0 for one in result["mix"])
    assert set(result["steps"]) == {"1", "3"}
    for figures in result["steps"].values():
        assert figures["median_step_ms"] > 0
        assert figures["floor_ms"] is None


def test_a_batch_that_the_pool_cannot_hold_has_no_step(tmp_path: Path) -> None:
    steps = ["--batches", "1,2", "--context", "60", "--output-lens", "2,34", "--step-rounds", "1"]
    flags = ["--num-requests", "0", "--num-kv-blocks", "8", *steps]
    result = run_json(throughput, tmp_path / "r.json", *flags)
    assert result["steps"]["1"]["step_ms"] > 0
    assert result["steps"]["2"]["step_ms"] is None


def test_latency_takes_the_step_of_the_demo_model_apart(tmp_path: Path) -> None:
    flags = ["--batches", "1,3", "--context", "8", "--output-len", "24"]
    result = run_json(latency, tmp_path / "r.json", *flags)
    dashes = {"graph launch", "floor", "total / floor"}  # of any CPU
    for figures in result["batches"].values():
        assert figures.keys() == {**PARTS, **FURTHER}.keys()
        assert {line for line, ms in figures.items() if ms is None} == dashes
        for line in ("scheduler", "message", "sampling", "total", "exchange"):
            assert figures[line] > 0, line
        assert figures["forward"] >= 0  # a difference of two measurements


def test_latency_prints_the_parts_of_a_step_in_their_order() -> None:
    flags = ["--device", "sim", "--batches", "2", "--context", "4", "--output-len", "16"]
    run = CliRunner().invoke(latency, [*SMALL, *flags, "--no-floor"])
    assert run.exit_code == 0, run.output
    lines = [line.split("  ")[0] for line in run.output.splitlines()]
    begin = lines.index("scheduler")
    assert lines[begin : begin + 9] == [
        *("scheduler", "message", "graph launch", "forward", "sampling", "streaming"),
        *("total", "floor", "total / floor"),
    ]


def test_startup_times_every_round_by_phase(tmp_path: Path) -> None:
    result = run_json(startup, tmp_path / "r.json", "--num-rounds", "1")
    [phases] = result["rounds"]
    assert phases["ready"] > 0
    assert result["median_ready_s"] == phases["ready"]
    assert {"core started", "frontend started", "worker 0 started"} <= set(phases)
