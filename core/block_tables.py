"""Block tables of requests: what an admission takes, how a table grows, what a departure leaves.

The only place where requests, pool and prefix cache meet. Decides whether there is room, never who
must make room.
"""

from typing import Final

from nvserve.core.block_pool import BlockPool
from nvserve.core.prefix_cache import BlockHasher, PrefixCache
from nvserve.core.request import Request

MAX_AHEAD: Final = 4  # blocks a table grows by while the pool is not short


class BlockTables:
    """Takes and returns the blocks of requests; one instance an epoch (its KV is one life)."""

    def __init__(self, num_blocks: int, block_size: int, hasher: BlockHasher | None) -> None:
        """`num_blocks` includes the scratch block; without a hasher nothing is ever shared."""
        self._cache: Final = PrefixCache()
        self.pool: Final = BlockPool(num_blocks, self._cache)
        self._block_size: Final = block_size
        self._hasher: Final = hasher
        self.num_looked_up_tokens = 0
        self.num_hit_tokens = 0

    def num_needed(self, request: Request) -> int:
        """Blocks the request owns at its longest; the KV of its very last token is never needed."""
        return self._blocks_for(request.max_total - 1)

    def admit(self, request: Request, *, num_running: int) -> bool:
        """Give a waiting request blocks for all its tokens and one more; False changes nothing.

        With other requests running some blocks must stay free for them to grow into, or the
        newcomer would soon be preempted again.
        """
        num_tokens = len(request.tokens)
        hits = self._find(request)
        num_new = self._blocks_for(min(num_tokens + 1, request.max_total - 1)) - len(hits)
        num_free = self.pool.num_free - self.pool.num_unowned(hits)
        if num_new > num_free - num_running // 2:
            return False
        self.pool.share(hits)
        request.blocks = hits + self.pool.allocate(num_new)
        if request.num_cached < 0:
            request.num_cached = min(len(hits) * self._block_size, request.num_prompt)
            self.num_looked_up_tokens += num_tokens if self._hasher is not None else 0
            self.num_hit_tokens += len(hits) * self._block_size
        request.prefill_end = num_tokens
        request.num_planned = request.num_prefilled = len(hits) * self._block_size
        request.num_findable = len(hits)
        return True

    def grow(self, request: Request, *, num_running: int) -> int:
        """Append blocks to a full table and return how many; 0 when there is none."""
        num_free = self.pool.num_free
        if num_free == 0:
            return 0
        num_new = 1
        if num_free - MAX_AHEAD >= num_running:
            num_new = min(MAX_AHEAD, self.num_needed(request) - len(request.blocks))
        request.blocks += self.pool.allocate(num_new)
        return num_new

    def capacity(self, request: Request) -> int:
        """Tokens whose KV fits into the blocks the request has."""
        return len(request.blocks) * self._block_size

    def publish(self, request: Request) -> None:
        """Make the full blocks of committed KV findable; called when a chunk is committed."""
        num_full = request.num_committed // self._block_size
        if self._hasher is None or num_full <= request.num_findable:
            return
        self._hasher.extend(request.hashes, request.tokens, num_full, request.salt)
        for index in range(request.num_findable, num_full):
            self._cache.enter(request.hashes[index], request.blocks[index])
        request.num_findable = num_full

    def release(self, request: Request) -> None:
        """Publish what is committed and give all blocks back.

        Safe while a step of the request is in flight: steps run in order on one stream, so it
        writes before any later owner does, and only behind the committed tokens.
        """
        self.publish(request)
        self.pool.release(request.blocks)

    def _find(self, request: Request) -> list[int]:
        if self._hasher is None or request.sampling.prompt_logprobs >= 0:
            return []
        # The last token is always computed: its output is what the step is for.
        max_blocks = (len(request.tokens) - 1) // self._block_size
        self._hasher.extend(request.hashes, request.tokens, max_blocks, request.salt)
        return self._cache.find(request.hashes, max_blocks)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def check(self, running: list[Request]) -> None:
        """Assert that the pool is owned by exactly these requests."""
        self.pool.check([request.blocks for request in running])
        for request in running:
            assert len(request.blocks) <= self.num_needed(request), f"{request}"
