"""How to start another Python that runs the very nvserve this process runs."""

import os
import sys
from pathlib import Path

import nvserve


def command(*arguments: str) -> list[str]:
    """The interpreter with these arguments; the working folder stays off its import path."""
    return [sys.executable, "-P", *arguments]


def environment() -> dict[str, str]:
    """This process's environment, with the folder that holds nvserve first on the import path."""
    assert nvserve.__file__ is not None, "nvserve is a package with an __init__.py"
    folder = str(Path(nvserve.__file__).parents[1])
    rest = os.environ.get("PYTHONPATH", "")
    return os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{rest}" if rest else folder}
