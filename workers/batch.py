"""The batch as it lives on the device: one row of every tensor for each slot.

Applies what a SchedulerOutput changes and keeps the ordered decode list. A step over the decode
list needs nothing from the host: its rows are read, and moved on by one token, on the device.

S slots, the last of which is scratch: padded rows use it and its table is all zeros, the scratch
block. T tokens in the step, R rows of it, M blocks of a block table.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nvserve.kernels.attention import AttentionMetadata
from nvserve.kernels.decode_step import advance_rows, gather_rows
from nvserve.protocol.config import Config
from nvserve.protocol.messages import Chunks, SchedulerOutput, TableChanges
from nvserve.workers.models.layers import StepInputs
from nvserve.workers.sampling_state import SamplingState
from nvserve.workers.staging import Staging

Ints = npt.NDArray[np.int64]


class BadStep(ValueError):
    """A step message that cannot be: core and this worker disagree, so the epoch is over."""


@dataclass
class ChunkColumns:
    """A step's chunks on the device. T tokens, C chunks, of which some sample."""

    max_count: int
    max_end: int
    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    token_slots: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [C] int64
    ends: torch.Tensor  # [C] int64: tokens of the request, this chunk's included
    lengths: torch.Tensor  # [C] int64: what the slot's length becomes
    cu_seqlens: torch.Tensor  # [C + 1] int64
    sampling_slots: torch.Tensor  # of the chunks that sample: their slot,
    sampling_ends: torch.Tensor  # their end,
    last_rows: torch.Tensor  # and their last token, as a row among the T


class ChunkArrays(NamedTuple):
    """The columns of ChunkColumns on the host, in its order."""

    tokens: Ints
    positions: Ints
    token_slots: Ints
    slots: Ints
    ends: Ints
    lengths: Ints
    cu_seqlens: Ints
    sampling_slots: Ints
    sampling_ends: Ints
    last_rows: Ints

    @staticmethod
    def of(chunks: Chunks) -> "ChunkArrays":
        starts = np.array(chunks.starts, dtype=np.int64)
        counts = np.array(chunks.counts, dtype=np.int64)
        slots = np.array(chunks.slots, dtype=np.int64)
        samples = np.array(chunks.samples, dtype=bool)
        tokens = np.frombuffer(chunks.tokens, dtype=np.int32).astype(np.int64)
        ends = starts + counts
        cu_seqlens = np.concatenate((np.zeros(1, dtype=np.int64), counts.cumsum()))
        return ChunkArrays(
            tokens,
            _ranges(starts, counts),
            np.repeat(slots, counts),
            slots,
            ends,
            ends,
            cu_seqlens,
            slots[samples],
            ends[samples],
            cu_seqlens[1:][samples] - 1,
        )

    def padded(self, num_tokens: int, num_chunks: int, scratch: int) -> "ChunkArrays":
        """With one more chunk, of the scratch slot, to make num_tokens; then empty ones."""
        count = num_tokens - len(self.tokens)
        return ChunkArrays(
            _fill(self.tokens, num_tokens, 0),
            np.concatenate((self.positions, np.arange(count))),
            _fill(self.token_slots, num_tokens, scratch),
            _fill(self.slots, num_chunks, scratch),
            _fill(np.append(self.ends, count), num_chunks, 0),
            _fill(self.lengths, num_chunks, 0),
            _fill(self.cu_seqlens, num_chunks + 1, num_tokens),
            _fill(self.sampling_slots, num_chunks, scratch),
            _fill(self.sampling_ends, num_chunks, 0),
            _fill(self.last_rows, num_chunks, 0),
        )

    def packed(self) -> Ints:
        """All in one; each starts at a multiple of 16 bytes.

        Without that, kernels would be compiled once more.
        """
        sizes = self.sizes()
        packed = np.zeros(sum(sizes), dtype=np.int64)
        for first, column in zip(np.cumsum(sizes) - sizes, self, strict=True):
            packed[first : first + len(column)] = column
        return packed

    def sizes(self) -> list[int]:
        return [len(column) + len(column) % 2 for column in self]

    def on_device(self, packed: torch.Tensor, max_count: int, max_end: int) -> ChunkColumns:
        """Views of the packed columns, once they are on the device."""
        parts = torch.split(packed, self.sizes())
        trimmed = [part[: len(column)] for part, column in zip(parts, self, strict=True)]
        return ChunkColumns(max_count, max_end, *trimmed)


