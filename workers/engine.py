"""One rank on a CPU or a GPU: its weights, its KV pool, its place in the group, its runner.

Weights are loaded once and outlive every epoch, and so does the pool; the group and the batch are
those of one epoch. A rank without peers compiles its kernels while it loads; others need the group,
since their steps hold its collectives.
"""

import logging
import os
import time
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Final

import torch

from nvserve.kernels.attention import select_backend
from nvserve.protocol.config import Config
from nvserve.protocol.control import EpochReady, StartEpoch
from nvserve.protocol.messages import SchedulerOutput
from nvserve.protocol.progress import Phase, ProgressPage
from nvserve.workers import loader
from nvserve.workers.batch import Batch
from nvserve.workers.devices import Place, choose_gpu
from nvserve.workers.kv_cache import (
    KvCache,
    available_memory_bytes,
    block_bytes,
    num_cpu_blocks,
    num_cuda_blocks,
)
from nvserve.workers.models.config import DecoderConfig, check_parallel
from nvserve.workers.models.decoder import NUM_PLACES, Decoder
from nvserve.workers.models.registry import read_config
from nvserve.workers.parallel import ABORT_LIMIT_S, DEFAULT_LIMIT_S, POLL_S, TensorParallel
from nvserve.workers.peer_memory import Layout
from nvserve.workers.pending_step import PendingStep
from nvserve.workers.runner import Runner
from nvserve.workers.staging import Staging
from nvserve.workers.step_result import ModelRefused, PeerLost, Report, Wait

logger = logging.getLogger(__name__)

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
CPU_WARM_UP_TOKENS: Final = 16
COMPILE_LIMIT_S: Final = 100.0  # also of what then runs


