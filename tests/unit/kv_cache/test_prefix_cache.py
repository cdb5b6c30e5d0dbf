"""The prefix cache: found by hash and tokens, evicted least recently used leaf first."""

from __future__ import annotations

import pytest
from llmserve import _core_testing as testing
from llmserve import errors

ROOT = testing.root_hash(b"")


def chain(*blocks: list[int]) -> list[bytes]:
    hashes, parent = [], ROOT
    for tokens in blocks:
        parent = testing.chain_hash(parent, tokens)
        hashes.append(parent)
    return hashes


def test_a_hash_with_other_tokens_is_no_hit() -> None:
    cache = testing.PrefixCache(num_blocks=4, block_size=2)
    (forged,) = chain([1, 2])
    cache.insert(forged, 0, -1, [1, 2])
    assert cache.find(forged, -1, [1, 2]) == 0
    assert cache.find(forged, -1, [1, 3]) is None


def test_a_hash_and_tokens_after_another_block_are_no_hit() -> None:
    cache = testing.PrefixCache(num_blocks=4, block_size=2)
    (forged,) = chain([1, 2])
    cache.insert(forged, 0, -1, [1, 2])
    assert cache.find(forged, 0, [1, 2]) is None  # [1, 2, 1, 2] with a forged hash


def test_eviction_takes_the_least_recently_used_leaf() -> None:
    cache = testing.PrefixCache(num_blocks=4, block_size=1)
    a, ab = chain([1], [2])
    (c,) = chain([3])
    cache.insert(a, 0, -1, [1])
    cache.insert(ab, 1, 0, [2])
    cache.insert(c, 2, -1, [3])
    for block in (1, 0, 2):  # a holder lets go of the child first
        cache.add_evictable(block)
    cache.remove_evictable(0)  # the parent alone is used again
    cache.add_evictable(0)
    cache.check_integrity()
    assert [cache.evict() for _ in range(3)] == [1, 2, 0]
    assert cache.num_held == 0


def test_a_parent_is_never_evicted_before_its_child() -> None:
    cache = testing.PrefixCache(num_blocks=2, block_size=1)
    a, ab = chain([1], [2])
    cache.insert(a, 0, -1, [1])
    cache.insert(ab, 1, 0, [2])
    cache.add_evictable(0)  # against the contract
    with pytest.raises(errors.InternalError, match="leaf"):
        cache.evict()


def test_an_orphan_is_refused() -> None:
    cache = testing.PrefixCache(num_blocks=2, block_size=1)
    _, ab = chain([1], [2])
    with pytest.raises(errors.InternalError, match="parent"):
        cache.insert(ab, 1, 0, [2])


def test_clear_gives_back_the_blocks_that_nobody_refers_to() -> None:
    cache = testing.PrefixCache(num_blocks=3, block_size=1)
    a, ab = chain([1], [2])
    cache.insert(a, 0, -1, [1])
    cache.insert(ab, 1, 0, [2])
    cache.add_evictable(1)
    assert cache.clear() == [1]
    assert cache.num_held == 0
    cache.check_integrity()
