"""`nvserve bench scheduler` runs, and what it measures of messages holds the promise."""

import json
from pathlib import Path

from click.testing import CliRunner

from nvserve.scripts.bench.scheduler import CASES, MAX_UNCHANGED_BYTES, measure, scheduler


def test_an_unchanged_step_of_many_requests_is_a_few_bytes() -> None:
    result = measure(64, 20, 40)
    assert result["unchanged_share"] > 0.5
    assert 0 < result["unchanged_bytes"] <= MAX_UNCHANGED_BYTES


def test_the_command_prints_a_row_a_case_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    result = CliRunner().invoke(scheduler, ["--steps", "5", "--output", str(path)])
    assert result.exit_code == 0, result.output
    cases = json.loads(path.read_text())["cases"]
    assert [(case["requests"], case["prompt_tokens"]) for case in cases] == CASES
    assert len(result.output.splitlines()) == len(CASES) + 2
