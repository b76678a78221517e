"""Core's Scheduler joined to a worker's Runner on the CPU, and what requests answer when alone.

CUDA graphs have a stand-in that captures without running and replays by calling.
"""

import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import torch
from step_driver import (
    NUM_BLOCKS,
    Ask,
    StepDriver,
    begin_epoch,
    greedy_reference,
    make_engine,
    save_model,
)

from nvserve.core.limits import Limits
from nvserve.core.replies import Replies, Reply
from nvserve.core.scheduler import Scheduler
from nvserve.core.step_ledger import Report
from nvserve.protocol.messages import (
    Emits,
    FinishReason,
    Logprobs,
    Refused,
    SchedulerOutput,
    Submit,
    pack_ids,
    unpack_ids,
)
from nvserve.protocol.sampling import SamplingParams
from nvserve.workers.graphs import DecodeGraphs, GraphPool
from nvserve.workers.main import answer
from nvserve.workers.mixed_graphs import MixedGraphs
from nvserve.workers.runner import Runner

VOCAB: Final = 97
MAX_SEQS: Final = 6
MAX_LEN: Final = 128
MAX_NEW: Final = 24
GREEDY: Final = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=MAX_NEW)
# Changes of GREEDY. The first three must answer what it does; "words" gets its word by prompt.
KINDS: Final[dict[str, dict[str, object]]] = {
    "greedy": {},
    "logprobs": {"logprobs": 2},
    "scores": {"prompt_logprobs": 1},
    "warm": {"temperature": 0.9},
    "top-p": {"temperature": 0.9, "top_p": 0.8},
    "top min-p": {"temperature": 1.3, "top_p": 0.95, "min_p": 0.1},
    "warm bias": {"temperature": 0.9, "logit_bias": {3: 6.0, 0: -100.0, 96: 4.0}},
    "warm allowed": {"temperature": 0.9, "allowed_token_ids": list(range(0, 97, 5))},
    "top-k": {"temperature": 1.2, "top_k": 7, "logprobs": 0},
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    "warm penalties": {"temperature": 0.9, "repetition_penalty": 1.4},
    "words": {"bad_words": []},
}
GREEDY_KINDS: Final = ("greedy", "logprobs", "scores")

# -- graphs ---------------------------------------------------------------------------------------


class Recorded:
    """Like a CUDA graph: fixed memory for its results, filled by every replay."""

    def __init__(self, pool: "RecordingPool", run: Callable[[], Any], memory: Any) -> None:
        self._pool = pool
        self._run = run
        self._memory = memory if isinstance(memory, tuple) else (memory,)

    def replay(self) -> None:
        results = self._run()
        self._pool.replayed(self)
        results = results if isinstance(results, tuple) else (results,)
        for memory, result in zip(self._memory, results, strict=True):
            memory[: len(result)] = result

    def spoil(self) -> None:
        for memory in self._memory:
            memory.fill_(-7)


class RecordingPool:
    """Captures without running, as CUDA does; whether one is due is drawn.

    Results of a replay last until the next one of any graph.
    """

    def __init__(self, draw: random.Random, share_due: float) -> None:
        self._draw = draw
        self._share_due = share_due
        self._is_capturing = False
        self._recorded: tuple[Callable[[], Any], Any] | None = None
        self.graphs: list[Recorded] = []
        self.num_replays = 0

    @property
    def is_due(self) -> bool:
        return self._draw.random() < self._share_due

    def recordable(
        self, function: Callable[..., Any], make_memory: Callable[[], Any]
    ) -> Callable[..., Any]:
        """The function, which during a capture is only noted."""

        def call(*arguments: Any) -> Any:
            if not self._is_capturing:
                return function(*arguments)
            memory = make_memory()
            self._recorded = (lambda: function(*arguments), memory)
            return memory

        return call

    def rehearse(self, function: Callable[[], object]) -> None:
        function()

    def capture(self, function: Callable[[], Any]) -> tuple[Recorded, Any]:
        self._is_capturing = True
        results = function()
        self._is_capturing = False
        assert self._recorded is not None
        self.graphs.append(Recorded(self, *self._recorded))
        return self.graphs[-1], results

    def replayed(self, graph: Recorded) -> None:
        self.num_replays += 1
        for other in self.graphs:
            if other is not graph:
                other.spoil()


