"""A KV pool with a lower tier against a model that keeps the contents of every block and slot.

Transfers end late, in any order, with or without success, and sequences leave meanwhile.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from kv_pool_model import BLOCK_SIZE, GONE, NUM_SALTS, WINDOWS, Held, PoolModel, Slot
from llmserve import _core_testing as testing

Content = list[Slot | None]
ON_THE_WAY: Content = [(-1, -1, -1)] * BLOCK_SIZE  # of a destination: nobody reads it


@dataclass(slots=True)
class Flight:
    transfer: Any
    held: Held
    left: list[int] = field(default_factory=list)  # blocks of its table, which was released


class TierModel(PoolModel):
    """`tier` holds what the slots would hold. A transfer's bytes cross as it ends."""

    def __init__(self, windows: tuple[int, ...], num_slots: int, max_stores: int) -> None:
        super().__init__(windows)
        self.num_slots = num_slots * len(windows)
        self.manager = testing.KvCacheManager(
            self.num_blocks,
            BLOCK_SIZE,
            windows=windows,
            num_slots=self.num_slots,
            max_stores=max_stores * len(windows),
        )
        self.max_stores = max_stores * len(windows)
        self.tier: list[Content] = [[None] * BLOCK_SIZE] * self.num_slots
        self.flights: dict[int, Flight] = {}
        self.loading: list[Held] = []
        self.num_loaded = 0

    def admit(self, salt: int, tokens: list[int], loads: bool = True) -> None:
        entry = Held(self.next_owner, salt, list(tokens))
        if loads and self.manager.load(entry.table, tokens):
            self.next_owner += 1
            self.loading.append(entry)
            self.begin(entry)
            assert entry.table.is_moving
            blocks = self.manager.find_prefix(testing.BlockTable(-1, str(salt)), tokens)[0]
            assert len(blocks) < len(entry.table.groups[0])
        else:
            super().admit(salt, tokens)

    def run(self, idx: int, count: int) -> None:
        entry = self.pick(idx)
        super().run(idx, count)
        if entry is not None:
            self.begin(entry)

    def begin(self, entry: Held) -> None:
        """Takes up the transfer, if any, that an operation on `entry` has begun."""
        transfers = self.manager.take_transfers()
        assert len(transfers) <= 1
        for transfer in transfers:
            self.flights[transfer.id] = Flight(transfer, entry)
            for _, _, destination in transfer.moves:
                (self.pool if transfer.is_load else self.tier)[destination] = ON_THE_WAY
        stores = [f.transfer for f in self.flights.values() if not f.transfer.is_load]
        assert sum(len(store.moves) for store in stores) <= self.max_stores

    def release(self, idx: int) -> None:
        entries = self.held + self.loading
        if not entries:
            return
        entry = entries[idx % len(entries)]
        (self.held if entry in self.held else self.loading).remove(entry)
        for flight in self.flights.values():
            if flight.held is entry:
                flight.left = [b for group in entry.table.groups for b in group if b != GONE]
        self.manager.release(entry.table)
        assert not entry.table.is_moving
        assert entry.table.groups == []

    def finish(self, idx: int, is_done: bool) -> None:
        if not self.flights:
            return
        number = sorted(self.flights)[idx % len(self.flights)]
        flight = self.flights.pop(number)
        source, destination = (
            (self.tier, self.pool) if flight.transfer.is_load else (self.pool, self.tier)
        )
        for _, from_, to in flight.transfer.moves:
            if is_done:
                destination[to] = list(source[from_])
        table = self.manager.finish_transfer(number, is_done)
        assert self.manager.finish_transfer(number, not is_done) is None  # once more
        is_awaited = flight.transfer.is_load and flight.held in self.loading
        assert table is (flight.held.table if is_awaited else None)
        if is_awaited:
            self.loading.remove(flight.held)
            self.end_load(flight.held, flight.transfer, is_done)

    def end_load(self, entry: Held, transfer: Any, is_done: bool) -> None:
        if is_done:
            self.num_loaded += 1
            entry.num_computed = len(entry.table.groups[0]) * BLOCK_SIZE
            self.held.append(entry)
            self.check_content(entry)
            self.manager.commit(entry.table, entry.tokens, entry.num_computed)
            self.begin(entry)
        else:
            assert entry.table.groups == []
            slots = {source for _, source, _ in transfer.moves}
            again = testing.BlockTable(-1, str(entry.salt))
            if self.manager.load(again, entry.tokens):
                (retry,) = self.manager.take_transfers()
                assert slots.isdisjoint(source for _, source, _ in retry.moves)
                self.manager.finish_transfer(retry.id, False)

    def evict(self) -> None:
        """Somebody takes all that can be had of the pool, and gives it back."""
        table = testing.BlockTable(-1, "taker")
        count = (self.manager.num_free_blocks + self.manager.num_cached_blocks) // len(self.windows)
        self.manager.allocate(table, 0, count * BLOCK_SIZE)
        for block in (block for group in table.groups for block in group):
            self.pool[block] = ON_THE_WAY
        self.manager.release(table)

    def reset(self) -> None:
        self.manager.reset_prefix_cache([entry.table for entry in self.held + self.loading])
        assert self.manager.num_stored_blocks == 0

    def check(self) -> None:
        tables = [entry.table for entry in self.held + self.loading]
        self.manager.check_integrity(tables)
        holders = Counter(b for t in tables for group in t.groups for b in group if b != GONE)
        for flight in self.flights.values():
            holders.update(flight.left)
            is_load = flight.transfer.is_load
            holders.update(to if is_load else from_ for _, from_, to in flight.transfer.moves)
        for block in range(self.num_blocks):
            assert self.manager.ref_count(block) == holders[block]
        free, cached = self.manager.num_free_blocks, self.manager.num_cached_blocks
        assert free + cached + len(holders) == self.num_blocks
        assert self.manager.num_transfers == len(self.flights)
        for entry in self.held:
            self.check_content(entry)

    def end(self) -> None:
        """Nothing is left behind, whatever became of it."""
        while self.held or self.loading:
            self.release(0)
            self.check()
        while self.flights:
            self.finish(0, is_done=True)
            self.check()
        assert self.manager.num_used_blocks == 0


