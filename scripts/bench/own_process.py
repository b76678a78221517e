"""Measurements in a process of their own, which imports torch and gives its memory back at its end.

A measuring module's main reads what it is asked from standard input, as one JSON object, and writes
its answer to standard output, likewise. When it cannot measure it exits with a line that says why.
"""

import json
import subprocess
from typing import Any, Final

from nvserve.scripts import python_child

LIMIT_S: Final = 300.0  # of a whole measurement


class NotMeasured(RuntimeError):
    """It cannot be measured here; the message says why."""


def measure(module: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The answer of `python -m module`; NotMeasured if there is none within LIMIT_S."""
    try:
        run = subprocess.run(
            python_child.command("-m", module),
            input=json.dumps(asked),
            env=python_child.environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise NotMeasured(f"not measured within {LIMIT_S:g} s") from error
    if run.returncode != 0:
        lines = run.stderr.strip().splitlines() or [f"exit status {run.returncode}"]
        raise NotMeasured(lines[-1])
    answer: dict[str, Any] = json.loads(run.stdout)
    return answer