def use_graphs(runner: Runner, pool: RecordingPool) -> None:
    """What Runner.use_graphs does on a GPU, with nothing captured yet."""

    def ids() -> torch.Tensor:
        return torch.full((64,), -7, dtype=torch.int32)

    def hidden_and_positions() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((64, runner.model.config.hidden_size), -7.0), torch.full((64,), -7)

    batch, graph_pool = runner.batch, cast(GraphPool, pool)
    step = pool.recordable(runner.plain_step, ids)
    forward = pool.recordable(runner.decode_forward, hidden_and_positions)
    mixed = pool.recordable(runner.mixed_step, ids)
    rows = (batch.rows, batch.padding)
    runner.graphs = DecodeGraphs(graph_pool, step, forward, *rows, batch.num_slots - 1)
    runner._mixed_graphs = MixedGraphs(graph_pool, mixed, batch, runner._staging)


# -- core and worker ------------------------------------------------------------------------------


class Device:
    """An engine that begins one epoch after the other, each on a pool full of rubbish."""

    def __init__(self, model: Path, launch_dir: Path, block_size: int) -> None:
        launch_dir.mkdir()
        self._launch_dir = launch_dir
        self.block_size: Final = block_size
        self.engine = make_engine(
            model, launch_dir, block_size=block_size, max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN
        )
        self._epoch = -1

    def begin(self) -> tuple[int, StepDriver]:
        self._epoch += 1
        driver = begin_epoch(self.engine, self._launch_dir, epoch=self._epoch)
        for layer in driver.runner.cache.layers:
            for part in layer:
                part.normal_(std=3.0)
        return self._epoch, driver


@dataclass
class Output:
    """What the client of a request got."""

    tokens: list[int] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)  # logprobs
    scores: list[float] = field(default_factory=list)  # of the prompt
    finish: FinishReason = FinishReason.NONE
    is_refused: bool = False


class Joint:
    """Core and one worker; messages between them move when told to."""

    def __init__(self, device: Device, limits: Limits, num_blocks: int) -> None:
        assert num_blocks <= NUM_BLOCKS
        self.device: Final = device
        self.replies: Final = Replies(1)
        self.scheduler: Final = Scheduler(limits, self.replies, b"key")
        self.outputs: Final[dict[int, Output]] = {}
        self.steps: Final[deque[SchedulerOutput]] = deque()  # on their way to the worker
        self.reports: Final[deque[Report]] = deque()  # and back
        self._num_blocks = num_blocks
        self.begin_epoch()

    @property
    def runner(self) -> Runner:
        return self.device.engine.runner

    def begin_epoch(self, *, is_blamed: bool = False) -> None:
        """Reports of the one before may still come."""
        self.steps.clear()
        epoch, _ = self.device.begin()
        self.scheduler.start_epoch(
            epoch=epoch, tp_size=1, num_kv_blocks=self._num_blocks, is_blamed=is_blamed
        )

    def submit(self, message: Submit, emitted: list[int]) -> None:
        """A new request, of whose output its client has `emitted` already."""
        self.outputs[message.request_id] = Output(list(emitted))
        self.scheduler.submit(message)
        self.collect()

    def plan(self) -> bool:
        step = self.scheduler.plan()
        if step is not None:
            self.steps.append(step)
        return step is not None

    def launch(self) -> None:
        """The worker runs the next step; on a CPU it is done at once."""
        step = self.steps.popleft()
        result = self.runner.launch(step).result()
        self.reports.append(answer(result, epoch=step.epoch, step=step.step, rank=0))

    def report(self) -> None:
        report = self.reports.popleft()
        broken = self.scheduler.report(report, 0.0)
        assert broken is None, broken
        self.collect()

    def collect(self) -> None:
        """The client reads."""
        assert self.replies.flush(self._read)

    def run_to_end(self) -> None:
        while True:
            if self.reports:
                self.report()
            elif self.steps:
                self.launch()
            elif not self.plan():
                return

    def _read(self, reply: Reply) -> bool:
        match reply:
            case Refused():
                self.outputs[reply.request_id].is_refused = True
            case Emits():
                self._read_emits(reply)
        return True

    def _read_emits(self, emits: Emits) -> None:
        tokens = unpack_ids(emits.tokens)
        for row, request_id in enumerate(emits.request_ids):
            output = self.outputs[request_id]
            assert output.finish is FinishReason.NONE, f"{request_id}: a reply after its last"
            assert emits.firsts[row] == len(output.tokens)
            output.tokens += tokens[: emits.counts[row]]
            del tokens[: emits.counts[row]]
            output.finish = emits.finishes[row]
            output.chosen += _chosen(emits.logprobs, row)
            output.scores += _chosen(emits.prompt_logprobs, row)


