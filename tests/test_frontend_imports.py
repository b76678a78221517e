"""The frontend starts fast because torch and transformers never get into it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys
import nvserve.frontend.main, nvserve.frontend.client
heavy = {"torch", "transformers", "numpy.testing", "pandas"} & set(sys.modules)
print(sorted(heavy))
"""


def test_no_module_of_the_frontend_imports_torch() -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],
        env={"PYTHONPATH": str(ROOT / ".src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout == "[]\n"
