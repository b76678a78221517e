"""Whether this process may use an NVIDIA GPU, found out without torch."""

import os
from pathlib import Path


def has_gpu() -> bool:
    """Some GPU's device file is here and CUDA_VISIBLE_DEVICES does not hide it."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))