class TorchEngine:
    """Runs the model of one rank; see step_result.Engine for the contract."""

    def __init__(self, config: Config, page: ProgressPage) -> None:
        self._config = config
        self._page = page
        self._dtype = DTYPES[config.dtype]
        self._parallel = TensorParallel()
        self._model: Decoder | None = None
        self._cache: KvCache | None = None
        self._runner: Runner | None = None
        self._is_warm = False  # the largest step ran since the weights were loaded
        self._is_compiled = False  # what it needs was, for these weights
        self._compile_s = 0.0  # of this epoch: what was waited for

    def begin(self, start: StartEpoch, launch_dir: str, wait: Wait, report: Report) -> EpochReady:
        self.end()
        try:
            return self._begin(start, launch_dir, wait, report)
        except (RuntimeError, ValueError, AssertionError) as error:
            if isinstance(error, PeerLost) or not self.is_aborted:
                raise
            raise PeerLost(f"the group is gone: {error}") from error

    def _begin(self, start: StartEpoch, launch_dir: str, wait: Wait, report: Report) -> EpochReady:
        self._page.beat(Phase.LOADING if self._model is None else Phase.REBUILDING)
        self._await_device("the last epoch's steps", wait)
        began = time.monotonic()
        self._compile_s = 0.0
        model = self._load(start, report)
        loaded, ahead_s = time.monotonic(), self._compile_s
        report("group", 0.0)
        self._parallel.join(launch_dir, start.epoch, model.device, wait)
        joined = time.monotonic()
        report("warm-up", 0.0)
        runner = self._make_runner(model, start)
        if not self._is_warm or self._parallel.size > 1:  # a new group has yet to connect
            self._compile(runner)
            runner.warm_up(self._num_warm_up_tokens(model.device))
            self._await_device("the warm-up", wait)  # what it staged is free for steps again
            self._is_warm = True
        warm = time.monotonic()
        if self._wants_graphs(runner):
            # All ranks alike, newcomers too: after the start those wanted come with their steps.
            are_all_wanted = self._parallel.size > 1 and start.epoch == 0
            runner.use_graphs(self._config.max_num_seqs, are_all_wanted=are_all_wanted)
        runner.compile_full_tail()
        if runner.graphs is not None:
            logger.info("epoch %d has %d CUDA graphs", start.epoch, runner.graphs.num_captured)
        phases = {
            "weights": loaded - began - ahead_s,
            "group": joined - loaded,
            "compile": self._compile_s,
            "warm-up": warm - joined - (self._compile_s - ahead_s),
            "graphs": time.monotonic() - warm,
        }
        return EpochReady(start.epoch, runner.batch.num_blocks, phases, runner.backend.name)

    @property
    def runner(self) -> Runner:
        assert self._runner is not None, "no epoch has begun"
        return self._runner

    @property
    def final_norm(self) -> torch.Tensor:
        """The last norm's weights [N], for injected faults."""
        return self.runner.model.final_norm

    def launch(self, step: SchedulerOutput) -> PendingStep:
        return self.runner.launch(step)

    def prepare_ahead(self) -> bool:
        return self._runner is not None and self._runner.capture_next()

    @property
    def is_aborted(self) -> bool:
        return self._parallel.is_aborted

    def abort(self) -> None:
        self._parallel.abort()

    def end(self) -> None:
        """Also drops the graphs: NCCL waits for those that hold a collective of the group's."""
        self._parallel.abort()
        if self._parallel.size > 1:
            give_up = time.monotonic() + ABORT_LIMIT_S
            while not self._is_device_done():
                if time.monotonic() > give_up:
                    raise PeerLost(f"the device goes on for {ABORT_LIMIT_S:g} s after an abort")
                self._page.beat()
                time.sleep(POLL_S)
            if self._runner is not None:
                self._runner.drop_graphs()
        self._parallel.leave()

    def _await_device(self, what: str, wait: Wait) -> None:
        give_up = time.monotonic() + COMPILE_LIMIT_S
        while not self._is_device_done():
            if time.monotonic() > give_up:
                raise RuntimeError(f"{what} did not end in {COMPILE_LIMIT_S:g} s")
            wait(POLL_S)

    def _is_device_done(self) -> bool:
        """Has the device run all it was given?"""
        if self._config.device == "cpu" or not torch.cuda.is_initialized():
            return True
        return torch.cuda.current_stream().query()

    def _wants_graphs(self, runner: Runner) -> bool:
        """Not yet made, and possible: gloo's collectives cannot be captured."""
        if self._config.enforce_eager or runner.model.device.type != "cuda":
            return False
        if not runner.backend.can_be_captured:
            logger.warning("attention by %s: no CUDA graphs, steps run eager", runner.backend.name)
            return False
        return self._parallel.can_be_captured and runner.graphs is None

    def _load(self, start: StartEpoch, report: Report) -> Decoder:
        """The model of this rank; loaded already unless the rank is new to this process."""
        wanted = (start.rank, start.tp_size)
        if self._model is not None and wanted == (self._parallel.rank, self._parallel.size):
            return self._model
        self._model = self._cache = self._runner = None
        self._is_warm = self._is_compiled = False
        architecture = read_config(Path(self._config.model))
        check_parallel(architecture, start.tp_size)
        place = self._place(start)
        device = self._open_device(start, place)
        limit_s = max(DEFAULT_LIMIT_S, 4 * self._config.hang_timeout_s)
        self._parallel.release()
        self._parallel = TensorParallel(
            start.rank,
            start.tp_size,
            self._page,
            limit_s,
            wants_gloo=place.is_shared,
            layout=self._peer_layout(architecture, start.tp_size),
        )
        self._model = self._load_weights(architecture, device, report)
        return self._model

    def _peer_layout(self, architecture: DecoderConfig, tp_size: int) -> Layout | None:
        if tp_size == 1 or self._config.disable_custom_all_reduce:
            return None
        return Layout(tp_size, NUM_PLACES, architecture.hidden_size, self._dtype)

    def _load_weights(
        self, architecture: DecoderConfig, device: torch.device, report: Report
    ) -> Decoder:
        config = self._config
        # Padding and warm-up have positions up to the end of the last block.
        num_positions = -(-config.max_model_len // config.block_size) * config.block_size
        model = Decoder(architecture, self._parallel, num_positions, device, self._dtype)

        def report_weights(done: float) -> None:
            self._page.beat(Phase.LOADING)
            report("weights", done)

        parameters = model.parameters()  # before a thread takes most layers off the model
        compiling = self._compile_ahead(model) if self._parallel.size == 1 else None
        if config.load_format == "dummy":
            loader.load_dummy(parameters, config.seed, report_weights)
        else:
            path = Path(config.model)
            loader.load(path, parameters, architecture.is_tied, report_weights)
        if compiling is not None:
            loaded = time.monotonic()
            try:
                compiling.result(COMPILE_LIMIT_S)
            except TimeoutError:
                text = f"the kernels did not compile in {COMPILE_LIMIT_S:g} s"
                raise RuntimeError(text) from None
            self._compile_s += time.monotonic() - loaded
            self._is_compiled = True
        return model

    def _compile_ahead(self, model: Decoder) -> "Future[None]":
        """Compile in a thread, whatever the weights hold."""
        runner = self._assemble(model, self._make_cache(model, 1))
        done: Future[None] = Future()

        def run() -> None:
            try:
                if model.device.type == "cuda":
                    torch.cuda.set_device(model.device)
                runner.compile_kernels(self._num_warm_up_tokens(model.device))
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        Thread(target=run, name="compile", daemon=True).start()
        return done

    def _place(self, start: StartEpoch) -> Place:
        if self._config.device == "cpu":
            return Place(0, is_shared=False)
        return choose_gpu(
            rank=start.rank,
            tp_size=start.tp_size,
            num_gpus=torch.cuda.device_count(),
            may_share=self._config.share_gpu,
        )

    def _open_device(self, start: StartEpoch, place: Place) -> torch.device:
        if self._config.device == "cpu":
            # Threads that find no core make the others spin at every barrier: ranks share the
            # cores, and one is left to core and frontend. OMP_NUM_THREADS may ask for fewer.
            num_cores = len(os.sched_getaffinity(0))
            num_threads = max(1, (num_cores - 1) // start.tp_size)
            torch.set_num_threads(min(torch.get_num_threads(), num_threads))
            return torch.device("cpu")
        device = torch.device("cuda", place.index)
        torch.cuda.set_device(device)
        return device

    def _make_runner(self, model: Decoder, start: StartEpoch) -> Runner:
        """The runner of this epoch, with empty slots; the pool is made with the first."""
        if self._cache is None or start.num_kv_blocks not in (0, self._cache.num_blocks):
            self._cache = self._runner = None
            num_blocks = start.num_kv_blocks or self._num_blocks(model)
            self._cache = self._make_pool(model, num_blocks)
        if self._runner is None:
            self._runner = self._assemble(model, self._cache)
        self._runner.clear()
        return self._runner

    def _make_pool(self, model: Decoder, num_blocks: int) -> KvCache:
        """ModelRefused where it does not fit."""
        try:
            return self._make_cache(model, num_blocks)
        except (MemoryError, torch.OutOfMemoryError) as error:
            size = num_blocks * block_bytes(model.shard, self._config.block_size, self._dtype)
            raise ModelRefused(
                f"{num_blocks} KV blocks (--num-kv-blocks) take {size / 2**30:.1f} GiB: {error}"
            ) from error

    def _make_cache(self, model: Decoder, num_blocks: int) -> KvCache:
        return KvCache(
            model.shard,
            num_blocks=num_blocks,
            block_size=self._config.block_size,
            device=model.device,
            dtype=self._dtype,
        )

    def _num_blocks(self, model: Decoder) -> int:
        """The pool's size where the launcher leaves it to us: as much as fits, scratch included."""
        config = self._config
        bytes_per_block = block_bytes(model.shard, config.block_size, self._dtype)
        if model.device.type == "cpu":
            return num_cpu_blocks(config, bytes_per_block, available_memory_bytes())
        return num_cuda_blocks(config, bytes_per_block, model.device, self._peak_bytes(model))

    def _peak_bytes(self, model: Decoder) -> int:
        """Memory that the largest step takes beyond what is there before it."""
        runner = self._assemble(model, self._make_cache(model, 1))
        self._compile(runner)
        before = torch.cuda.memory_allocated(model.device)
        torch.cuda.reset_peak_memory_stats(model.device)
        runner.warm_up(self._config.max_num_batched_tokens)
        self._is_warm = True
        return torch.cuda.max_memory_allocated(model.device) - before

    def _compile(self, runner: Runner) -> None:
        if self._is_compiled:
            return
        began = time.monotonic()
        runner.compile_kernels(self._num_warm_up_tokens(runner.model.device))
        self._compile_s += time.monotonic() - began

    def _assemble(self, model: Decoder, cache: KvCache) -> Runner:
        staging = Staging(model.device)
        batch = Batch(
            self._config,
            num_blocks=cache.num_blocks,
            vocab_size=model.config.vocab_size,
            device=model.device,
            staging=staging,
        )
        override = self._config.attention_backend or None
        try:
            backend = select_backend(
                model.device, self._dtype, model.config.head_dim, cache.block_size, override
            )
        except ValueError as error:
            raise ModelRefused(str(error)) from error
        return Runner(model, batch, cache, backend, self._parallel, staging, self._page)

    def _num_warm_up_tokens(self, device: torch.device) -> int:
        limit = self._config.max_num_batched_tokens
        return limit if device.type == "cuda" else min(limit, CPU_WARM_UP_TOKENS)
