"""`bench latency` on a GPU: no line of its table is empty, and the floor is of the same run."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from nvserve.scripts import python_child
from nvserve.scripts.bench.latency import FURTHER, PARTS, latency

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_every_line_of_a_step_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_child.environment()["PYTHONPATH"])
    path = tmp_path / "r.json"
    flags = ["--device", "cuda", "--dtype", "bfloat16", "--num-kv-blocks", "400"]
    steps = ["--batches", "1,8", "--context", "8", "--output-len", "64"]
    run = CliRunner().invoke(latency, [*flags, *steps, "--output", str(path)])
    assert run.exit_code == 0, run.output
    for figures in json.loads(path.read_text())["batches"].values():
        assert figures.keys() == {**PARTS, **FURTHER}.keys()
        assert [line for line, ms in figures.items() if ms is None] == []
        for line in ("graph launch", "sampling", "total", "floor"):
            assert figures[line] > 0, line
