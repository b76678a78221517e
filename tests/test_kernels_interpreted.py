"""The Triton kernels through the interpreter, in a process of its own.

TRITON_INTERPRET must be set before triton's first import, so the kernels' tests of tests/gpu run
again in a child whose tensors are on the CPU.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "tests" / "gpu").glob("test_kernels_*.py"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_triton_kernels_match_their_references_interpreted() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-rp", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, *map(str, FILES)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    passed = set(re.findall(r"^PASSED tests/gpu/(\S+\.py)::", run.stdout, re.MULTILINE))
    assert passed == {file.name for file in FILES}, run.stdout[-2000:]
