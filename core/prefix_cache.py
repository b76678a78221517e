"""Which block holds which tokens (block hash -> block id), and which of them is evicted next.

Knows hashes and ids. A block is entered only when its KV was computed; who owns it is the pool's
business.
"""

import hashlib
from array import array
from collections import OrderedDict
from typing import Final

DIGEST_BYTES: Final = 16


class BlockHasher:
    """The keyed 128-bit hash chain over (parent, tokens, salt).

    The key is random for each process, so nobody outside can prepare two contents of equal hash.
    Links and roots are tagged apart, and all links cover `block_size` tokens, so that no two
    different inputs are hashed from the same bytes.
    """

    def __init__(self, key: bytes, block_size: int) -> None:
        self._key: Final = key
        self._block_size: Final = block_size

    def extend(self, hashes: list[bytes], tokens: "array[int]", num_blocks: int, salt: str) -> None:
        """Append the hashes of the blocks up to `num_blocks`, all full, to a request's chain."""
        if len(hashes) >= num_blocks:
            return
        size = self._block_size
        parent = hashes[-1] if hashes else self._digest(b"root" + salt.encode())
        for index in range(len(hashes), num_blocks):
            block = tokens[index * size : (index + 1) * size]
            parent = self._digest(b"link" + parent + block.tobytes())
            hashes.append(parent)

    def _digest(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=self._key).digest()


class PrefixCache:
    """Findable blocks, owned or not; those nobody owns in the order of their eviction."""

    def __init__(self) -> None:
        self._block_of: Final[dict[bytes, int]] = {}
        self._hash_of: Final[dict[int, bytes]] = {}
        self._idle: Final[OrderedDict[int, None]] = OrderedDict()  # least recently used first

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def find(self, hashes: list[bytes], max_blocks: int) -> list[int]:
        """The blocks of the longest known leading part of the chain."""
        block_of = self._block_of
        blocks = []
        for digest in hashes[:max_blocks]:
            block = block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def enter(self, digest: bytes, block: int) -> None:
        """Make a computed block findable, unless equal content already is."""
        if digest not in self._block_of:
            assert block not in self._hash_of, f"block {block} is entered twice"
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def retire(self, block: int) -> bool:
        """Keep a block that lost its last owner; False when it is not findable."""
        if block not in self._hash_of:
            return False
        self._idle[block] = None
        return True

    def revive(self, block: int) -> None:
        """A block has an owner again."""
        del self._idle[block]

    def evict(self) -> int:
        """Forget the least recently used idle block and return it; KeyError when there is none."""
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        return block

    def check(self, owners: list[int]) -> None:
        """Assert that the two maps mirror each other and idle means findable without owner."""
        assert {block: digest for digest, block in self._block_of.items()} == self._hash_of
        for block in self._hash_of:
            assert (owners[block] == 0) == (block in self._idle), f"block {block}"
        assert self._idle.keys() <= self._hash_of.keys()
