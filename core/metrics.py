"""Totals of core since its start, as CoreStats reports them."""

from dataclasses import dataclass, field

from nvserve.core.block_tables import BlockTables
from nvserve.protocol.messages import FinishReason


@dataclass(slots=True)
class Counters:
    """Plain counters; everything that can be derived is not here."""

    accepted: int = 0
    refused: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    dropped: int = 0  # malformed, stale or unknown messages
    recovered: int = 0  # requests replayed after an epoch or a core ended
    looked_up_tokens: int = 0  # in prefix caches of epochs that ended
    hit_tokens: int = 0
    finished: list[int] = field(default_factory=lambda: [0] * len(FinishReason))

    def note_cache(self, tables: BlockTables) -> None:
        """Keep the prefix counts of an epoch that ends."""
        self.looked_up_tokens += tables.num_looked_up_tokens
        self.hit_tokens += tables.num_hit_tokens
