"""Block pool and prefix cache: who owns what, what can be found, what is evicted first."""

import random
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nvserve.core.block_pool import BlockPool
from nvserve.core.prefix_cache import DIGEST_BYTES, BlockHasher, PrefixCache


def make_pool(num_blocks: int = 6) -> tuple[BlockPool, PrefixCache]:
    cache = PrefixCache()
    return BlockPool(num_blocks, cache), cache


def chain(tokens: list[int], *, key: bytes = b"key", salt: str = "", size: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    BlockHasher(key, size).extend(hashes, array("i", tokens), len(tokens) // size, salt)
    return hashes


def test_the_scratch_block_is_never_given_out() -> None:
    pool, _ = make_pool()
    assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0


def test_allocating_more_than_is_free_is_a_bug_of_the_caller() -> None:
    pool, _ = make_pool()
    with pytest.raises(AssertionError, match="6 blocks asked, 5 free"):
        pool.allocate(6)


def test_releasing_twice_is_a_bug_of_the_caller() -> None:
    pool, _ = make_pool()
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="no owner to lose"):
        pool.release(blocks)


def test_a_findable_block_survives_its_owner_and_is_shared_again() -> None:
    pool, cache = make_pool()
    blocks = pool.allocate(1)
    cache.enter(b"a", blocks[0])
    pool.release(blocks)
    assert pool.num_free == 5
    assert cache.find([b"a"], 1) == blocks
    pool.share(blocks)
    assert pool.num_free == 4
    pool.check([blocks])


def test_free_blocks_are_used_before_cached_ones_and_the_oldest_of_these_first() -> None:
    pool, cache = make_pool()
    for digest in (b"a", b"b"):
        blocks = pool.allocate(1)
        cache.enter(digest, blocks[0])
        pool.release(blocks)
    oldest = cache.find([b"a"], 1)
    pool.share(oldest)
    pool.release(oldest)  # now b is the least recently used
    pool.allocate(4)
    assert cache.find([b"a"], 1)
    assert not cache.find([b"b"], 1)


def test_of_one_table_the_last_block_is_evicted_first() -> None:
    pool, cache = make_pool(4)
    blocks = pool.allocate(3)
    for digest, block in zip((b"a", b"b", b"c"), blocks, strict=True):
        cache.enter(digest, block)
    pool.release(blocks)
    pool.allocate(1)
    assert cache.find([b"a", b"b", b"c"], 3) == blocks[:2]


def test_equal_content_is_entered_once() -> None:
    pool, cache = make_pool()
    first, second = pool.allocate(2)
    cache.enter(b"a", first)
    cache.enter(b"a", second)
    assert cache.find([b"a"], 1) == [first]
    pool.release([second])
    pool.check([[first]])


def test_a_hit_ends_at_the_first_unknown_block_and_at_the_limit() -> None:
    pool, cache = make_pool()
    blocks = pool.allocate(3)
    for digest, block in zip((b"a", b"b", b"d"), blocks, strict=True):
        cache.enter(digest, block)
    assert cache.find([b"a", b"b", b"c", b"d"], 4) == blocks[:2]
    assert cache.find([b"a", b"b"], 1) == blocks[:1]


# -- the hash


def test_the_hash_has_128_bits_and_depends_on_the_key() -> None:
    assert DIGEST_BYTES * 8 == 128
    assert {len(digest) for digest in chain([1] * 8)} == {16}
    assert not set(chain([1] * 8)) & set(chain([1] * 8, key=b"other"))


def test_the_hash_covers_parent_tokens_and_salt() -> None:
    base = chain([1, 2, 3, 4, 5, 6, 7, 8])
    assert chain([1, 2, 3, 4, 5, 6, 7, 9])[0] == base[0]
    assert chain([1, 2, 3, 4, 5, 6, 7, 9])[1] != base[1]
    assert chain([9, 2, 3, 4, 5, 6, 7, 8])[1] != base[1]  # same tokens, other parent
    assert chain([1, 2, 3, 4, 5, 6, 7, 8], salt="x")[0] != base[0]
    assert len(set(chain([1] * 40))) == 10  # equal blocks at other depths


def test_a_salt_cannot_imitate_a_parent() -> None:
    """Roots and links are tagged apart, so no salt yields the digest of a block."""
    parent = chain([1, 2, 3, 4])[0]
    text = (parent + array("i", [5, 6, 7, 8]).tobytes()).decode("latin-1")
    assert chain([5, 6, 7, 8], salt=text)[0] != chain([1, 2, 3, 4, 5, 6, 7, 8])[1]


def test_a_chain_is_extended_without_hashing_its_start_again() -> None:
    hasher = BlockHasher(b"key", 4)
    hashes = [b"an early digest."]
    hasher.extend(hashes, array("i", [1] * 8), 2, "")
    assert hashes[0] == b"an early digest."
    assert len(hashes) == 2


# -- model check


class PoolMachine(RuleBasedStateMachine):
    """Tables are taken, published, shared and released at random; the model is a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.cache = make_pool(8)
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # block: digest of what its last writer put there
        self.next_digest = 0

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free:
            table = self.pool.allocate(count)
            for block in table:
                assert all(block not in other for other in self.tables)
                self.content.pop(block, None)
            self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(choice=st.randoms(use_true_random=False))
    def publish(self, choice: random.Random) -> None:
        block = choice.choice(choice.choice(self.tables))
        if block not in self.content:
            digest = b"%d" % self.next_digest
            self.next_digest += 1
            self.content[block] = digest
            self.cache.enter(digest, block)

    @precondition(lambda self: self.content)
    @rule(choice=st.randoms(use_true_random=False))
    def share(self, choice: random.Random) -> None:
        digest = choice.choice(sorted(self.content.values()))
        blocks = self.cache.find([digest], 1)
        if blocks:
            self.pool.share(blocks)
            self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(index=st.integers(0, 100))
    def release(self, index: int) -> None:
        self.pool.release(self.tables.pop(index % len(self.tables)))

    @invariant()
    def owners_are_counted_and_hits_are_true(self) -> None:
        self.pool.check(self.tables)
        for block, digest in self.content.items():
            assert self.cache.find([digest], 1) in ([block], [])
        owned = {block for table in self.tables for block in table}
        assert self.pool.num_free == self.pool.num_usable - len(owned)


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
