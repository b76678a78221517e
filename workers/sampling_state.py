"""What sampling needs to know of every slot, on the device and beside it.

The plain columns exist from the start. The tables of the full tail are made when the first request
needs them; a slot that does not use one holds what changes nothing. S slots, V vocabulary.
"""

from typing import Final

import numpy as np
import torch

from nvserve.protocol.messages import NewRows
from nvserve.protocol.sampling import MAX_LIST, MAX_LOGIT_BIAS, SamplingParams
from nvserve.workers.staging import Staging


class TokenTable:
    """Per slot, up to `width` values to add to the logits of some token ids; unused ones are 0."""

    def __init__(self, num_slots: int, width: int, device: torch.device) -> None:
        self.width: Final = width
        self.ids: Final = torch.zeros(num_slots, width, dtype=torch.int64, device=device)
        self.values: Final = torch.zeros(num_slots, width, device=device)

    def set(self, slot: int, ids: list[int], values: list[float], staging: Staging) -> None:
        """Replace a slot's entries; the ids must differ."""
        assert len(ids) <= self.width, f"{len(ids)} entries, room for {self.width}"
        padding = self.width - len(ids)
        self.ids[slot] = staging.upload(np.array(ids + [0] * padding, dtype=np.int64))
        self.values[slot] = staging.upload(np.array(values + [0.0] * padding, dtype=np.float32))

    def add_to(
        self, logits: torch.Tensor, slots: torch.Tensor, is_on: torch.Tensor | None = None
    ) -> torch.Tensor:
        """logits [R, V] float32 plus the entries of slots [R], where is_on [R]; in place."""
        values = self.values[slots]
        if is_on is not None:
            values = torch.where(is_on[:, None], values, 0.0)
        return logits.scatter_add_(1, self.ids[slots], values)


class PenaltyTables:
    """Which tokens each slot has seen; lines of slots without penalties are meaningless."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        shape = (num_slots, vocab_size)
        self.output_counts: Final = torch.zeros(shape, dtype=torch.int32, device=device)
        self.prompt_mask: Final = torch.zeros(shape, dtype=torch.bool, device=device)

    def set(self, slot: int, prompt: bytes, output: bytes, staging: Staging) -> None:
        """Rebuild a slot from its prompt and the ids emitted so far (int32 bytes)."""
        counts, mask = self.output_counts[slot].zero_(), self.prompt_mask[slot].zero_()
        if prompt:
            mask[staging.upload(np.frombuffer(prompt, dtype=np.int32).astype(np.int64))] = True
        if output:
            ids, times = np.unique(np.frombuffer(output, dtype=np.int32), return_counts=True)
            where = staging.upload(ids.astype(np.int64))
            counts[where] = staging.upload(times.astype(np.int32))


class SamplingState:
    """Sampling parameters by slot; rows of the scratch slot are greedy."""

    def __init__(
        self,
        *,
        num_slots: int,
        vocab_size: int,
        eos_token_ids: list[int],
        device: torch.device,
        staging: Staging,
    ) -> None:
        self.vocab_size: Final = vocab_size
        self.params: Final[list[SamplingParams | None]] = [None] * num_slots
        self._eos = eos_token_ids
        self._device = device
        self._staging = staging
        self._floats = torch.zeros(6, num_slots, device=device)
        self.temperature, self.top_p, self.min_p = self._floats[:3]
        self.presence, self.frequency, self.repetition = self._floats[3:]
        self._integers = torch.zeros(3, num_slots, dtype=torch.int64, device=device)
        self.seeds, self.top_k, self.min_length = self._integers  # [S] int64 each
        self.penalties: PenaltyTables | None = None
        self.bias: TokenTable | None = None
        self.bad_words: TokenTable | None = None
        self.early_stops: TokenTable | None = None  # on while shorter than min_length
        self.allowed: torch.Tensor | None = None  # [S, ceil(V / 32)] int32, bit 1 = allowed

    def add(self, new: NewRows) -> None:
        """Requests take slots: write their columns and, where they use them, their tables."""
        columns = [(p.temperature, p.top_p, p.min_p, *_penalties(p)) for p in new.sampling]
        integers = [
            (seed, p.top_k, len(prompt) // 4 + p.min_tokens)
            for seed, p, prompt in zip(new.seeds, new.sampling, new.prompts, strict=True)
        ]
        slots = self._staging.upload(np.array(new.slots, dtype=np.int64))
        floats = self._staging.upload(np.array(columns, dtype=np.float32).T)
        self._floats.index_copy_(1, slots, floats)
        self._integers.index_copy_(
            1, slots, self._staging.upload(np.array(integers, dtype=np.int64).T)
        )
        for index, (slot, params) in enumerate(zip(new.slots, new.sampling, strict=True)):
            self.params[slot] = params
            self._set_penalties(slot, params, new.prompts[index], new.outputs[index])
            self._set_tables(slot, params)

    def forget(self, slot: int) -> None:
        """The slot is free; its columns stay until a request takes it."""
        self.params[slot] = None

    def clear(self) -> None:
        """Forget every request and drop the tables: a new epoch begins."""
        self.params[:] = [None] * len(self.params)
        self.penalties = self.bias = self.bad_words = self.early_stops = self.allowed = None

    def _set_penalties(
        self, slot: int, params: SamplingParams, prompt: bytes, output: bytes
    ) -> None:
        if not params.has_penalties:
            return
        if self.penalties is None:
            self.penalties = PenaltyTables(len(self.params), self.vocab_size, self._device)
        self.penalties.set(slot, prompt, output, self._staging)

    def _set_tables(self, slot: int, params: SamplingParams) -> None:
        self.bias = self._set_table(
            self.bias,
            slot,
            list(params.logit_bias),
            list(params.logit_bias.values()),
            MAX_LOGIT_BIAS,
        )
        # Words of several tokens need ids that only core has: it sends them as masks.
        words = {word[0] for word in params.bad_words if len(word) == 1}
        self.bad_words = self._forbid(self.bad_words, slot, words, MAX_LIST)
        stops: set[int] = set()
        if params.min_tokens > 0:
            stops = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos)}
        self.early_stops = self._forbid(self.early_stops, slot, stops, MAX_LIST + len(self._eos))
        self._allow(slot, params.allowed_token_ids)

    def _forbid(
        self, table: TokenTable | None, slot: int, ids: set[int], width: int
    ) -> TokenTable | None:
        return self._set_table(table, slot, sorted(ids), [float("-inf")] * len(ids), width)

    def _set_table(
        self, table: TokenTable | None, slot: int, ids: list[int], values: list[float], width: int
    ) -> TokenTable | None:
        """Write a slot's entries, in a table that is made when the first slot has some."""
        if table is None and not ids:
            return None
        if table is None:
            table = TokenTable(len(self.params), width, self._device)
        table.set(slot, ids, values, self._staging)
        return table

    def _allow(self, slot: int, ids: list[int]) -> None:
        """Restrict a slot to these ids; an empty list allows everything."""
        num_words = -(-self.vocab_size // 32)
        if self.allowed is None:
            if not ids:
                return
            shape = (len(self.params), num_words)
            self.allowed = torch.full(shape, -1, dtype=torch.int32, device=self._device)
        if not ids:
            self.allowed[slot] = -1
            return
        bits = np.zeros(num_words * 32, dtype=np.uint8)
        bits[ids] = 1
        words = np.packbits(bits, bitorder="little").view(np.int32)
        self.allowed[slot] = self._staging.upload(words)


def _penalties(params: SamplingParams) -> tuple[float, float, float]:
    return params.presence_penalty, params.frequency_penalty, params.repetition_penalty