def _chosen(columns: list[Logprobs | None] | None, row: int) -> list[float]:
    column = None if columns is None else columns[row]
    return [] if column is None else array("f", column.chosen).tolist()


# -- references -----------------------------------------------------------------------------------


class Reference:
    """What each request answers when it is alone, and the KV of its tokens; computed once."""

    def __init__(self, model: Any, device: Device) -> None:
        self._model = model
        self._device = device
        self._greedy: dict[tuple[int, ...], list[int]] = {}
        self._outputs: dict[tuple[tuple[int, ...], str, int], Output] = {}
        self._kv: dict[tuple[int, ...], torch.Tensor] = {}

    def greedy(self, prompt: list[int]) -> list[int]:
        """MAX_NEW tokens, of transformers."""
        key = tuple(prompt)
        if key not in self._greedy:
            self._greedy[key] = greedy_reference(self._model, prompt, MAX_NEW)
        return self._greedy[key]

    def sampling(self, prompt: list[int], kind: str) -> SamplingParams:
        params = msgspec.structs.replace(GREEDY, **KINDS[kind])
        if kind != "words":
            return params
        return msgspec.structs.replace(params, bad_words=[self.greedy(prompt)[3:5]])

    def output(self, prompt: list[int], kind: str, seed: int) -> Output:
        """MAX_NEW tokens of such a request, from a core and a worker with nothing else to do."""
        if kind == "greedy":
            return Output(self.greedy(prompt))
        key = (tuple(prompt), kind, seed)
        if key not in self._outputs:
            output = self._outputs[key] = self._alone(prompt, kind, seed)
            if kind in GREEDY_KINDS:
                assert output.tokens == self.greedy(prompt)
        return self._outputs[key]

    def _alone(self, prompt: list[int], kind: str, seed: int) -> Output:
        joint = Joint(self._device, make_limits(self._device, has_prefix_cache=False), NUM_BLOCKS)
        joint.submit(submit(1, prompt, self.sampling(prompt, kind), seed), [])
        joint.run_to_end()
        output = joint.outputs[1]
        assert output.finish is FinishReason.LENGTH
        return output

    def kv(self, tokens: list[int]) -> torch.Tensor:
        """Keys and values of these tokens, [tokens, layers * 2 * K * D]."""
        key = tuple(tokens)
        if key not in self._kv:
            _, driver = self._device.begin()
            driver.generate([Ask(tokens, 1)], chunk_tokens=len(tokens))
            blocks = list(range(1, 2 + (len(tokens) - 1) // self._device.block_size))
            self._kv[key] = read_kv(driver.runner, blocks)[: len(tokens)]
        return self._kv[key]


def read_kv(runner: Runner, blocks: list[int]) -> torch.Tensor:
    """What these blocks hold, [tokens, layers * 2 * K * D]."""
    parts = [part[blocks].flatten(0, 1).flatten(1) for pair in runner.cache.layers for part in pair]
    return torch.cat(parts, dim=1)


def submit(
    request_id: int,
    prompt: list[int],
    sampling: SamplingParams,
    seed: int,
    emitted: list[int] | None = None,
    priority: int = 0,
) -> Submit:
    columns = (pack_ids(prompt), pack_ids(emitted or []))
    arrival = float(request_id)
    return Submit(1, 1, request_id, *columns, sampling, seed, arrival, priority=priority)


def make_limits(device: Device, **changes: Any) -> Limits:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "max_model_len": MAX_LEN,
        "max_num_seqs": MAX_SEQS,
        "max_num_batched_tokens": 256,
        "max_queued_requests": 100,
        "block_size": device.block_size,
    }
    return Limits(**fields | changes)


class Rig:
    """Everything that histories of one block size share."""

    def __init__(self, folder: Path, block_size: int) -> None:
        torch.set_num_threads(1)
        model = save_model(folder / "model", "LlamaForCausalLM")
        self.device: Final = Device(folder / "model", folder / "joint", block_size)
        alone = Device(folder / "model", folder / "alone", block_size)
        self.reference: Final = Reference(model, alone)