# Tiers smaller than the pool, as large and larger.
NUM_SLOTS = [3, 10, 40]
PREFIXES = [[], [0, 0, 1, 0], [0, 0, 1, 1, 1, 0, 0, 1]]
PROMPTS = st.tuples(
    st.sampled_from(PREFIXES), st.lists(st.integers(0, 1), min_size=1, max_size=4)
).map(lambda parts: [*parts[0], *parts[1]])


class TierMachine(RuleBasedStateMachine):
    @initialize(
        windows=st.sampled_from(WINDOWS),
        num_slots=st.sampled_from(NUM_SLOTS),
        max_stores=st.sampled_from([1, 3, 100]),
    )
    def start(self, windows: tuple[int, ...], num_slots: int, max_stores: int) -> None:
        self.model = TierModel(windows, num_slots, max_stores)

    @rule(salt=st.integers(0, NUM_SALTS - 1), tokens=PROMPTS, loads=st.booleans())
    def admit(self, salt: int, tokens: list[int], loads: bool) -> None:
        self.model.admit(salt, tokens, loads)
        self.model.check()

    @rule(idx=st.integers(0, 9), count=st.integers(1, 6))
    def run_tokens(self, idx: int, count: int) -> None:
        self.model.run(idx, count)
        self.model.check()

    @rule(idx=st.integers(0, 9))
    def fork(self, idx: int) -> None:
        self.model.fork(idx)
        self.model.check()

    @rule(idx=st.integers(0, 9))
    def release(self, idx: int) -> None:
        self.model.release(idx)
        self.model.check()

    @rule(idx=st.integers(0, 9), is_done=st.sampled_from([True, True, True, False]))
    def finish(self, idx: int, is_done: bool) -> None:
        self.model.finish(idx, is_done)
        self.model.check()

    @rule()
    def evict(self) -> None:
        self.model.evict()
        self.model.check()

    @rule()
    def reset(self) -> None:
        self.model.reset()
        self.model.check()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.end()


TestTiers = TierMachine.TestCase
TestTiers.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, derandomize=True, database=None
)


def drive(model: TierModel, rng: random.Random, num_operations: int) -> None:
    for _ in range(num_operations):
        choice = rng.random()
        if choice < 0.25:
            tokens = rng.choice(PREFIXES) + rng.choices((0, 1), k=rng.randint(1, 4))
            model.admit(rng.randrange(NUM_SALTS), tokens, loads=rng.random() < 0.8)
        elif choice < 0.5:
            model.run(rng.randrange(10), rng.randint(1, 6))
        elif choice < 0.53:
            model.fork(rng.randrange(10))
        elif choice < 0.75:
            model.release(rng.randrange(10))
        elif choice < 0.82:
            model.evict()
        elif choice < 0.998:
            model.finish(rng.randrange(10), is_done=rng.random() < 0.85)
        else:
            model.reset()
        model.check()
    model.end()


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_what_comes_from_a_lower_tier_is_what_went_there(windows: tuple[int, ...]) -> None:
    model = TierModel(windows, num_slots=40, max_stores=8)
    drive(model, random.Random(len(windows)), 2_000)
    assert model.num_loaded > 20


@pytest.mark.long
@pytest.mark.parametrize("num_slots", NUM_SLOTS)
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_a_quarter_million_operations_with_a_tier_keep_every_block(
    windows: tuple[int, ...], num_slots: int
) -> None:
    drive(TierModel(windows, num_slots, max_stores=4), random.Random(num_slots), 250_000)
