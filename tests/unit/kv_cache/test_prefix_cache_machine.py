"""Random operations on the prefix cache, against a model of lists and dicts."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from llmserve import _core_testing as testing

NUM_BLOCKS = 7
BLOCK_SIZE = 2
NO_PARENT = -1

Block = tuple[int, ...]  # BLOCK_SIZE token ids
Chain = tuple[Block, ...]


@dataclass(slots=True)
class Entry:
    salt: str
    chain: Chain  # all tokens up to and including the block's
    hash: bytes
    parent: int


class CacheModel:
    """The real cache next to what it must hold; its clients hold and let go of whole chains."""

    def __init__(self, *, forge: bool) -> None:
        self.cache = testing.PrefixCache(NUM_BLOCKS, BLOCK_SIZE)
        self.forge = forge
        self.free = list(range(NUM_BLOCKS))
        self.entries: dict[int, Entry] = {}  # block -> what it holds
        self.num_refs = [0] * NUM_BLOCKS
        self.evictable: list[int] = []  # least recently used first
        self.holders: list[list[int]] = []

    def hashes(self, salt: str, chain: Chain) -> list[bytes]:
        """Forged ones fall into three classes a salt, whatever the tokens are."""
        hashes, parent = [], testing.root_hash(salt)
        for tokens in chain:
            parent = testing.chain_hash(parent, list(tokens))
            forged = testing.sha256([salt.encode(), bytes([parent[0] % 3])])
            hashes.append(forged if self.forge else parent)
        return hashes

    def block_of(self, salt: str, chain: Chain) -> int | None:
        for block, entry in self.entries.items():
            if (entry.salt, entry.chain) == (salt, chain):
                return block
        return None

    def look_up(self, salt: str, chain: Chain) -> list[int]:
        """The longest cached prefix; the real cache must find the same blocks."""
        expected: list[int] = []
        for i in range(len(chain)):
            block = self.block_of(salt, chain[: i + 1])
            if block is None:
                break
            expected.append(block)
        found: list[int] = []
        for hash_, tokens in zip(self.hashes(salt, chain), chain, strict=True):
            block = self.cache.find(hash_, found[-1] if found else NO_PARENT, list(tokens))
            if block is None:
                break
            found.append(block)
        assert found == expected
        return found

    def hold(self, salt: str, chain: Chain) -> None:
        """Attaches what is cached, computes and files the rest while there is room."""
        path = self.look_up(salt, chain)
        for block in path:
            if self.num_refs[block] == 0:
                self.cache.remove_evictable(block)
                self.evictable.remove(block)
            self.num_refs[block] += 1
        hashes = self.hashes(salt, chain)
        for i in range(len(path), len(chain)):
            if hashes[i] in {entry.hash for entry in self.entries.values()}:
                break  # another chain has this hash: what follows would hang on the wrong parent
            if not self.free and not self.evictable:
                break
            block = self.free.pop() if self.free else self.evict()
            parent = path[-1] if path else NO_PARENT
            self.cache.insert(hashes[i], block, parent, list(chain[i]))
            self.entries[block] = Entry(salt, chain[: i + 1], hashes[i], parent)
            self.num_refs[block] = 1
            path.append(block)
        if path:
            self.holders.append(path)

    def evict(self) -> int:
        """The least recently used block that nobody refers to, which has no children."""
        block = self.evictable.pop(0)
        assert all(entry.parent != block for entry in self.entries.values())
        assert self.cache.evict() == block
        del self.entries[block]
        return block

    def evict_one(self) -> None:
        if self.evictable:
            self.free.append(self.evict())

    def let_go(self, idx: int) -> None:
        if not self.holders:
            return
        for block in reversed(self.holders.pop(idx % len(self.holders))):
            self.num_refs[block] -= 1
            if self.num_refs[block] > 0:
                continue
            if block in self.entries:
                self.cache.add_evictable(block)
                self.evictable.append(block)
            else:
                self.free.append(block)  # computed before the cache was cleared

    def clear(self) -> None:
        assert self.cache.clear() == self.evictable
        self.free += self.evictable
        self.evictable = []
        self.entries = {}

    def check(self) -> None:
        self.cache.check_integrity()
        assert self.cache.num_held == len(self.entries)
        assert self.cache.num_evictable == len(self.evictable)
        num_referenced = sum(count > 0 for count in self.num_refs)
        assert len(self.free) + len(self.evictable) + num_referenced == NUM_BLOCKS
        for block, entry in self.entries.items():
            tokens = list(entry.chain[-1])
            assert self.cache.find(entry.hash, entry.parent, tokens) == block
            assert self.cache.find(entry.hash, entry.parent, [9, *tokens[1:]]) is None
            assert self.cache.find(entry.hash, NUM_BLOCKS, tokens) is None


SALTS = st.sampled_from(["", "x"])
CHAINS = st.lists(st.tuples(*[st.integers(0, 1)] * BLOCK_SIZE), min_size=1, max_size=5).map(tuple)


class PrefixCacheMachine(RuleBasedStateMachine):
    @initialize(forge=st.booleans())
    def start(self, forge: bool) -> None:
        self.model = CacheModel(forge=forge)

    @rule(salt=SALTS, chain=CHAINS)
    def hold(self, salt: str, chain: Chain) -> None:
        self.model.hold(salt, chain)
        self.model.check()

    @rule(salt=SALTS, chain=CHAINS)
    def look_up(self, salt: str, chain: Chain) -> None:
        self.model.look_up(salt, chain)

    @rule(idx=st.integers(0, 9))
    def let_go(self, idx: int) -> None:
        self.model.let_go(idx)
        self.model.check()

    @rule()
    def evict(self) -> None:
        self.model.evict_one()
        self.model.check()

    @rule()
    def clear(self) -> None:
        self.model.clear()
        self.model.check()


TestPrefixCacheMachine = PrefixCacheMachine.TestCase
TestPrefixCacheMachine.settings = settings(
    max_examples=120, stateful_step_count=50, deadline=None, derandomize=True, database=None
)


@pytest.mark.long
@pytest.mark.parametrize("forge", [False, True])
def test_half_a_million_operations_agree_with_the_model(forge: bool) -> None:
    model, rng = CacheModel(forge=forge), random.Random(3)
    for _ in range(500_000):
        choice = rng.random()
        if choice < 0.5:
            length = rng.randint(1, 5)
            chain = tuple(tuple(rng.choices((0, 1), k=BLOCK_SIZE)) for _ in range(length))
            model.hold(rng.choice(["", "x"]), chain)
        elif choice < 0.97:
            model.let_go(rng.randrange(10))
        elif choice < 0.995:
            model.evict_one()
        else:
            model.clear()
        model.check()
