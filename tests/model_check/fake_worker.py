"""A worker without a model: it obeys SchedulerOutput to the letter and trusts nothing in it.

Its KV pool really holds something for each (block, offset), and the next token is a hash of the
whole prefix *read back through the block table*. A wrong table, a stale block, a prefix hit on
foreign content or a write into a shared block therefore changes the output or trips an assert.
"""

import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from model_check import scores
from nvserve.protocol.codec import decode_to_worker, encode
from nvserve.protocol.messages import (
    Chunks,
    Logprobs,
    Masks,
    ModelOutput,
    NewRows,
    SchedulerOutput,
    TableChanges,
    pack_ids,
    unpack_ids,
)
from nvserve.protocol.sampling import SamplingParams


def next_token(
    prefix: list[int], seed: int, vocab_size: int, is_allowed: Callable[[int], bool] | None = None
) -> int:
    """What the model says after these tokens; the same for everybody who asks.

    Of a limited choice it takes the first one behind what it would have said.
    """
    token = zlib.crc32(array("i", prefix).tobytes(), seed & 0xFFFF) % vocab_size
    while is_allowed is not None and not is_allowed(token):
        token = (token + 1) % vocab_size
    return token


@dataclass
class Row:
    """What a worker keeps in a slot."""

    sampling: SamplingParams
    seed: int
    prompt: bytes
    output: bytes
    table: list[int] = field(default_factory=list)
    num_scored: int = 0  # or passed over, of the prompt
    num_tokens: int = -1  # whose KV is computed; -1 before the first chunk
    last: int = -1  # the sampled token whose KV is not computed yet


