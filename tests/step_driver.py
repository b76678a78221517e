"""Plans naive steps for a worker's Runner, and makes the tiny models it runs.

Like a core without a queue: every request gets its slot at its starting step, prefills in chunks of
a fixed size, then decodes; its block table grows one block at a time.

Run as a program it is one rank of several: see `run_ranks`.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import FileStore

from nvserve.protocol.config import Config, ModelFacts
from nvserve.protocol.control import StartEpoch
from nvserve.protocol.messages import (
    Chunks,
    Logprobs,
    NewRows,
    SchedulerOutput,
    TableChanges,
    pack_ids,
    unpack_ids,
)
from nvserve.protocol.progress import ProgressPage
from nvserve.protocol.sampling import SamplingParams
from nvserve.workers.engine import TorchEngine
from nvserve.workers.models.decoder import NUM_PLACES, Decoder
from nvserve.workers.models.registry import read_config
from nvserve.workers.peer_memory import MAX_ROWS, Crossover, Layout, open_for_all
from nvserve.workers.roll_call import RollCall
from nvserve.workers.runner import Runner
from nvserve.workers.step_result import StepResult

NUM_BLOCKS = 300
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass
class Ask:
    """One request of a test."""

    prompt: list[int]
    num_new: int
    sampling: SamplingParams = GREEDY
    seed: int = 0
    slot: int = -1  # -1: its index
    start_step: int = 0
    emitted: list[int] = field(default_factory=list)  # before a preemption or a crash


@dataclass
class Run:
    """An Ask under way: `tokens` are known, `num_cached` of them have their KV written."""

    ask: Ask
    slot: int
    tokens: list[int]
    num_cached: int = 0
    blocks: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # of the step's answer, for each output token
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)

    @property
    def is_unfinished(self) -> bool:
        return len(self.output) < self.ask.num_new


class StepDriver:
    """Runs requests to their end on one Runner; may be used again and again."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.step = 0
        self._free = list(range(runner.batch.num_blocks - 1, 0, -1))

    def generate(self, asks: list[Ask], *, chunk_tokens: int = 64) -> list[list[int]]:
        """The new tokens of every request."""
        return [run.output for run in self.run(asks, chunk_tokens=chunk_tokens)]

    def run(self, asks: list[Ask], *, chunk_tokens: int = 64) -> list[Run]:
        runs = [
            Run(ask, ask.slot if ask.slot >= 0 else index, ask.prompt + ask.emitted)
            for index, ask in enumerate(asks)
        ]
        waiting, chunking, decoding, joins = list(runs), list[Run](), list[Run](), list[Run]()
        freed = list[int]()
        number = 0
        while waiting or chunking or decoding or joins or freed:
            new = [run for run in waiting if run.ask.start_step <= number]
            waiting = [run for run in waiting if run.ask.start_step > number]
            chunking += new
            decoding += joins
            delta = SchedulerOutput(
                0,
                self.step,
                freed=freed or None,
                new=_new_rows(new) if new else None,
                joins=[run.slot for run in joins] or None,
            )
            self._run_step(delta, decoding, chunking, chunk_tokens)
            joins = [run for run in chunking if run.output and run.is_unfinished]
            chunking = [run for run in chunking if not run.output]
            freed = [run.slot for run in runs if run.blocks and not run.is_unfinished]
            for run in runs:
                if run.blocks and not run.is_unfinished:
                    self._free += run.blocks
                    run.blocks = []
            decoding = [run for run in decoding if run.is_unfinished]
            number += 1
        return runs

    def _run_step(
        self, delta: SchedulerOutput, decoding: list[Run], chunking: list[Run], limit: int
    ) -> None:
        """One step: a token for each of `decoding`, a chunk for each of `chunking`."""
        counts = [min(limit, len(run.tokens) - run.num_cached) for run in chunking]
        samples = [
            run.num_cached + count == len(run.tokens)
            for run, count in zip(chunking, counts, strict=True)
        ]
        chunks = _chunks(chunking, counts, samples) if chunking else None
        for run, count in zip(chunking, counts, strict=True):
            run.num_cached += count
        for run in decoding:
            run.num_cached += 1
        everyone = decoding + chunking
        step = msgspec.structs.replace(
            delta,
            is_full_tail=any(run.ask.sampling.needs_full_tail for run in everyone),
            tables=self._grow(everyone),
            chunks=chunks,
        )
        self.step += 1
        pending = self.runner.launch(step)
        give_up = time.monotonic() + 60.0
        while not pending.is_done():  # on a CPU it is
            assert time.monotonic() < give_up, "the step does not end"
        _take(decoding + list(compress(chunking, samples)), chunking, pending.result())

    def _grow(self, runs: list[Run]) -> TableChanges | None:
        """Give every run the blocks that its cached tokens need."""
        slots, starts, counts, blocks = list[int](), list[int](), list[int](), list[int]()
        for run in runs:
            missing = -(-run.num_cached // self.runner.batch.block_size) - len(run.blocks)
            if missing > 0:
                taken = [self._free.pop() for _ in range(missing)]
                slots.append(run.slot)
                starts.append(len(run.blocks))
                counts.append(missing)
                blocks += taken
                run.blocks += taken
        return TableChanges(slots, starts, counts, pack_ids(blocks)) if slots else None


def _new_rows(runs: list[Run]) -> NewRows:
    params = [run.ask.sampling for run in runs]
    needs_history = [p.has_penalties or p.min_tokens > 0 for p in params]
    histories = list(zip(runs, needs_history, strict=True))
    return NewRows(
        slots=[run.slot for run in runs],
        sampling=params,
        seeds=[run.ask.seed for run in runs],
        prompts=[pack_ids(run.ask.prompt) if needs else b"" for run, needs in histories],
        outputs=[pack_ids(run.ask.emitted) if needs else b"" for run, needs in histories],
    )


def _chunks(runs: list[Run], counts: list[int], samples: list[bool]) -> Chunks:
    starts = [run.num_cached for run in runs]
    tokens = [
        token
        for run, start, count in zip(runs, starts, counts, strict=True)
        for token in run.tokens[start : start + count]
    ]
    return Chunks([run.slot for run in runs], starts, counts, pack_ids(tokens), samples)


def _take(rows: list[Run], chunked: list[Run], result: StepResult) -> None:
    tokens = unpack_ids(result.tokens)
    assert len(tokens) == len(rows)
    for row, (run, token) in enumerate(zip(rows, tokens, strict=True)):
        run.tokens.append(token)
        run.output.append(token)
        run.rows.append(row)
    if result.logprobs is not None:
        for row in result.logprobs.rows:
            rows[row].logprobs.append(result.logprobs)
    for run, score in zip(chunked, result.prompt_logprobs or [], strict=False):
        if score is not None:
            run.prompt_logprobs.append(score)


# -- models and runners --------------------------------------------------------------------------


def make_config(model: Path, **changes: object) -> Config:
    """A small launch on the CPU in float32."""
    read = read_config(model)
    facts = ModelFacts(read.architecture, read.vocab_size, read.num_layers, read.num_kv_heads, 256)
    settings: dict[str, object] = {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "block_size": 4,
    }
    return Config(str(model), facts, ["tiny"], **{**settings, **changes})  # type: ignore[arg-type]


def make_engine(model: Path, launch_dir: Path, **changes: object) -> TorchEngine:
    """An engine that has begun no epoch."""
    page = ProgressPage(str(launch_dir / f"worker{os.getpid()}.page"))
    return TorchEngine(make_config(model, **changes), page)


def begin_epoch(
    engine: TorchEngine, launch_dir: Path, *, epoch: int = 0, rank: int = 0, size: int = 1
) -> StepDriver:
    """Join an epoch, waiting at most 60 s for the other ranks; a driver for its runner."""
    give_up = time.monotonic() + 60.0

    def wait(seconds: float) -> None:
        assert time.monotonic() < give_up, "the other ranks did not come"
        time.sleep(seconds)

    start = StartEpoch(epoch, size, rank, num_kv_blocks=NUM_BLOCKS)
    engine.begin(start, str(launch_dir), wait, lambda phase, done: None)
    return StepDriver(engine.runner)


def make_driver(model: Path, launch_dir: Path, **changes: object) -> StepDriver:
    """A single rank, ready for steps."""
    return begin_epoch(make_engine(model, launch_dir, **changes), launch_dir)


def save_model(folder: Path, architecture: str, **changes: object) -> Any:
    """Write a tiny model with random weights; returns it as transformers runs it, in float32.

    The weights are large enough that logits are far apart, and so are not near ties.
    """
    import transformers  # seconds to import, and rank processes do without

    torch.manual_seed(0)
    settings: dict[str, object] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    kind = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    config = kind(**{**settings, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    model = model.float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:  # norms start at 1 and biases at 0, which would hide mistakes
                weight.add_(torch.randn_like(weight) * (0.2 if "norm" in name else 0.5))
    model.save_pretrained(folder)
    return model


def greedy_reference(model: Any, prompt: list[int], num_new: int) -> list[int]:
    """What transformers generates, without its cache."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_new):
            logits = model(torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


# -- several ranks -------------------------------------------------------------------------------


class Case(msgspec.Struct):
    """Requests that run together."""

    asks: list[Ask]
    chunk_tokens: int = 64


class Job(msgspec.Struct):
    """What one rank shall do; it answers with the new tokens of each case's requests."""

    model: str
    launch_dir: str
    rank: int
    size: int
    cases: list[Case]
    changes: dict[str, str | int] = {}
    has_peer_memory: bool = False


RANK_LIMIT_S = 120.0
ONE_SHOT_ROWS = 4  # of sums through peer memory; those of chunks go in two shots
TESTS = Path(__file__).parent


def run_ranks(
    model: Path,
    launch_dir: Path,
    size: int,
    cases: list[Case],
    *,
    has_peer_memory: bool = False,
    **changes: str | int,
) -> list[list[list[int]]]:
    """The new tokens by case and request, from ranks that are processes and agree on them.

    With peer memory, which are files here, all kernels are those of Triton, interpreted.
    """
    jobs = [
        Job(str(model), str(launch_dir), rank, size, cases, changes, has_peer_memory)
        for rank in range(size)
    ]
    command = [sys.executable, "-W", "error", __file__]
    pipe = subprocess.PIPE
    paths = os.pathsep.join([str(TESTS.parent / ".src"), str(TESTS)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    if has_peer_memory:
        environment["TRITON_INTERPRET"] = "1"
    ranks = [subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe) for _ in jobs]
    try:
        with ThreadPoolExecutor(size) as pool:
            outputs = list(pool.map(_communicate, ranks, jobs))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    answers = [msgspec.json.decode(out, type=list[list[list[int]]]) for out in outputs]
    assert all(answer == answers[0] for answer in answers), "the ranks sampled different tokens"
    return answers[0]


def _communicate(rank: "subprocess.Popen[bytes]", job: Job) -> bytes:
    output, _ = rank.communicate(msgspec.json.encode(job), timeout=RANK_LIMIT_S)
    assert rank.returncode == 0, f"rank {job.rank} exited with {rank.returncode}"
    return output


def _run_rank(job: Job) -> list[list[list[int]]]:
    torch.set_num_threads(1)
    if job.has_peer_memory:
        import triton_interpreter  # triton is absent from CPU-only installs

        triton_interpreter.mend(checks_overflow=False)
    launch_dir = Path(job.launch_dir)
    engine = make_engine(Path(job.model), launch_dir, tp_size=job.size, **job.changes)
    driver = begin_epoch(engine, launch_dir, rank=job.rank, size=job.size)
    if job.has_peer_memory:
        _use_peer_memory(driver.runner.model, job)
    answers = [driver.generate(c.asks, chunk_tokens=c.chunk_tokens) for c in job.cases]
    peers = driver.runner.model.parallel.peers
    assert (peers is not None) == job.has_peer_memory
    if peers is not None:
        assert peers.meeting.turns.any(), "no sum went through peer memory in one shot"
        assert peers.meeting.calls.any(), "no sum went through peer memory in two shots"
    engine.end()
    return answers


def _use_peer_memory(model: Decoder, job: Job) -> None:
    """The host's memory in place of that of GPUs."""
    from memfd_memory import use_memfds

    use_memfds()
    launch_dir = Path(job.launch_dir)
    store = FileStore(str(launch_dir / "peers"), job.size)
    roll = RollCall(store, job.rank, job.size, lambda: time.sleep(0.001))
    layout = Layout(job.size, NUM_PLACES, model.config.hidden_size, model.dtype)
    peers = model.parallel.peers = open_for_all(layout, roll, launch_dir / "memory")
    if peers is not None:
        peers.crossover = Crossover(ONE_SHOT_ROWS, MAX_ROWS)


if __name__ == "__main__":
    answers = _run_rank(msgspec.json.decode(sys.stdin.buffer.read(), type=Job))
    sys.stdout.buffer.write(msgspec.json.encode(answers))
