"""The blocks of the KV pool: how many requests own each, and which are free.

Block 0 is the scratch block, never given out. Knows ids and counts only.
"""

from typing import Final

from nvserve.core.prefix_cache import PrefixCache


class BlockPool:
    """Reference counts and the free list; O(1) a block.

    A block without owner is either free or kept by the prefix cache; both can be allocated, free
    ones first, then the least recently used cached one.
    """

    def __init__(self, num_blocks: int, cache: PrefixCache) -> None:
        """`num_blocks` includes the scratch block; the cache must be empty."""
        assert num_blocks >= 2, f"a pool of {num_blocks} blocks has none to give"
        self.num_blocks: Final = num_blocks
        self._cache: Final = cache
        self._owners: Final = [0] * num_blocks
        self._owners[0] = 1  # the scratch block belongs to the workers for ever
        self._free: Final = list(range(num_blocks - 1, 0, -1))  # popped from the end: lowest first

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks owned by no request, cached ones included."""
        return len(self._free) + self._cache.num_idle

    def num_unowned(self, blocks: list[int]) -> int:
        """How many of these blocks count as free now."""
        owners = self._owners
        return sum(owners[block] == 0 for block in blocks)

    def allocate(self, num_blocks: int) -> list[int]:
        """Blocks with one owner each and unknown content; the caller has checked `num_free`."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks asked, {self.num_free} free"
        free = self._free
        blocks = []
        for _ in range(num_blocks):
            block = free.pop() if free else self._cache.evict()
            self._owners[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Add an owner to findable blocks."""
        owners = self._owners
        for block in blocks:
            if owners[block] == 0:
                self._cache.revive(block)
            owners[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Take one owner from each block of a table; its last block will be evicted first."""
        owners = self._owners
        for block in reversed(blocks):
            assert owners[block] > 0, f"block {block} has no owner to lose"
            owners[block] -= 1
            if owners[block] == 0 and not self._cache.retire(block):
                self._free.append(block)

    def check(self, tables: list[list[int]]) -> None:
        """Assert that each block is owned as often as it stands in `tables`, and once somewhere."""
        counted = [0] * self.num_blocks
        counted[0] = 1
        for table in tables:
            assert 0 not in table, "the scratch block was given out"
            for block in table:
                counted[block] += 1
        assert counted == self._owners, f"{counted} != {self._owners}"
        free = set(self._free)
        assert len(free) == len(self._free), f"doubly free: {self._free}"
        assert all(self._owners[block] == 0 for block in free)
        self._cache.check(self._owners)
        num_owned = sum(count > 0 for count in self._owners[1:])
        assert num_owned + self.num_free == self.num_usable
