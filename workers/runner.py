"""Runs steps: a SchedulerOutput becomes one forward pass and one sampled id a row.

A step without chunks takes the decode path, which reads and moves the decode list on the device and
waits for nothing. Everything else is a mixed step: one forward over decode rows and chunks. The
keys and values of a step's tokens are written before its attention reads the cache, or, in a decode
step of few rows, by the attention itself.

R rows that sample, T tokens of the step, N hidden size.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import compress
from threading import Thread
from typing import Final

import torch

from nvserve.kernels.attention import AttentionBackend
from nvserve.kernels.dispatch import HAS_TRITON
from nvserve.protocol.messages import Chunks, SchedulerOutput
from nvserve.protocol.progress import BEAT_S, Phase, ProgressPage
from nvserve.workers.batch import Batch, ChunkColumns, join_inputs
from nvserve.workers.graphs import DecodeGraphs, GraphPool, Pace
from nvserve.workers.kv_cache import KvCache
from nvserve.workers.mixed_graphs import MixedGraphs
from nvserve.workers.models.decoder import Decoder
from nvserve.workers.models.layers import StepInputs
from nvserve.workers.parallel import TensorParallel
from nvserve.workers.pending_step import PendingStep, Stopwatch
from nvserve.workers.prompt_scores import PromptScorer
from nvserve.workers.sampler import Sampled, Sampler
from nvserve.workers.staging import Staging

logger = logging.getLogger(__name__)

# One of each kind that kernels are compiled for, beside the whole batch.
COMPILED_ROWS: Final = (2, 1, 17, 33, 49, 112)
# Decode rows and prompt tokens of mixed steps, in which attention is not fused.
COMPILED_MIXED: Final = ((2, 1), (17, 1), (65, 1), (2, 17), (2, 33), (2, 112))
COMPILE_BEATS_S: Final = 60.0  # a step that waits longer for its kernels is silent from then on


class Runner:
    """Launches steps in order on one device; up to two may be on their way at a time."""

    def __init__(
        self,
        model: Decoder,
        batch: Batch,
        cache: KvCache,
        backend: AttentionBackend,
        parallel: TensorParallel,
        staging: Staging,
        page: ProgressPage | None = None,
    ) -> None:
        self.model = model
        self.batch = batch
        self.cache = cache
        self.backend = backend
        self._staging = staging
        self._page = page
        self._sampler = Sampler(batch.sampling, parallel, model.shard, staging)
        self._scorer = PromptScorer(model, parallel, batch.sampling)
        self.graphs: DecodeGraphs | None = None  # steps run eager without
        self._mixed_graphs: MixedGraphs | None = None
        self._graph_pool: GraphPool | None = None
        self._is_in_step: Final = parallel.size > 1  # captures: see graphs.py
        self._pace = Pace(is_in_step=self._is_in_step)
        self._stopwatch: Stopwatch | None = None  # of the last step launched
        self._full_tail: Thread | None = None  # compiles it; a step that needs it waits

    @torch.inference_mode()
    def use_graphs(self, max_rows: int, *, are_all_wanted: bool = False) -> None:
        """Replay decode steps of up to max_rows from now on.

        The largest bucket is captured now, or all of them.
        """
        self._pace = Pace(is_in_step=self._is_in_step)
        pool = GraphPool(self.model.device, self._pace, self._few_layers)
        self._graph_pool = pool
        batch, functions = self.batch, (self.plain_step, self.decode_forward)
        self.graphs = DecodeGraphs(pool, *functions, batch.rows, batch.padding, max_rows)
        self._mixed_graphs = MixedGraphs(pool, self.mixed_step, batch, self._staging)
        while self.graphs.capture_next() and are_all_wanted:
            self._beat(Phase.LOADING)

    def drop_graphs(self) -> None:
        """Graphs hold the collectives of a group, and go with it.

        The exception that ends an epoch may keep them from being freed, hence the reset.
        """
        if self._graph_pool is not None:
            self._graph_pool.reset()
        self.graphs = self._mixed_graphs = self._graph_pool = None

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture one more bucket, while no step is in flight; True while more are missing."""
        if self.graphs is None or self._mixed_graphs is None or self._is_in_step:
            return False
        with self._optional():
            return self.graphs.capture_next() or self._mixed_graphs.capture_next()
        return True  # the next one may do

    @contextmanager
    def _optional(self) -> Iterator[None]:
        """A graph that cannot be captured, for want of memory above all, costs speed, not a step.

        In a group the others may have captured it, and would wait for this rank's collectives.
        """
        try:
            yield
        except RuntimeError as error:
            if self._is_in_step:
                raise
            self._pace.note_capture()
            logger.warning("steps of one kind go without a CUDA graph: %s", error)

    def clear(self) -> None:
        """Forget every request: a new epoch begins."""
        self.batch.clear()
        self._scorer.clear()

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> PendingStep:
        """Start a step; the batch is then as it will be once the step is done.

        BadStep when the message cannot be; PeerLost when the group broke.
        """
        stopwatch = self._stopwatch = Stopwatch(self.model.device, self._stopwatch)
        self._pace.begin_step()
        self._staging.begin()
        self.batch.apply(step)
        self._scorer.forget(step.freed or [])
        self._beat(Phase.FORWARD)
        if step.chunks is not None and step.chunks.slots:
            pending = self._mixed(step, stopwatch)
        else:
            pending = self._decode(step, stopwatch)
            if self.graphs is not None and self.batch.decoding:
                with self._optional():
                    self.graphs.capture_for(len(self.batch.decoding))
        self._staging.end()
        return pending

    @torch.inference_mode()
    def compile_kernels(self, num_tokens: int) -> None:
        """Compile what warm_up and the common batch sizes need, kernels in parallel.

        Only where the attention is ours: others would run, on lengths that nothing wrote.
        """
        if self.model.device.type != "cuda" or self.backend.decode_fused is None:
            return
        # Triton is absent from CPU-only installs.
        from nvserve.kernels.compilation import compiling_only

        with self._few_layers(), compiling_only():
            first, *others = COMPILED_ROWS  # what takes longest comes first
            self.plain_step(self.batch.rows[:first])
            self.warm_up(num_tokens)
            for num_rows in others:
                self.plain_step(self.batch.rows[:num_rows])
            self._mix_few_tokens()
        self.batch.clear()
        torch.cuda.synchronize(self.model.device)  # what was staged is free again

    @contextmanager
    def _few_layers(self) -> Iterator[None]:
        """Inside, the model has two layers, which launch everything that all of them do."""
        layers, self.model.layers = self.model.layers, self.model.layers[:2]
        try:
            yield
        finally:
            self.model.layers = layers

    def _mix_few_tokens(self) -> None:
        """Mixed steps on the scratch slot: their decode rows are not fused with what is before.

        Of each kind of matmul too, for which there may be too few rows.
        """
        self._staging.begin()
        batch, limit = self.batch, self.batch.max_blocks * self.batch.block_size
        for num_rows, num_tokens in COMPILED_MIXED:
            count = min(num_tokens, limit)
            chunks = Chunks([batch.scratch], [0], [count], bytes(4 * count), [True])
            self.mixed_forward(batch.rows[:num_rows], batch.upload_chunks(chunks))
        self._staging.end()

    def compile_full_tail(self) -> None:
        """Compile what a full tail needs, in a thread beside the first steps; once."""
        if self._full_tail is None and self.model.device.type == "cuda" and HAS_TRITON:
            self._full_tail = Thread(target=self._compile_full_tail, daemon=True)
            self._full_tail.start()

    def _compile_full_tail(self) -> None:
        """The last kernels that are known of before a step needs them."""
        from nvserve.workers.compile_server import stop_server  # see compile_kernels

        try:
            self._sampler.compile_full(self.model.device)
        except Exception:  # the step that needs it will say so again
            logger.exception("the kernels of top-k and top-p did not compile ahead")
        finally:
            stop_server()

    @torch.inference_mode()
    def warm_up(self, num_tokens: int) -> None:
        """Run steps as large as they get, on the scratch slot: chunks of num_tokens, all rows.

        The full tail is left out: see compile_full_tail.
        """
        self._staging.begin()
        batch, limit = self.batch, self.batch.max_blocks * self.batch.block_size
        self.plain_step(batch.padding)
        self._sampler.reserve(len(batch.padding))
        counts = [limit] * (num_tokens // limit) + [num_tokens % limit] * (num_tokens % limit > 0)
        slots, zeros = [batch.scratch] * len(counts), [0] * len(counts)
        chunks = Chunks(slots, zeros, counts, bytes(4 * num_tokens), [True] * len(counts))
        inputs = batch.chunk_inputs(batch.upload_chunks(chunks))
        self.model.forward(inputs, self.cache, self.backend)
        batch.clear()
        self._staging.end()

    def _decode(self, step: SchedulerOutput, stopwatch: Stopwatch) -> PendingStep:
        slots = list(self.batch.decoding)
        rows = self.batch.rows[: len(slots)]
        if not slots:
            return PendingStep(rows.int(), [], None, None, stopwatch, self._staging)
        if step.is_full_tail:
            replayed = None
            if self.graphs is not None:
                with self._optional():
                    self.graphs.capture_forward_for(len(slots))
                replayed = self.graphs.forward(len(slots))
            hidden, positions = replayed or self.decode_forward(rows)
            sampled = self._sample(step, hidden, rows, positions, slots)
            ids = self.batch.advance(rows, sampled.ids, positions, sampled.values)
            return PendingStep(ids, slots, sampled.logprobs, None, stopwatch, self._staging)
        replayed_ids = None if self.graphs is None else self.graphs.step(len(slots))
        ids = self.plain_step(rows) if replayed_ids is None else replayed_ids
        return PendingStep(ids, slots, None, None, stopwatch, self._staging)

    def plain_step(self, rows: torch.Tensor) -> torch.Tensor:
        """A decode step of slots rows [R] int64 with the plain tail: ids [R] int32.

        Samples, and moves the rows on; device work only, like decode_forward.
        """
        hidden, positions = self.decode_forward(rows)
        sampled = self._sampler.plain(self.model.logits(hidden), rows, positions)
        return self.batch.advance(rows, sampled.ids, positions, sampled.values)

    def decode_forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [R, N] of one token for each slot, and the positions [R] of the next.

        Device work only, the same for any content of `rows`: a graph holds it.
        """
        inputs = self.batch.decode_inputs(rows)
        self._plan_decode(inputs)
        assert inputs.next_positions is not None, "decode rows sample"
        return self.model.forward(inputs, self.cache, self.backend), inputs.next_positions

    def _plan_decode(self, inputs: StepInputs) -> None:
        assert inputs.decode is not None, "no decode rows"
        shard, config = self.model.shard, self.model.config
        self.backend.plan_decode(
            inputs.decode,
            shard.num_heads,
            shard.num_kv_heads,
            config.head_dim,
            self.cache.block_size,
            self.model.dtype,
        )

    def _mixed(self, step: SchedulerOutput, stopwatch: Stopwatch) -> PendingStep:
        assert step.chunks is not None, "no chunks"
        batch = self.batch
        batch.check_chunks(step.chunks)
        decoding = list(batch.decoding)
        slots = decoding + list(compress(step.chunks.slots, step.chunks.samples))
        is_scored = self._scorer.is_wanted(step.chunks)
        if self._mixed_graphs is not None and not step.is_full_tail and not is_scored:
            with self._optional():
                self._mixed_graphs.capture_for(step.chunks, len(decoding))
            replayed = self._mixed_graphs.step(step.chunks, len(decoding))
            if replayed is not None:
                return PendingStep(replayed, slots, None, None, stopwatch, self._staging)
        chunks = batch.upload_chunks(step.chunks)
        rows = batch.rows[: len(decoding)]
        inputs, hidden = self.mixed_forward(rows, chunks)
        scores = self._scorer.score(step.chunks, chunks, hidden[len(decoding) :])
        if not slots:
            return PendingStep(rows.int(), [], None, scores, stopwatch, self._staging)
        hidden, row_slots, positions = self._sampling_rows(inputs, chunks, hidden, rows)
        sampled = self._sample(step, hidden, row_slots, positions, slots)
        ids = batch.advance(row_slots, sampled.ids, positions, sampled.values)
        return PendingStep(ids, slots, sampled.logprobs, scores, stopwatch, self._staging)

    def mixed_forward(
        self, rows: torch.Tensor, chunks: ChunkColumns
    ) -> tuple[StepInputs, torch.Tensor]:
        """Hidden states [T, N] of one token for each decode row, then all tokens of the chunks.

        The chunks' slots get their new lengths. Device work only, like decode_forward.
        """
        inputs = self.batch.chunk_inputs(chunks)
        if len(rows):
            decode = self.batch.decode_inputs(rows)
            self._plan_decode(decode)
            inputs = join_inputs(decode, inputs)
        hidden = self.model.forward(inputs, self.cache, self.backend)
        self.batch.lengths.index_copy_(0, chunks.slots, chunks.lengths)
        return inputs, hidden

    def mixed_step(self, rows: torch.Tensor, chunks: ChunkColumns) -> torch.Tensor:
        """A mixed step with the plain tail: ids [R] int32, of decode rows, then sampling chunks.

        Device work only, like decode_forward.
        """
        inputs, hidden = self.mixed_forward(rows, chunks)
        hidden, slots, positions = self._sampling_rows(inputs, chunks, hidden, rows)
        sampled = self._sampler.plain(self.model.logits(hidden), slots, positions)
        return self.batch.advance(slots, sampled.ids, positions, sampled.values)

    def _sampling_rows(
        self, inputs: StepInputs, chunks: ChunkColumns, hidden: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states [R, N], slots [R] and new tokens' positions [R]: decode rows first."""
        num_decodes = inputs.num_decodes
        last = hidden[num_decodes:][chunks.last_rows]
        if inputs.next_positions is None:
            return last, chunks.sampling_slots, chunks.sampling_ends
        states = torch.cat((hidden[:num_decodes], last))
        slots = torch.cat((rows, chunks.sampling_slots))
        positions = torch.cat((inputs.next_positions, chunks.sampling_ends))
        return states, slots, positions

    def _sample(
        self,
        step: SchedulerOutput,
        hidden: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        host_slots: list[int],
    ) -> Sampled:
        self._beat(Phase.SAMPLING)
        logits = self.model.logits(hidden)
        if not step.is_full_tail:
            return self._sampler.plain(logits, slots, positions)
        give_up = time.monotonic() + COMPILE_BEATS_S
        while self._full_tail is not None and self._full_tail.is_alive():
            if time.monotonic() < give_up:
                self._beat(Phase.SAMPLING)
            self._full_tail.join(BEAT_S / 2)
        return self._sampler.full(logits, slots, positions, host_slots, step.masks)

    def _beat(self, phase: Phase) -> None:
        if self._page is not None:
            self._page.beat(phase)
