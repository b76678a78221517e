"""schemathesis reads our OpenAPI document and asks for everything in it, right and wrong."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from surface.asking import Asker

SCALE = float(os.environ.get("NVSERVE_TEST_SCALE", "0.1"))
NUM_EXAMPLES = 1000  # of each operation and phase
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)
SEED = "20251"
RUN_LIMIT_S = 270 + 1500 * SCALE


@pytest.mark.slow
@pytest.mark.timeout(RUN_LIMIT_S + 60)
@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="not installed")
def test_the_document_and_the_server_agree(asker: Asker, tmp_path: Path) -> None:
    status, raw = asker.request("GET", "/openapi.json")
    assert status == 200
    document = tmp_path / "openapi.json"
    document.write_text(json.dumps(json.loads(raw)))
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", str(document), "--url", asker.url),
            *("--checks", ",".join(CHECKS), "--max-examples", str(round(NUM_EXAMPLES * SCALE))),
            *("--seed", SEED, "--generation-database", "none", "--no-color", "--workers", "2"),
            *("--request-timeout", "120", "--phases", "examples,coverage,fuzzing"),
            *("--max-response-time", "60", "--continue-on-failure"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
    )
    assert "Tested: 12" in finished.stdout, finished.stdout[-2000:]
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]
    asker.check_alive()
