"""Logprobs of prompt tokens, chunk by chunk.

The logits behind one token score the next, so a chunk's first token is scored by the last hidden
state of the chunk before, which is kept by slot in between. Every position from 1 on is scored
exactly once, as long as the request's chunks start at 0 (core switches prefix hits off for it).
"""

from typing import Final

import torch

from nvserve.kernels.sampling import token_logprobs
from nvserve.protocol.messages import Chunks
from nvserve.workers.batch import ChunkColumns
from nvserve.workers.models.decoder import Decoder
from nvserve.workers.parallel import TensorParallel
from nvserve.workers.sampler import DeviceLogprobs
from nvserve.workers.sampling_state import SamplingState

ROWS_AT_ONCE: Final = 256  # logits of a whole chunk could be gigabytes


class PromptScorer:
    """Scores the chunks of requests that ask for prompt logprobs; keeps one vector a slot."""

    def __init__(self, model: Decoder, parallel: TensorParallel, state: SamplingState) -> None:
        self._model = model
        self._parallel = parallel
        self._state = state
        self._last_hidden: dict[int, torch.Tensor] = {}

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            self._last_hidden.pop(slot, None)

    def clear(self) -> None:
        self._last_hidden.clear()

    def is_wanted(self, chunks: Chunks) -> bool:
        """Does any of the chunks' requests ask for prompt logprobs?"""
        return any(self._num_tops(slot) >= 0 for slot in chunks.slots)

    def score(
        self, chunks: Chunks, columns: ChunkColumns, hidden: torch.Tensor
    ) -> list[DeviceLogprobs | None] | None:
        """By chunk, the logprobs of its tokens (rows are positions); None when nobody asked.

        hidden [T, N] are the states of the chunks' tokens.
        """
        counts = [self._num_tops(slot) for slot in chunks.slots]
        if max(counts) < 0:
            return None
        scores: list[DeviceLogprobs | None] = []
        row = 0
        for slot, start, size, num_tops in zip(
            chunks.slots, chunks.starts, chunks.counts, counts, strict=True
        ):
            rows = slice(row, row + size)
            row += size
            if num_tops < 0:
                scores.append(None)
                continue
            scores.append(self._score(slot, start, columns.tokens[rows], hidden[rows], num_tops))
        return scores

    def _num_tops(self, slot: int) -> int:
        params = self._state.params[slot]
        return -1 if params is None else params.prompt_logprobs

    def _score(
        self, slot: int, start: int, tokens: torch.Tensor, hidden: torch.Tensor, num_tops: int
    ) -> DeviceLogprobs | None:
        before = self._last_hidden.pop(slot, None) if start > 0 else None
        self._last_hidden[slot] = hidden[-1].clone()
        first = start
        sources = hidden[:-1]
        if before is None:  # nothing is before position 0
            tokens, first = tokens[1:], start + 1
        else:
            sources = torch.cat((before[None], sources))
        if len(tokens) == 0:
            return None
        width = min(num_tops, self._state.vocab_size)
        parts = [
            token_logprobs(self._logits(some), ids, width)
            for some, ids in zip(
                torch.split(sources, ROWS_AT_ONCE), torch.split(tokens, ROWS_AT_ONCE), strict=True
            )
        ]
        chosen, top_ids, top_values = (torch.cat(column) for column in zip(*parts, strict=True))
        positions = list(range(first, first + len(tokens)))
        return DeviceLogprobs(positions, [num_tops] * len(tokens), chosen, top_ids, top_values)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._model.logits(hidden)
        return self._parallel.gather_logits(logits, self._state.vocab_size)