class Batch:
    """Slots, decode list and deltas. `lengths` counts tokens whose KV the step before left behind.

    Calls between Staging.begin and end only.
    """

    def __init__(
        self,
        config: Config,
        *,
        num_blocks: int,
        vocab_size: int,
        device: torch.device,
        staging: Staging,
    ) -> None:
        self.num_slots: Final = config.max_num_seqs + 1
        self.scratch: Final = config.max_num_seqs
        self.num_blocks: Final = num_blocks
        self.block_size: Final = config.block_size
        self.max_blocks: Final = -(-config.max_model_len // config.block_size)
        self._staging = staging
        self._vocab_size = vocab_size
        self.sampling: Final = SamplingState(
            num_slots=self.num_slots,
            vocab_size=vocab_size,
            eos_token_ids=config.facts.eos_token_ids,
            device=device,
            staging=staging,
        )
        slots = self.num_slots
        self.last_token: Final = torch.zeros(slots, dtype=torch.int64, device=device)
        self.lengths: Final = torch.zeros(slots, dtype=torch.int64, device=device)
        self.block_table: Final = torch.zeros(
            slots, self.max_blocks, dtype=torch.int32, device=device
        )
        # The tables of the step under way, by row. Entries behind a row's end are old, yet blocks.
        self._step_tables = torch.zeros_like(self.block_table)
        # The decode list; what lies behind its end is scratch, for padded steps.
        self.rows: Final = torch.full((slots,), self.scratch, dtype=torch.int64, device=device)
        self.padding: Final = torch.full_like(self.rows, self.scratch)
        self.decoding: Final[list[int]] = []
        self._num_written = 0  # leading entries of `rows` that may not be scratch
        self._arange = torch.arange(slots + 1, dtype=torch.int32, device=device)

    # -- deltas --------------------------------------------------------------------------------

    def apply(self, step: SchedulerOutput) -> None:
        """Make the changes of a step, in the order its docstring gives; BadStep if it cannot be."""
        self._check_slots(step)
        if step.freed or step.leaves or step.joins:
            self._change_rows(step)
        for slot in step.freed or ():
            self.sampling.forget(slot)
        if step.new is not None and step.new.slots:
            self.sampling.add(step.new)
        if step.tables is not None and step.tables.slots:
            self._change_tables(step.tables)
        running = [*(step.joins or ()), *(() if step.chunks is None else step.chunks.slots)]
        unknown = [slot for slot in running if self.sampling.params[slot] is None]
        if unknown:
            raise BadStep(f"slots {unknown} run, but no request has taken them")

    def _check_slots(self, step: SchedulerOutput) -> None:
        """Refuse slots out of range and rows that would run twice: they would corrupt others."""
        columns = [step.freed, step.leaves, step.joins]
        columns += [part.slots for part in (step.new, step.tables, step.chunks) if part is not None]
        if step.masks is not None:
            columns.append(step.masks.slots)
        for slots in columns:
            if slots and not (min(slots) >= 0 and max(slots) < self.scratch):
                raise BadStep(f"slots {min(slots)}..{max(slots)} of {self.scratch}")

    def _change_rows(self, step: SchedulerOutput) -> None:
        gone = {*(step.freed or ()), *(step.leaves or ())}
        stay = [slot for slot in self.decoding if slot not in gone]
        missing = set(step.leaves or ()).difference(self.decoding)
        if missing:
            raise BadStep(f"slots {sorted(missing)} leave the decode list, but are not in it")
        self.decoding[:] = stay + (step.joins or [])
        if len(set(self.decoding)) != len(self.decoding):
            raise BadStep(f"slots {step.joins} join a decode list that holds some of them")
        num_rows = len(self.decoding)
        padding = max(0, self._num_written - num_rows)
        entries = np.array(self.decoding + [self.scratch] * padding, dtype=np.int64)
        self.rows[: len(entries)] = self._staging.upload(entries)
        self._num_written = num_rows

    def _change_tables(self, tables: TableChanges) -> None:
        counts = np.array(tables.counts, dtype=np.int64)
        starts = np.array(tables.starts, dtype=np.int64)
        blocks = np.frombuffer(tables.blocks, dtype=np.int32)
        if blocks.size == 0:
            return
        if blocks.min() < 1 or blocks.max() >= self.num_blocks:
            raise BadStep(f"blocks {blocks.min()}..{blocks.max()} of {self.num_blocks}")
        if starts.min() < 0 or (starts + counts).max() > self.max_blocks:
            raise BadStep(f"block tables of {self.max_blocks} get {(starts + counts).max()} blocks")
        columns = _ranges(starts, counts)
        slots = np.repeat(np.array(tables.slots, dtype=np.int64), counts)
        where = self._staging.upload(slots * self.max_blocks + columns)
        self.block_table.view(-1)[where] = self._staging.upload(blocks)

    # -- steps ---------------------------------------------------------------------------------

    def decode_inputs(self, rows: torch.Tensor) -> StepInputs:
        """One token for each of rows [R]: device work only, so a graph may hold it."""
        gathered = gather_rows(
            rows,
            self.last_token,
            self.lengths,
            self.block_table,
            self._step_tables,
            self.block_size,
        )
        meta = AttentionMetadata(
            cu_seqlens_q=self._arange[: len(rows) + 1],
            seq_lens=gathered.seq_lens,
            block_tables=self._step_tables[: len(rows)],
            max_query_len=1,
            max_seq_len=self.max_blocks * self.block_size,
        )
        return StepInputs(
            gathered.tokens,
            gathered.positions,
            gathered.slot_mapping,
            len(rows),
            decode=meta,
            prefill=None,
            next_positions=gathered.next_positions,
        )

    def chunk_inputs(self, chunks: ChunkColumns) -> StepInputs:
        """All tokens of a step's chunks."""
        blocks = self.block_table[chunks.token_slots, chunks.positions // self.block_size]
        meta = AttentionMetadata(
            cu_seqlens_q=chunks.cu_seqlens.int(),
            seq_lens=chunks.ends.int(),
            block_tables=self.block_table[chunks.slots],
            max_query_len=chunks.max_count,
            max_seq_len=chunks.max_end,
        )
        slot_mapping = blocks.long() * self.block_size + chunks.positions % self.block_size
        return StepInputs(
            chunks.tokens, chunks.positions, slot_mapping, 0, decode=None, prefill=meta
        )

    def upload_chunks(self, chunks: Chunks) -> ChunkColumns:
        """Bring the columns of a step's chunks to the device, in one copy."""
        arrays = ChunkArrays.of(chunks)
        packed = self._staging.upload(arrays.packed())
        return arrays.on_device(packed, max(chunks.counts), int(arrays.ends.max()))

    def check_chunks(self, chunks: Chunks) -> None:
        """BadStep when these chunks cannot run beside the decode list."""
        starts, counts = np.array(chunks.starts), np.array(chunks.counts)
        tokens = np.frombuffer(chunks.tokens, dtype=np.int32)
        if counts.min() < 1 or starts.min() < 0:
            raise BadStep(f"chunks of {counts.min()} tokens, from position {starts.min()}")
        if (starts + counts).max() > self.max_blocks * self.block_size:
            raise BadStep(f"a chunk ends at {(starts + counts).max()}, behind its block table")
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise BadStep(f"token ids {tokens.min()}..{tokens.max()} of {self._vocab_size}")
        doubled = set(chunks.slots).intersection(self.decoding)
        if doubled or len(set(chunks.slots)) != len(chunks.slots):
            raise BadStep(f"slots {chunks.slots} have chunks, and some run twice")

    def advance(
        self,
        slots: torch.Tensor,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        values: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The last token of slots [R] is now tokens [R], with lengths [R] tokens before it.

        A bad token (see advance_rows) counts as 0: the step has failed, but the next one may be on
        its way. Returns the tokens as the host shall see them, [R] int32.
        """
        return advance_rows(
            slots, tokens, values, lengths, self.last_token, self.lengths, self.scratch
        )

    def clear(self) -> None:
        """Empty every slot: a new epoch begins."""
        self.sampling.clear()
        self.decoding.clear()
        self._num_written = 0
        for tensor in (self.last_token, self.lengths, self.block_table, self._step_tables):
            tensor.zero_()
        self.rows.fill_(self.scratch)


def _fill(column: Ints, size: int, value: int) -> Ints:
    """The column, then `value` up to this size."""
    return np.append(column, np.full(size - len(column), value, dtype=np.int64))


def _ranges(
    starts: Ints,
    counts: Ints,
) -> Ints:
    """starts[i], starts[i] + 1, ... (counts[i] of them), for every i in turn."""
    firsts = np.cumsum(counts) - counts
    return np.repeat(starts - firsts, counts) + np.arange(counts.sum())


def join_inputs(decode: StepInputs, chunks: StepInputs) -> StepInputs:
    """One forward over the decode rows and then the chunks."""
    return StepInputs(
        torch.cat((decode.tokens, chunks.tokens)),
        torch.cat((decode.positions, chunks.positions)),
        torch.cat((decode.slot_mapping, chunks.slot_mapping)),
        decode.num_decodes,
        decode.decode,
        chunks.prefill,
        decode.next_positions,
    )
