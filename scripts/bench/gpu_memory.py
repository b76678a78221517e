"""Memory in use on each GPU, by whichever process, once it stays as it is.

Runs in a process of its own (`python -m nvserve.scripts.bench.gpu_memory`), whose CUDA contexts
count in every reading alike: compare readings with each other.
"""

import json
import sys
import time
from typing import Final

from nvserve.scripts.bench import own_process

LOOK_S: Final = 0.1
STEADY_S: Final = 3.0  # an idle worker with CUDA graphs to capture needs less for the next one
LIMIT_S: Final = 60.0


def read_gpu_memory(num_gpus: int) -> list[int]:
    """Bytes in use on each of the first GPUs; own_process.NotMeasured without them."""
    answer = own_process.measure("nvserve.scripts.bench.gpu_memory", {"num_gpus": num_gpus})
    return [int(used) for used in answer["used_bytes"]]


# -- the child process -----------------------------------------------------------------------------


def _used_bytes(num_gpus: int) -> list[int]:
    import torch  # only in the child process

    sizes = [torch.cuda.mem_get_info(gpu) for gpu in range(num_gpus)]
    return [total - free for free, total in sizes]


def _steady_bytes(num_gpus: int) -> list[int]:
    """The last reading when none has differed for STEADY_S; exits with the reason after LIMIT_S."""
    begun_s = since_s = time.monotonic()
    used = _used_bytes(num_gpus)
    while time.monotonic() - since_s < STEADY_S:
        time.sleep(LOOK_S)
        seen = _used_bytes(num_gpus)
        if seen != used:
            used, since_s = seen, time.monotonic()
        if time.monotonic() - begun_s > LIMIT_S:
            sys.exit(f"GPU memory is not steady within {LIMIT_S:g} s: {used} bytes")
    return used


def main() -> None:
    """Measure what standard input asks for; one JSON object on standard output."""
    asked = json.load(sys.stdin)
    import torch

    available = torch.cuda.device_count()
    if available < asked["num_gpus"]:
        sys.exit(f"{asked['num_gpus']} GPUs asked for, {available} are there")
    json.dump({"used_bytes": _steady_bytes(asked["num_gpus"])}, sys.stdout)


if __name__ == "__main__":
    main()
