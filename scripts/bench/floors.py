"""The floor of a decode step on this GPU, measured: weights and KV streamed, and nothing else.

    bytes_ms = (weight bytes + KV bytes) / the rate at which cuBLAS streams big weights at batch 1
    floor_ms = the projections alone, in one CUDA graph, + KV bytes / the copy bandwidth
    loaded_floor_ms = the same after a second of such steps, as an engine runs them

A GPU that is kept busy reaches its power limit and lowers its clock: with many rows, whose
projections are bound by arithmetic, the second figure is the higher one.

Runs in a process of its own (`python -m nvserve.scripts.bench.floors`). Speeds drift from machine
to machine: compare the ratios of one run.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from nvserve.scripts.bench import own_process
from nvserve.scripts.bench.model_shapes import ModelShape

if TYPE_CHECKING:
    import torch

NUM_WARM_UPS: Final = 3
NUM_CALLS: Final = 10
LOAD_S: Final = 1.0
COPY_BYTES: Final = 4 << 30
BIG_SHAPE: Final = (28672, 4096)  # of a weight that is big enough to be streamed at full rate
NUM_BIG: Final = 8
BYTES_PER_VALUE: Final = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class StepFloor:
    """Of one decode step at one batch size, in milliseconds."""

    bytes_ms: float
    floor_ms: float
    loaded_floor_ms: float
    projections_ms: float


@dataclass(frozen=True, slots=True)
class Floors:
    """Of one model on one GPU; rates in TB/s."""

    device: str
    copy_rate: float
    stream_rate: float
    steps: dict[int, StepFloor]  # by batch


def measure_floors(
    shape: ModelShape, batches: list[int], *, context: int, tp_size: int = 1
) -> Floors:
    """Floors of one rank's share; own_process.NotMeasured without a free GPU."""
    asked = {"config": shape.config_json(), "batches": batches, "context": context, "tp": tp_size}
    answer = own_process.measure("nvserve.scripts.bench.floors", asked)
    steps = {int(batch): StepFloor(**step) for batch, step in answer.pop("steps").items()}
    return Floors(**answer, steps=steps)


def kv_bytes_per_token(shape: ModelShape, tp_size: int) -> int:
    """Keys and values of one token on one rank."""
    return 2 * BYTES_PER_VALUE * shape.num_layers * shape.num_kv_heads * shape.head_dim // tp_size


def projection_shapes(shape: ModelShape, tp_size: int) -> list[tuple[int, int]]:
    """(outputs, inputs) of the four matmuls of a layer, on one rank."""
    hidden, inner = shape.hidden_size, shape.intermediate_size // tp_size
    q = shape.num_heads * shape.head_dim // tp_size
    kv = shape.num_kv_heads * shape.head_dim // tp_size
    return [(q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)]


# -- the child process -----------------------------------------------------------------------------


def _measure(shape: ModelShape, batches: list[int], *, context: int, tp_size: int) -> Floors:
    import torch  # only in the child process

    copy_rate, stream_rate = _copy_rate(), _stream_rate()
    weights = _Weights(shape, tp_size)
    steps = {}
    for batch in batches:
        projections_ms, loaded_ms = weights.step_ms(batch)
        kv_bytes = batch * context * kv_bytes_per_token(shape, tp_size)
        kv_ms = kv_bytes / copy_rate / 1e9
        steps[batch] = StepFloor(
            bytes_ms=(weights.num_bytes + kv_bytes) / stream_rate / 1e9,
            floor_ms=projections_ms + kv_ms,
            loaded_floor_ms=loaded_ms + kv_ms,
            projections_ms=projections_ms,
        )
    return Floors(torch.cuda.get_device_name(), copy_rate, stream_rate, steps)


def _mean_ms(call: Callable[[], object]) -> float:
    """GPU milliseconds of a call, by events around several."""
    import torch

    for _ in range(NUM_WARM_UPS):
        call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(NUM_CALLS):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / NUM_CALLS


def _copy_rate() -> float:
    """Device-to-device copy: bytes read and bytes written, in TB/s."""
    import torch

    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _mean_ms(lambda: target.copy_(source)) / 1e9


def _stream_rate() -> float:
    """Big bf16 weights read by matrix-vector products, in TB/s."""
    import torch

    weights = [_random(*BIG_SHAPE) for _ in range(NUM_BIG)]
    row = _random(1, BIG_SHAPE[1])
    ms = _mean_ms(lambda: [torch.nn.functional.linear(row, weight) for weight in weights])
    return sum(weight.numel() for weight in weights) * BYTES_PER_VALUE / ms / 1e9


class _Weights:
    """Every projection of one rank, distinct for each layer, so that no cache holds them."""

    def __init__(self, shape: ModelShape, tp_size: int) -> None:
        shapes = projection_shapes(shape, tp_size) * shape.num_layers
        shapes.append((shape.vocab_size // tp_size, shape.hidden_size))
        self._weights: Final = [_random(*one) for one in shapes]
        self.num_bytes: Final = BYTES_PER_VALUE * sum(w.numel() for w in self._weights)

    def step_ms(self, batch: int) -> tuple[float, float]:
        """All of them once, replayed as one graph: of a few replays, and after LOAD_S of them."""
        import torch

        rows = {w.shape[1]: _random(batch, w.shape[1]) for w in self._weights}

        def step() -> None:
            for weight in self._weights:
                torch.nn.functional.linear(rows[weight.shape[1]], weight)

        step()  # cuBLAS makes its workspace outside of the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        short_ms = _mean_ms(graph.replay)
        load_until = time.monotonic() + LOAD_S
        while time.monotonic() < load_until:
            _mean_ms(graph.replay)
        return short_ms, _mean_ms(graph.replay)


def _random(rows: int, columns: int) -> "torch.Tensor":
    import torch

    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16).mul_(0.02)


def main() -> None:
    """Measure what standard input asks for; one JSON object on standard output."""
    asked = json.load(sys.stdin)
    import torch

    if not torch.cuda.is_available():
        sys.exit("no CUDA device: a floor is measured on a GPU only")
    shape = ModelShape.from_config(asked["config"])
    floors = _measure(shape, asked["batches"], context=asked["context"], tp_size=asked["tp"])
    json.dump(asdict(floors), sys.stdout)


if __name__ == "__main__":
    main()