class FakeWorker:
    """All ranks of one epoch in one object (they hold the same)."""

    def __init__(self, *, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.cells: dict[tuple[int, int], tuple[int, int, int]] = {}  # epoch, position, token
        self.frames_checksum = 0  # of all steps so far
        self.start_epoch(-1)

    def start_epoch(self, epoch: int) -> None:
        """Drop the batch; the KV of the epoch before stays behind as garbage."""
        self.epoch = epoch
        self.next_step = 0
        self.rows: dict[int, Row] = {}
        self.decoding: list[int] = []
        self.masks: dict[int, bytes] = {}

    def run(self, output: SchedulerOutput) -> ModelOutput:
        """One step, over the wire."""
        frame = encode(output)
        self.frames_checksum = zlib.crc32(frame, self.frames_checksum)
        received = decode_to_worker(frame)
        assert isinstance(received, SchedulerOutput)
        assert (received.epoch, received.step) == (self.epoch, self.next_step)
        self.next_step += 1
        self._apply(received)
        self._take_masks(received.masks)
        sampled = self._forward(received.chunks)
        assert self.masks.keys() <= {slot for slot, _ in sampled}, "a mask for nobody"
        tails = [self.rows[slot].sampling.needs_full_tail for slot, _ in sampled]
        assert received.is_full_tail == any(tails)
        tokens = pack_ids([token for _, token in sampled])
        return ModelOutput(
            self.epoch,
            received.step,
            tokens,
            checksum=zlib.crc32(tokens),
            logprobs=self._score_output(sampled),
            prompt_logprobs=self._score_prompts(received.chunks),
        )

    def _score_output(self, sampled: list[tuple[int, int]]) -> Logprobs | None:
        found: list[tuple[int, list[int], int]] = []  # row, tokens up to the new one, alternatives
        for index, (slot, token) in enumerate(sampled):
            row = self.rows[slot]
            if row.sampling.logprobs >= 0:
                found.append((index, [*self._read(row), token], row.sampling.logprobs))
        return scores.logprobs(*map(list, zip(*found, strict=True))) if found else None

    def _score_prompts(self, chunks: Chunks | None) -> list[Logprobs | None] | None:
        """By chunk; like a real worker, which keeps the state behind a chunk for the next one."""
        if chunks is None:
            return None
        found: list[Logprobs | None] = []
        for slot, start, count in zip(chunks.slots, chunks.starts, chunks.counts, strict=True):
            row, positions = self.rows[slot], list(range(max(1, start), start + count))
            num_tops = row.sampling.prompt_logprobs
            assert num_tops < 0 or start in (0, row.num_scored), "the state before it is missing"
            row.num_scored = start + count
            if num_tops < 0 or not positions:
                found.append(None)
                continue
            text = self._read(row)
            texts = [text[: position + 1] for position in positions]
            found.append(scores.logprobs(positions, texts, [num_tops] * len(positions)))
        return found if any(found) else None

    def _apply(self, output: SchedulerOutput) -> None:
        for slot in output.freed or []:
            del self.rows[slot]
            if slot in self.decoding:
                self.decoding.remove(slot)
        for slot in output.leaves or []:
            self.decoding.remove(slot)
        if output.new is not None:
            self._enter(output.new)
        if output.tables is not None:
            self._change(output.tables)
        for slot in output.joins or []:
            assert slot not in self.decoding
            assert self.rows[slot].last >= 0, f"slot {slot} has sampled nothing to go on from"
            self.decoding.append(slot)

    def _enter(self, new: NewRows) -> None:
        columns = zip(new.slots, new.sampling, new.seeds, new.prompts, new.outputs, strict=True)
        for slot, sampling, seed, prompt, output in columns:
            assert slot not in self.rows, f"slot {slot} is taken"
            self.rows[slot] = Row(sampling, seed, prompt, output)

    def _change(self, tables: TableChanges) -> None:
        blocks = unpack_ids(tables.blocks)
        first = 0
        for slot, start, count in zip(tables.slots, tables.starts, tables.counts, strict=True):
            table = self.rows[slot].table
            assert start == len(table), "a table has a hole or is rewritten"
            table += blocks[first : first + count]
            first += count
            assert all(0 < block < self.num_blocks for block in table), f"bad blocks: {table}"
            assert len(set(table)) == len(table), f"a block twice in one table: {table}"

    def _forward(self, chunks: Chunks | None) -> list[tuple[int, int]]:
        """Write the step's KV, then read everything back; (slot, sampled token) by row."""
        written: set[tuple[int, int]] = set()
        sampling = list(self.decoding)
        for slot in self.decoding:
            row = self.rows[slot]
            self._write(row, [row.last], written)
            row.last = -1
        if chunks is not None:
            tokens = unpack_ids(chunks.tokens)
            first = 0
            columns = zip(chunks.slots, chunks.starts, chunks.counts, chunks.samples, strict=True)
            for slot, start, count, samples in columns:
                row = self.rows[slot]
                assert slot not in self.decoding
                assert count > 0
                assert row.num_tokens in (-1, start), "a chunk does not follow the one before it"
                row.num_tokens = start
                self._write(row, tokens[first : first + count], written)
                first += count
                if samples:
                    self._check_history(row)
                    sampling.append(slot)
                else:
                    self._read(row)
        return [(slot, self._sample(slot)) for slot in sampling]

    def _write(self, row: Row, tokens: list[int], written: set[tuple[int, int]]) -> None:
        for token in tokens:
            block = row.table[row.num_tokens // self.block_size]
            cell = (block, row.num_tokens % self.block_size)
            assert cell not in written, "two rows write the same cell in one step"
            written.add(cell)
            self.cells[cell] = (self.epoch, row.num_tokens, token)
            row.num_tokens += 1

    def _read(self, row: Row) -> list[int]:
        size = self.block_size
        prefix = []
        for position in range(row.num_tokens):
            cell = (row.table[position // size], position % size)
            epoch, written_position, token = self.cells[cell]
            assert epoch == self.epoch, f"KV of epoch {epoch} read in {self.epoch}"
            assert written_position == position, f"KV of {written_position} read at {position}"
            prefix.append(token)
        return prefix

    def _sample(self, slot: int) -> int:
        row = self.rows[slot]
        mask = self.masks.get(slot)

        def is_allowed(token: int) -> bool:
            return mask is None or bool(mask[token >> 3] >> (token & 7) & 1)

        row.last = next_token(self._read(row), row.seed, self.vocab_size, is_allowed)
        return row.last

    def _take_masks(self, masks: Masks | None) -> None:
        self.masks = {}
        if masks is not None:
            size = 4 * -(-self.vocab_size // 32)
            assert len(masks.masks) == size * len(masks.slots)
            for index, slot in enumerate(masks.slots):
                self.masks[slot] = masks.masks[index * size : index * size + size]

    def _check_history(self, row: Row) -> None:
        if row.sampling.has_penalties or row.sampling.min_tokens > 0:
            assert unpack_ids(row.prompt + row.output) == self._read(row)
        else:
            assert row.prompt + row.output == b""
