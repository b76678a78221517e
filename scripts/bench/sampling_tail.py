"""The plain sampling tail of a decode step, timed alone on random logits of a model's vocabulary.

In a step on a GPU it is part of one graph with the model, where no clock comes between the two.
What is timed is one rank's share, without the exchange of the ranks' best tokens.

Runs in a process of its own (`python -m nvserve.scripts.bench.sampling_tail`).
"""

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from nvserve.scripts.bench import own_process
from nvserve.scripts.bench.model_shapes import ModelShape
from nvserve.scripts.bench.workloads import TEMPERATURE

if TYPE_CHECKING:
    import torch

NUM_CALLS: Final = 20
ENOUGH_S: Final = 0.5  # of calls on a CPU, where one may take long


def measure_sampling(
    shape: ModelShape, batches: list[int], *, device: str, dtype: str, tp_size: int = 1
) -> dict[int, float]:
    """Milliseconds of the tail by batch, as temperature rows; own_process.NotMeasured."""
    asked = {
        "num_ids": math.ceil(shape.vocab_size / tp_size),
        "batches": batches,
        "device": device,
        "dtype": dtype,
        "tp": tp_size,
    }
    answer = own_process.measure("nvserve.scripts.bench.sampling_tail", asked)
    return {int(batch): ms for batch, ms in answer.items()}


# -- the child process -----------------------------------------------------------------------------


def _tail(
    num_rows: int, num_ids: int, device: "torch.device", dtype: "torch.dtype"
) -> Callable[[], object]:
    """What a worker's step calls behind the model's logits."""
    import torch  # only in the child process

    from nvserve.kernels.sampling import gumbel_argmax

    logits = torch.randn(num_rows, num_ids, device=device).to(dtype)
    temperature = torch.full((num_rows,), TEMPERATURE, device=device)
    seeds = torch.randint(2**62, (num_rows,), device=device)
    positions = torch.full((num_rows,), 300, device=device)
    slots = torch.arange(num_rows, device=device)
    return lambda: gumbel_argmax(logits, temperature, seeds, positions, 0, slots)


def _graph_ms(call: Callable[[], object]) -> float:
    """GPU milliseconds of a call: NUM_CALLS are in one graph, so that its launch hardly counts."""
    from nvserve.scripts.bench.kernels import graph_us  # imports torch

    return graph_us(lambda: [call() for _ in range(NUM_CALLS)], NUM_CALLS) / 1000


def _host_ms(call: Callable[[], object]) -> float:
    """The median of NUM_CALLS calls, or of those that ENOUGH_S has room for."""
    call()  # the first one allocates
    times_s: list[float] = []
    while len(times_s) < NUM_CALLS and sum(times_s) < ENOUGH_S:
        begun_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - begun_s)
    return statistics.median(times_s) * 1000


def main() -> None:
    """Measure what standard input asks for; milliseconds by batch on standard output."""
    asked = json.load(sys.stdin)
    import torch

    device, dtype = torch.device(asked["device"]), getattr(torch, asked["dtype"])
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device")
    if device.type == "cpu":  # as many threads as a worker takes
        num_threads = max(1, (len(os.sched_getaffinity(0)) - 1) // asked["tp"])
        torch.set_num_threads(min(torch.get_num_threads(), num_threads))
    time_ms = _graph_ms if device.type == "cuda" else _host_ms
    with torch.inference_mode():
        answer = {
            batch: time_ms(_tail(batch, asked["num_ids"], device, dtype))
            for batch in asked["batches"]
        }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
