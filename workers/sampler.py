"""From this rank's logits to token ids that all ranks agree on.

Two tails. The plain one serves greedy and temperature rows: each rank finds the best token of its
vocabulary shard, and one (value, id) pair a row is exchanged. The full one gathers the logits and
does everything else. A row that could take either gets the same token from both.

Order of the full tail: logit bias, penalties, masks (grammar and allowed ids, then bad words and
early stops), temperature, truncation, noise. Bad words and early stops yield where they would
forbid every token. Logprobs are those of the model: of the logits before all of this.

R rows, V vocabulary columns of this rank.
"""

from dataclasses import dataclass

import numpy as np
import torch

from nvserve.kernels.decode_step import BAD_TOKEN
from nvserve.kernels.sampling import (
    apply_penalties,
    apply_token_mask,
    count_tokens,
    gumbel_argmax,
    sample,
    token_logprobs,
)
from nvserve.protocol.messages import Masks
from nvserve.workers.models.config import Shard
from nvserve.workers.parallel import TensorParallel
from nvserve.workers.sampling_state import SamplingState
from nvserve.workers.staging import Staging


@dataclass
class Sampled:
    """What a tail yields. A row is bad, where its id is BAD_TOKEN or its value is not finite."""

    ids: torch.Tensor  # [R] int64
    values: torch.Tensor | None = None  # [R] float32, the winners' perturbed logits
    logprobs: "DeviceLogprobs | None" = None


@dataclass
class DeviceLogprobs:
    """Logprobs of some rows, still on the device; `num_tops[i]` of the columns count for row i."""

    rows: list[int]
    num_tops: list[int]
    chosen: torch.Tensor  # [len(rows)] float32
    top_ids: torch.Tensor  # [len(rows), max(num_tops)] int64
    top_values: torch.Tensor  # the same, float32


