"""Command lines that cannot give a result are refused before anything is started or measured."""

import os
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from nvserve.scripts.bench import all_reduce, equal_ids, several_gpus
from nvserve.scripts.bench.frontend import frontend
from nvserve.scripts.bench.latency import latency
from nvserve.scripts.bench.output_file import why_unusable
from nvserve.scripts.bench.recovery import recovery
from nvserve.scripts.bench.scheduler import scheduler
from nvserve.scripts.bench.serve import serve
from nvserve.scripts.bench.startup import startup
from nvserve.scripts.bench.throughput import throughput
from nvserve.scripts.chat import chat
from nvserve.scripts.generate import generate

WRITERS = [
    *(throughput, latency, startup, recovery, scheduler, frontend, serve),
    *(equal_ids.main, several_gpus.main),
]


def refused(command: click.Command, *flags: str) -> str:
    run = CliRunner().invoke(command, flags)
    assert run.exit_code == 2, run.output
    return run.output


@pytest.fixture
def no_folder(tmp_path: Path) -> Path:
    """A path below a file, which nobody can write."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "x.json"


@pytest.mark.parametrize("command", WRITERS, ids=lambda command: command.callback.__module__)
def test_an_output_that_cannot_be_written_is_refused_at_once(
    command: click.Command, no_folder: Path, tmp_path: Path
) -> None:
    assert "Invalid value for '--output'" in refused(command, "--output", str(no_folder))
    assert f"{tmp_path} is a folder" in refused(command, "--output", str(tmp_path))


def test_the_ranks_of_all_reduce_are_not_started_for_it_either(
    no_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["all_reduce", "--output", str(no_folder)])
    with pytest.raises(SystemExit, match="2"):
        all_reduce.main()
    assert "--output: cannot be made" in capsys.readouterr().err


def test_a_plot_and_a_folder_of_results_are_looked_at_too(no_folder: Path) -> None:
    output = refused(serve, "--sweep", "1", "--plot", str(no_folder))
    assert "Invalid value for '--plot'" in output
    output = refused(serve, "--save-result", "--result-dir", str(no_folder))
    assert "--result-dir: cannot be made" in output
    output = refused(serve, "--save-result", "--label", "x" * 300)
    assert "File name too long" in output


def test_the_folder_of_an_output_is_made_and_the_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "x.json"
    assert not why_unusable(path)
    assert path.parent.is_dir()
    assert not path.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_file_or_folder_without_permission_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.touch(0o400)
    assert why_unusable(path) == f"{path} is not writable"
    path.unlink()
    tmp_path.chmod(0o500)
    assert why_unusable(path) == f"{tmp_path} is not writable"


@pytest.mark.parametrize("command", [throughput, latency], ids=["throughput", "latency"])
def test_a_batch_that_cannot_run_at_once_is_refused(command: click.Command) -> None:
    output = refused(command, "--max-num-seqs", "2", "--batches", "1,4")
    assert "--batches 4: at most 2 run at once" in output


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (throughput, "--min-len 50 --max-input-len 20", "--min-len 50 is above --max-input-len 20"),
        (throughput, "--min-len 50 --max-output-len 9", "--min-len 50 is above --max-output-len 9"),
        (throughput, "--output-lens 1,2", "longer by 8 or more"),
        (throughput, "--batches 1,x", "--batches"),
        (latency, "--batches 0", "--batches"),
        (latency, "--output-len 8", "Invalid value for '--output-len'"),
        (serve, "--request-timeout nan", "Invalid value for '--request-timeout'"),
        (serve, "--request-timeout 0", "Invalid value for '--request-timeout'"),
        (serve, "--ready-check-timeout-sec nan", "Invalid value for '--ready-check-timeout-sec'"),
        (serve, "--random-range-ratio nan", "Invalid value for '--random-range-ratio'"),
        (serve, "--temperature inf", "Invalid value for '--temperature'"),
        (serve, "--request-rate nan", "must be positive"),
        (serve, "--burstiness nan", "must be positive"),
        (serve, "--sweep 1,nan", "must be positive"),
        (serve, "--sweep 1,inf --sweep-over max-concurrency", "a request rate alone"),
        (recovery, "--share-gpu", "--share-gpu needs --num-kv-blocks"),
        (recovery, "--hang-timeout nan", "Invalid value for '--hang-timeout'"),
        (recovery, "--wait-limit nan", "Invalid value for '--wait-limit'"),
        (recovery, "--time-limit nan", "Invalid value for '--time-limit'"),
        (frontend, "--window nan", "Invalid value for '--window'"),
        (frontend, "--window 0", "Invalid value for '--window'"),
        (frontend, "--clients 0", "Invalid value for '--clients'"),
        (several_gpus.main, "--output x.json --budget nan", "Invalid value for '--budget'"),
        (several_gpus.main, "--output x.json --batches 1,x", "--batches"),
        (several_gpus.main, "--output x.json --parts step,x", "--parts"),
        (several_gpus.main, "--output x.json --num-kv-blocks -1", "--num-kv-blocks"),
        (several_gpus.main, "--output x.json --device sim", "--device"),
        (generate, "x --temperature nan", "Invalid value for '--temperature'"),
        (generate, "x --top-p inf", "Invalid value for '--top-p'"),
        (chat, "--temperature -inf", "Invalid value for '--temperature'"),
    ],
)
def test_numbers_that_make_no_sense_are_one_clear_error(
    command: click.Command, flags: str, message: str
) -> None:
    assert message in refused(command, *flags.split())


ENGINES = [throughput, latency, startup, recovery]


@pytest.mark.parametrize("command", ENGINES, ids=lambda command: command.callback.__module__)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model /no/such", "--model /no/such: no model folder"),
        ("--tp 0", "--tp"),
        ("--tp 3", "--tp 3 cannot split"),
        ("--device x", "--device"),
        ("--dtype x", "--dtype"),
        ("--load-format x", "--load-format"),
        ("--max-model-len 0", "--max-model-len"),
        ("--max-model-len 999999", "--max-model-len 999999 is more than"),
        ("--max-num-seqs 0", "--max-num-seqs"),
        ("--max-num-batched-tokens 0", "--max-num-batched-tokens"),
        ("--num-kv-blocks -1", "--num-kv-blocks"),
        ("--num-kv-blocks 1", "--num-kv-blocks 1"),
        ("--gpu-memory-utilization 2", "--gpu-memory-utilization"),
        ("--gpu-memory-utilization nan", "--gpu-memory-utilization"),
        ("--attention-backend x", "--attention-backend"),
        ("--seed 99999999999999999999", "--seed"),
    ],
)
def test_an_engine_that_cannot_be_is_refused_before_it_is_started(
    command: click.Command, flags: str, message: str
) -> None:
    assert message in refused(command, *flags.split())


@pytest.mark.parametrize("command", [throughput, latency, recovery])
def test_a_workload_must_fit(command: click.Command) -> None:
    assert "--max-model-len 20: the workload needs" in refused(command, "--max-model-len", "20")
    assert "the context of demo has 4096" in refused(command, "--context", "5000")
