"""Times of our kernels in CUDA graphs, beside what they replace and the bytes they must move.

    python -m nvserve.scripts.bench.kernels attention sampling small matmul step

Each figure is microseconds a call, the median over graph replays; inputs rotate where they would
otherwise stay in the L2 cache. `floor` is bytes moved / --bandwidth.
"""

import argparse
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F

from nvserve.kernels import activation, attention, matmul, norm, rope, sampling

DEVICE: Final = torch.device("cuda")
DTYPE: Final = torch.bfloat16
BLOCK_SIZE: Final = 16

# hidden, intermediate, layers, heads, KV heads, head size, vocabulary, QK-norm
MODELS: Final = {
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151936, True),
    "llama-8b": (4096, 14336, 32, 32, 8, 128, 128256, False),
}

PROJECTIONS: Final = [
    *[(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)],
    *[(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
]


def graph_us(step: Callable[[], object], num_calls: int, replays: int = 6) -> float:
    """Microseconds of one of the num_calls calls in step, replayed in a CUDA graph."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    times: list[float] = []
    for _ in range(5):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / replays * 1e3 / num_calls)
    return sorted(times)[2]


def random(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def decode_metadata(num_requests: int, length: int, max_len: int) -> attention.AttentionMetadata:
    """Requests of one length whose blocks are scattered over the pool."""
    each = -(-length // BLOCK_SIZE)
    tables = torch.zeros(num_requests, max_len // BLOCK_SIZE, dtype=torch.int32, device=DEVICE)
    blocks = torch.randperm(num_requests * each, device=DEVICE) + 1
    tables[:, :each] = blocks.to(torch.int32).view(num_requests, each)
    starts = torch.arange(num_requests + 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((num_requests,), length, dtype=torch.int32, device=DEVICE)
    return attention.AttentionMetadata(starts, lengths, tables, 1, max_len)


def random_caches(meta: attention.AttentionMetadata, num: int) -> list[torch.Tensor]:
    num_blocks = int(meta.block_tables.max()) + 1
    return [random(num_blocks, BLOCK_SIZE, 8, 128) for _ in range(num)]


def attention_us(name: str, meta: attention.AttentionMetadata, caches: list[torch.Tensor]) -> float:
    """One layer's decode of 32 query and 8 KV heads of 128, 8 layers over two caches."""
    backend = attention.select_backend(DEVICE, DTYPE, 128, BLOCK_SIZE, name)
    q = random(meta.seq_lens.shape[0], 32, 128)

    def step() -> None:
        backend.plan_decode(meta, 32, 8, 128, BLOCK_SIZE, DTYPE)
        for layer in range(8):
            at = layer % 2 * 2
            backend.decode(q, caches[at], caches[at + 1], meta, 0.09)

    return graph_us(step, 8)


def time_attention(bandwidth: float) -> None:
    for num_requests, length in (
        (32, 4096),
        (32, 512),
        (1, 512),
        (128, 512),
        (256, 336),
        (1, 8192),
    ):
        meta = decode_metadata(num_requests, length, max(length, 4096))
        caches = random_caches(meta, 4)
        floor = num_requests * length * 2 * 8 * 128 * 2 / bandwidth / 1e6
        line = f"attention {num_requests:4d} x {length:5d}: floor {floor:6.1f}"
        for name in ("triton", "fa3"):
            try:
                line += f"  {name} {attention_us(name, meta, caches):6.1f}"
            except ValueError:
                line += f"  {name}      -"
        print(line, flush=True)


def sampling_us(
    logits: torch.Tensor, temperature: float, truncation: tuple[int, float, float] | None
) -> float:
    num_rows = logits.shape[0]
    seeds = torch.randint(0, 2**62, (num_rows,), device=DEVICE)

    def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((num_rows,), value, device=DEVICE, dtype=dtype)

    heat = full(temperature)
    if truncation is None:
        return graph_us(lambda: sampling.gumbel_argmax(logits, heat, seeds, seeds), 1)
    top_k, top_p, min_p = truncation
    limits = (full(top_k, torch.int32), full(top_p), full(min_p))
    return graph_us(lambda: sampling.sample(logits, heat, *limits, seeds, seeds), 1)


def time_sampling(bandwidth: float) -> None:
    """Rows over 151 936 tokens: the plain tail (greedy, gumbel), then sample()."""
    kinds = {
        "greedy": None,
        "gumbel": None,
        "plain": (0, 1.0, 0.0),
        "k20": (20, 1.0, 0.0),
        "p95": (0, 0.95, 0.0),
        "k20p95": (20, 0.95, 0.0),
        "minp": (0, 1.0, 0.05),
        "k3000": (3000, 1.0, 0.0),
    }
    for num_rows in (1, 32, 256):
        for dtype in (torch.bfloat16, torch.float32):
            logits = 2 * random(num_rows, 151936, dtype=dtype)
            floor = logits.numel() * logits.element_size() / bandwidth / 1e6
            line = f"sampling {num_rows:3d} {str(dtype)[6:]:8s}: floor {floor:5.1f}"
            for name, truncation in kinds.items():
                heat = 0.0 if name == "greedy" else 0.8
                line += f"  {name} {sampling_us(logits, heat, truncation):6.1f}"
            print(line, flush=True)


def small_us(num_tokens: int) -> list[float]:
    """add_rms_norm, rope and silu_and_mul at the 8B shape, 20 of each in a row."""
    x, residual, weight = random(num_tokens, 4096), random(num_tokens, 4096), random(4096)
    gate_up, qkv = random(num_tokens, 28672), random(num_tokens, 6144)
    keys, values = (random(300, BLOCK_SIZE, 8, 128) for _ in "kv")
    angles = random(5000, 128, dtype=torch.float32)
    positions = torch.arange(num_tokens, device=DEVICE)

    def rotate() -> None:
        rope.qk_norm_rope_cache(
            qkv, positions, angles, None, None, 1e-6, keys, values, positions + 16, 32, 8
        )

    def repeat(call: Callable[[], object]) -> float:
        return graph_us(lambda: [call() for _ in range(20)], 20)

    normalize = repeat(lambda: norm.add_rms_norm(x, residual, weight, 1e-6))
    return [normalize, repeat(rotate), repeat(lambda: activation.silu_and_mul(gate_up))]


def time_small(bandwidth: float) -> None:
    for num_tokens in (1, 8, 32, 256):
        times = " ".join(f"{value:5.2f}" for value in small_us(num_tokens))
        print(f"small {num_tokens:3d} tokens: add_rms_norm rope silu_and_mul {times}", flush=True)


def time_matmul(bandwidth: float) -> None:
    """linear() beside cuBLAS at the projections of the two models."""
    for outputs, inputs in PROJECTIONS:
        num = max(2, min(28, int(3e8 / (2 * outputs * inputs))))
        weights = [random(outputs, inputs) for _ in range(num)]
        floor = 2 * outputs * inputs / bandwidth / 1e6
        line = f"matmul {outputs:6d} x {inputs:5d}: floor {floor:5.1f}"
        for num_tokens in (1, 2, 8, 16):
            ours, library = (
                projection_us(function, random(num_tokens, inputs), weights)
                for function in (matmul.linear, F.linear)
            )
            line += f"  T={num_tokens} {ours:5.1f} / {library:5.1f}"
        print(line + "  (ours / cuBLAS)", flush=True)


def projection_us(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    weights: list[torch.Tensor],
) -> float:
    return graph_us(lambda: [function(x, weight) for weight in weights], len(weights))


class Stack:
    """A decoder's weights and the chain of kernels of its decode step."""

    def __init__(self, name: str) -> None:
        hidden, inner, layers, heads, kv_heads, size, vocabulary, normed = MODELS[name]
        qkv = (heads + 2 * kv_heads) * size
        shapes = ((qkv, hidden), (hidden, heads * size), (2 * inner, hidden), (hidden, inner))
        self.heads, self.kv_heads, self.size, self.hidden = heads, kv_heads, size, hidden
        self.layers = [[0.02 * random(*shape) for shape in shapes] for _ in range(layers)]
        self.head, self.gain = 0.02 * random(vocabulary, hidden), random(hidden)
        self.head_gain = random(size) if normed else None
        self.angles = random(5000, size, dtype=torch.float32)
        self.num_bytes = 2 * (sum(w.numel() for ws in self.layers for w in ws) + self.head.numel())

    def step_us(self, batch: int, length: int, backend: attention.AttentionBackend) -> float:
        """Microseconds of a step as the decoder launches it."""
        meta = decode_metadata(batch, length, 4096)
        caches = [random_caches(meta, 2) for _ in self.layers]
        positions = torch.full((batch,), length - 1, device=DEVICE)
        last = (length - 1) // BLOCK_SIZE
        slots = meta.block_tables[:, last].long() * BLOCK_SIZE + (length - 1) % BLOCK_SIZE
        temperature = torch.full((batch,), 0.6, device=DEVICE)
        embedded = random(batch, self.hidden)
        shape = (self.heads, self.kv_heads)
        fused = attention.fused_decode(backend, batch)
        gains, scale = (self.head_gain, self.head_gain, 1e-6), self.size**-0.5

        def mix(qkv: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
            keys, values = cache
            if fused is not None:
                new = attention.NewTokens(qkv, self.angles, *gains)
                return fused(new, keys, values, meta, scale)
            kv = (keys, values, slots)
            q = rope.qk_norm_rope_cache(qkv, positions, self.angles, *gains, *kv, *shape)
            return backend.decode(q, keys, values, meta, scale)

        def step() -> None:
            backend.plan_decode(meta, *shape, self.size, BLOCK_SIZE, DTYPE)
            residual = embedded.clone()
            x = norm.rms_norm(residual, self.gain, 1e-6)
            for (w_qkv, w_out, w_in, w_down), cache in zip(self.layers, caches, strict=True):
                mixed = mix(matmul.linear(x, w_qkv), cache).flatten(1)
                x = matmul.linear(mixed, w_out)
                x, residual = norm.add_rms_norm(x, residual, self.gain, 1e-6)
                x = matmul.linear(matmul.linear_silu_mul(x, w_in), w_down)
                x, residual = norm.add_rms_norm(x, residual, self.gain, 1e-6)
            logits = matmul.linear(x, self.head)
            sampling.gumbel_argmax(logits, temperature, positions, positions)

        return graph_us(step, 1)


def time_step(bandwidth: float) -> None:
    """A whole decode step at context 336, of kernels alone, without an engine around them."""
    for name, (_, _, layers, _, kv_heads, size, _, _) in MODELS.items():
        stack = Stack(name)
        for batch in (1, 8, 32, 72, 128, 200, 256):
            kv_bytes = batch * 336 * 2 * 2 * layers * kv_heads * size
            floor = (stack.num_bytes + kv_bytes) / bandwidth / 1e6
            line = f"step {name} batch {batch:3d}: bytes {floor:7.0f}"
            backend = attention.select_backend(DEVICE, DTYPE, size, BLOCK_SIZE, "triton")
            print(f"{line}  kernels {stack.step_us(batch, 336, backend):7.0f}", flush=True)


SECTIONS: Final[dict[str, Callable[[float], None]]] = {
    "attention": time_attention,
    "sampling": time_sampling,
    "small": time_small,
    "matmul": time_matmul,
    "step": time_step,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[*SECTIONS])
    parser.add_argument("--bandwidth", type=float, default=4.2, help="TB/s that `floor` assumes")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for name in arguments.sections or SECTIONS:
        SECTIONS[name](arguments.bandwidth)


if __name__ == "__main__":
    main()