class Sampler:
    """Samples one token a row. Slots and positions are device tensors [R] int64.

    A position is the index of the new token in its request, prompt included; the noise of a row
    depends on its seed and this position only.
    """

    def __init__(
        self, state: SamplingState, parallel: TensorParallel, shard: Shard, staging: Staging
    ) -> None:
        self._state = state
        self._parallel = parallel
        self._shard = shard
        self._staging = staging

    def plain(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> Sampled:
        """Of greedy and temperature rows; a graph may hold it."""
        values, ids = gumbel_argmax(
            logits,
            self._state.temperature,
            self._state.seeds,
            positions,
            self._shard.first_token_id,
            slots,
        )
        values, ids = self._parallel.best(values, ids)
        return Sampled(ids, values)

    def full(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        host_slots: list[int],
        masks: Masks | None,
    ) -> Sampled:
        """Of rows of every kind, with logprobs of the rows that want some.

        `host_slots` are the same slots as the host knows them.
        """
        state = self._state
        whole = self._parallel.gather_logits(logits, state.vocab_size)
        is_sound = whole.amax(dim=-1).isfinite()
        wanted = self._rows_with_logprobs(host_slots)
        model_logits = whole.clone() if wanted else whole
        ids = sample(
            self._shaped(whole, slots, positions, host_slots, masks),
            state.temperature[slots],
            state.top_k[slots].int(),
            state.top_p[slots],
            state.min_p[slots],
            state.seeds[slots],
            positions,
        )
        ids = torch.where(is_sound, ids, BAD_TOKEN)
        if state.penalties is not None:
            count_tokens(state.penalties.output_counts, slots, ids)
        logprobs = self._logprobs(model_logits, ids, wanted) if wanted else None
        return Sampled(ids, None, logprobs)

    def reserve(self, num_rows: int) -> None:
        """Take the memory of a full tail of so many rows for a moment: the pool leaves it free."""
        logits = self._state.temperature.new_empty(3, num_rows, self._state.vocab_size)
        del logits

    def compile_full(self, device: torch.device) -> None:
        """Compile the kernels of a full tail, for few rows and for many, without running them.

        They take longest of all: this is for a thread beside the first steps, and so for kernels
        that no plain step launches, which could find one half loaded.
        """
        # Triton is absent from CPU-only installs.
        from nvserve.kernels.compilation import compiling_only

        torch.cuda.set_device(device)
        with torch.inference_mode(), compiling_only():
            for num_rows in (8, 16):
                floats = torch.empty(3, num_rows, device=device)
                integers = torch.empty(2, num_rows, dtype=torch.int64, device=device)
                top_k = torch.empty(num_rows, dtype=torch.int32, device=device)
                logits = torch.empty(num_rows, self._state.vocab_size, device=device)
                sample(logits, floats[0], top_k, floats[1], floats[2], integers[0], integers[1])
            slots, num_tokens = integers[0], self._state.vocab_size
            counts = torch.empty(1, num_tokens, dtype=torch.int32, device=device)
            mask = torch.empty(num_rows, -(-num_tokens // 32), dtype=torch.int32, device=device)
            apply_penalties(logits, slots, counts, counts > 0, *floats)
            apply_token_mask(logits, mask)
            count_tokens(counts, slots, integers[1])

    def _shaped(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        host_slots: list[int],
        masks: Masks | None,
    ) -> torch.Tensor:
        """Bias, penalties and masks; logits [R, V] are changed in place where that is possible."""
        state = self._state
        if state.bias is not None:
            logits = state.bias.add_to(logits, slots)
        if state.penalties is not None:
            apply_penalties(
                logits,
                slots,
                state.penalties.output_counts,
                state.penalties.prompt_mask,
                state.frequency[slots],
                state.presence[slots],
                state.repetition[slots],
            )
        if state.allowed is not None:
            apply_token_mask(logits, state.allowed[slots])
        if masks is not None and masks.slots:
            apply_token_mask(logits, self._step_masks(masks, host_slots))
        return self._without_bad_words_and_early_stops(logits, slots, positions)

    def _without_bad_words_and_early_stops(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        state = self._state
        if state.bad_words is None and state.early_stops is None:
            return logits
        strict = logits.clone()
        if state.bad_words is not None:
            state.bad_words.add_to(strict, slots)
        if state.early_stops is not None:
            state.early_stops.add_to(strict, slots, positions < state.min_length[slots])
        has_choice = strict.amax(dim=-1, keepdim=True) > float("-inf")
        return torch.where(has_choice, strict, logits)

    def _step_masks(self, masks: Masks, host_slots: list[int]) -> torch.Tensor:
        """The step's own masks [R, ceil(V / 32)] int32; rows without one allow everything."""
        num_words = -(-self._state.vocab_size // 32)
        table = np.full((len(host_slots), num_words), -1, dtype=np.int32)
        given = np.frombuffer(masks.masks, dtype=np.int32).reshape(len(masks.slots), num_words)
        row_of = {slot: row for row, slot in enumerate(host_slots)}
        for slot, words in zip(masks.slots, given, strict=True):
            table[row_of[slot]] = words
        return self._staging.upload(table)

    def _rows_with_logprobs(self, host_slots: list[int]) -> list[tuple[int, int]]:
        """(row, number of alternatives) of the rows that want logprobs; rank 0 reports them."""
        if self._parallel.rank != 0:
            return []
        params = (self._state.params[slot] for slot in host_slots)
        counts = [-1 if p is None else p.logprobs for p in params]
        return [(row, count) for row, count in enumerate(counts) if count >= 0]

    def _logprobs(
        self, logits: torch.Tensor, ids: torch.Tensor, wanted: list[tuple[int, int]]
    ) -> DeviceLogprobs:
        rows, num_tops = [row for row, _ in wanted], [count for _, count in wanted]
        where = self._staging.upload(np.array(rows, dtype=np.int64))
        chosen, top_ids, top_values = token_logprobs(
            logits[where], ids[where].clamp(min=0), min(max(num_tops), self._state.vocab_size)
        )
        return DeviceLogprobs(rows, num_tops, chosen, top_ids, top_values)
