"""A KV pool next to what a device would hold: contents of blocks, told apart by their tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from llmserve import _core_testing as testing
from llmserve import errors

BLOCK_SIZE = 2
NUM_BLOCKS = 10
NUM_SALTS = 2
GONE = -1  # in a block table
PREFIXES = [[], [0, 0, 1, 0], [0, 0, 1, 1, 1, 0, 0, 1]]  # that prompts share
# Of the cache groups: all tokens, windows shorter than a block, as long, and longer; with and
# without a group that keeps all.
WINDOWS = [(0,), (0, 3), (5,), (2, 0, 1, 4)]

Slot = tuple[int, int, int]  # salt, token, group


def draw_prompt(rng: random.Random) -> list[int]:
    return rng.choice(PREFIXES) + rng.choices((0, 1), k=rng.randint(1, 4))


class Held:
    """A table, the tokens of its sequence, and how many of them are computed."""

    def __init__(self, owner: int, salt: int, tokens: list[int]) -> None:
        self.table = testing.BlockTable(owner, str(salt))
        self.salt = salt
        self.tokens = tokens
        self.num_computed = 0


class PoolModel:
    """Operations on the real manager; `pool` holds what a device would hold."""

    def __init__(self, windows: tuple[int, ...] = (0,)) -> None:
        self.windows = windows
        self.num_blocks = NUM_BLOCKS * len(windows)
        self.manager = testing.KvCacheManager(self.num_blocks, BLOCK_SIZE, windows=windows)
        self.pool: list[list[Slot | None]] = [[None] * BLOCK_SIZE] * self.num_blocks
        self.held: list[Held] = []
        self.next_owner = 0
        self.manager.tell_blocks(True)
        self.told: set[bytes] = set()  # what a listener knows by events

    def listen(self) -> None:
        """What a listener knows is what is held, a block once."""
        for kind, hashes in self.manager.take_block_events():
            blocks = [hashes[i : i + 32] for i in range(0, len(hashes), 32)]
            if kind == "cleared":
                self.told.clear()
            for block in blocks:
                assert (block in self.told) == (kind == "removed")
                (self.told.discard if kind == "removed" else self.told.add)(block)
        held = self.manager.held_blocks()
        assert len(held) == 32 * len(self.told)
        assert {held[i : i + 32] for i in range(0, len(held), 32)} == self.told

    def admit(self, salt: int, tokens: list[int]) -> None:
        entry = Held(self.next_owner, salt, list(tokens))
        self.next_owner += 1
        _, pending = self.manager.find_prefix(entry.table, tokens)
        lacking = self.manager.num_lacking(entry.table, tokens)
        if pending is not None or lacking > 0:
            return
        self.manager.attach(entry.table, tokens)
        entry.num_computed = len(entry.table.groups[0]) * BLOCK_SIZE
        assert entry.num_computed < len(tokens)
        self.held.append(entry)
        self.check_content(entry)

    def run(self, idx: int, count: int) -> None:
        """Computes up to `count` tokens of a sequence; one that has run grows by a token first."""
        entry = self.pick(idx)
        if entry is None:
            return
        if entry.num_computed == len(entry.tokens):
            entry.tokens.append(count % 2)
        start = entry.num_computed
        count = min(count, len(entry.tokens) - start)
        self.manager.give_back_replaced()  # what ran before has ended
        if not self.manager.can_allocate(entry.table, start, count):
            before = [list(group) for group in entry.table.groups]
            with pytest.raises(errors.InternalError):
                self.manager.allocate(entry.table, start, count)
            assert entry.table.groups == before
            return
        for source, destination in self.manager.allocate(entry.table, start, count):
            self.pool[destination] = list(self.pool[source])
        for group, blocks in enumerate(entry.table.groups):
            for position in range(start, start + count):
                block = blocks[position // BLOCK_SIZE]
                self.pool[block] = list(self.pool[block])
                slot = (entry.salt, entry.tokens[position], group)
                self.pool[block][position % BLOCK_SIZE] = slot
        entry.num_computed = start + count
        self.manager.commit(entry.table, entry.tokens, entry.num_computed, gives_back=False)

    def fork(self, idx: int) -> None:
        entry = self.pick(idx)
        if entry is None:
            return
        child = Held(self.next_owner, entry.salt, list(entry.tokens))
        self.next_owner += 1
        child.num_computed = entry.num_computed
        self.manager.fork(entry.table, child.table)
        self.held.append(child)

    def release(self, idx: int) -> None:
        entry = self.pick(idx)
        if entry is not None:
            self.held.remove(entry)
            self.manager.release(entry.table)

    def reset(self) -> None:
        self.manager.reset_prefix_cache([entry.table for entry in self.held])

    def operations(self, rng: random.Random) -> dict[str, Callable[[], None]]:
        """All that can happen, by name; each draws what it needs."""
        return {
            "admit": lambda: self.admit(rng.randrange(NUM_SALTS), draw_prompt(rng)),
            "run": lambda: self.run(rng.randrange(10), rng.randint(1, 6)),
            "fork": lambda: self.fork(rng.randrange(10)),
            "release": lambda: self.release(rng.randrange(10)),
            "reset": self.reset,
        }

    def pick(self, idx: int) -> Held | None:
        return self.held[idx % len(self.held)] if self.held else None

    def check_content(self, entry: Held) -> None:
        """What the next token looks at is there, and what left a window is not held."""
        self.manager.check_table(entry.table, entry.num_computed, entry.num_computed)
        for group, (window, blocks) in enumerate(
            zip(self.windows, entry.table.groups, strict=False)
        ):
            first = max(0, entry.num_computed - window + 1) if window else 0
            assert all(block == GONE for block in blocks[: first // BLOCK_SIZE])
            for position in range(first, entry.num_computed):
                block = blocks[position // BLOCK_SIZE]
                expected = (entry.salt, entry.tokens[position], group)
                assert self.pool[block][position % BLOCK_SIZE] == expected

    def check(self) -> None:
        self.listen()
        self.manager.check_integrity([entry.table for entry in self.held])
        holders = Counter(
            block
            for entry in self.held
            for blocks in entry.table.groups
            for block in blocks
            if block != GONE
        )
        holders.update(self.manager.replaced)
        for block in range(self.num_blocks):
            assert self.manager.ref_count(block) == holders[block]
        free, cached = self.manager.num_free_blocks, self.manager.num_cached_blocks
        assert free + cached + len(holders) == self.num_blocks
        for entry in self.held:
            self.check_content(entry)

    def end(self) -> None:
        """Nothing is left behind, whatever became of it."""
        while self.held:
            self.release(0)
            self.check()
        self.manager.give_back_replaced()
        assert self.manager.num_used_blocks == 0
