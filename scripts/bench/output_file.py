"""Where a benchmark writes its result: known to be writable before minutes are spent on one."""

import os
from pathlib import Path
from typing import Any

import click


def why_unusable(path: Path) -> str:
    """Make the file's folder; why the file cannot be written all the same, or empty."""
    try:
        if path.is_dir():
            return f"{path} is a folder"
        path.parent.mkdir(parents=True, exist_ok=True)
        held = path if path.exists() else path.parent
    except OSError as error:
        return f"cannot be made: {error}"
    return "" if os.access(held, os.W_OK) else f"{held} is not writable"


class OutputFile(click.ParamType[Path]):
    """A file to be written at the end, whose folder is there from now on."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        reason = why_unusable(path)
        if reason:
            self.fail(reason, param, ctx)
        return path
