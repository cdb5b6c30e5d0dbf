"""A KV pool with a lower tier, next to what both would hold, and transfers under way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kv_pool_model import BLOCK_SIZE, GONE, NUM_SALTS, Held, PoolModel, Slot, draw_prompt
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

    def __init__(
        self, windows: tuple[int, ...], num_slots: int, max_stores: int, num_state_slots: int = 0
    ) -> None:
        super().__init__(windows)
        self.num_slots = num_slots * len(windows)
        self.manager = testing.KvCacheManager(
            self.num_blocks,
            BLOCK_SIZE,
            windows=windows,
            num_slots=self.num_slots,
            max_stores=max_stores * len(windows),
            num_state_slots=num_state_slots,
        )
        self.manager.tell_blocks(True)
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
            self.manager.commit(entry.table, entry.tokens, entry.num_computed, gives_back=False)
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

    def operations(self, rng: random.Random) -> dict[str, Callable[[], None]]:
        def admit() -> None:
            self.admit(rng.randrange(NUM_SALTS), draw_prompt(rng), loads=rng.random() < 0.8)

        return {
            **super().operations(rng),
            "admit": admit,
            "finish": lambda: self.finish(rng.randrange(10), is_done=rng.random() < 0.85),
            "evict": self.evict,
        }

    def check(self) -> None:
        tables = [entry.table for entry in self.held + self.loading]
        self.manager.check_integrity(tables)
        holders = Counter(b for t in tables for group in t.groups for b in group if b != GONE)
        holders.update(self.manager.replaced)
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
        while self.held or self.loading:
            self.release(0)
            self.check()
        while self.flights:
            self.finish(0, is_done=True)
            self.check()
        super().end()
