"""Fixed states of sequences: each snapshot is the state of the very tokens that it is found by."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from kv_machine import INDICES, PROMPTS, SALTS, TierRules, drive, machine_settings
from kv_pool_model import BLOCK_SIZE
from kv_tier_model import TierModel
from llmserve import _core_testing as testing
from llmserve import errors

WINDOWS = [(0,), (0, 3), (5,)]


class StateModel(TierModel):
    """`states` holds what a state is of: salt and tokens. Copies are made as a step begins."""

    def __init__(self, windows: tuple[int, ...], num_state_slots: int, num_slots: int = 0) -> None:
        super().__init__(windows, num_slots, 4, num_state_slots)
        self.num_state_slots = num_state_slots
        self.states: list[tuple[int, ...] | None] = [None] * num_state_slots
        self.num_restored = 0  # from snapshots

    def admit(self, salt: int, tokens: list[int], loads: bool = True) -> None:
        if not self.manager.has_state_slot(testing.BlockTable(-1, str(salt)), tokens):
            return
        num_held = len(self.held)
        super().admit(salt, tokens, loads)
        self.num_restored += sum(entry.num_computed > 0 for entry in self.held[num_held:])

    def fork(self, idx: int) -> None:
        if self.manager.can_fork():
            super().fork(idx)

    def keep(self, idx: int) -> None:
        entry = self.pick(idx)
        if entry is None or not self.manager.can_keep_state(entry.table):
            return
        if entry.num_computed > 0 and entry.num_computed % BLOCK_SIZE == 0:
            self.manager.keep_state(entry.table, entry.tokens, entry.num_computed)

    def run(self, idx: int, count: int) -> None:
        entry = self.pick(idx)
        if entry is None:
            return
        for source, destination in self.manager.take_state_copies():
            self.states[destination] = self.states[source]
        start = entry.num_computed
        if start > 0:
            assert self.states[entry.table.state_slot] == (entry.salt, *entry.tokens[:start])
        super().run(idx, count)
        self.states[entry.table.state_slot] = (entry.salt, *entry.tokens[: entry.num_computed])

    def operations(self, rng: random.Random) -> dict[str, Callable[[], None]]:
        def keep_and_run() -> None:
            idx = rng.randrange(10)
            self.keep(idx)
            self.run(idx, rng.randint(1, 4))

        return {**super().operations(rng), "keep and run": keep_and_run}

    def check(self) -> None:
        super().check()
        slots = [entry.table.state_slot for entry in self.held + self.loading]
        assert len(set(slots)) == len(slots)

    def end(self) -> None:
        super().end()
        num_free = self.manager.num_free_state_slots
        assert num_free + self.manager.num_state_snapshots == self.num_state_slots


class StateMachine(TierRules):
    model: StateModel

    @initialize(
        windows=st.sampled_from(WINDOWS),
        num_state_slots=st.sampled_from([1, 2, 5]),
        num_slots=st.sampled_from([0, 10]),
    )
    def start(self, windows: tuple[int, ...], num_state_slots: int, num_slots: int) -> None:
        self.model = StateModel(windows, num_state_slots, num_slots)

    @rule(salt=SALTS, tokens=PROMPTS, loads=st.booleans())
    def admit(self, salt: int, tokens: list[int], loads: bool) -> None:
        self.model.admit(salt, tokens, loads)

    @rule(idx=INDICES)
    def keep(self, idx: int) -> None:
        self.model.keep(idx)


TestStates = StateMachine.TestCase
TestStates.settings = machine_settings(max_examples=100)

WEIGHTS = {
    "admit": 25,
    "run": 21,
    "keep and run": 21,
    "fork": 4,
    "release": 18,
    "evict": 5,
    "finish": 5.8,
    "reset": 0.2,
}


@pytest.mark.parametrize("num_state_slots", [4, 16])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_a_state_that_is_found_is_that_of_the_tokens(
    windows: tuple[int, ...], num_state_slots: int
) -> None:
    model = StateModel(windows, num_state_slots, num_slots=10)
    drive(model, len(windows), 4_000, WEIGHTS)
    assert model.num_restored + model.num_loaded > num_state_slots


@pytest.mark.long
@pytest.mark.parametrize("num_slots", [0, 10])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_a_quarter_million_operations_keep_every_state(
    windows: tuple[int, ...], num_slots: int
) -> None:
    drive(StateModel(windows, 5, num_slots), num_slots, 250_000, WEIGHTS)


def computed(manager: testing.KvCacheManager, owner: int, tokens: list[int], keep_at: int) -> None:
    """Runs a sequence to its end, and keeps its state on the way."""
    table = testing.BlockTable(owner)
    manager.attach(table, tokens)
    for start in range(0, len(tokens), BLOCK_SIZE):
        if start == keep_at:
            manager.keep_state(table, tokens, start)
        count = min(BLOCK_SIZE, len(tokens) - start)
        manager.allocate(table, start, count)
        manager.commit(table, tokens, start + count)
    manager.release(table)


def test_a_prefix_ends_where_its_state_was_kept() -> None:
    manager = testing.KvCacheManager(20, BLOCK_SIZE, num_state_slots=3)
    computed(manager, 1, list(range(8)), keep_at=4)
    assert len(manager.take_state_copies()) == 1  # to the snapshot
    table = testing.BlockTable(2)
    manager.attach(table, [*range(8), 9])
    assert len(table.blocks) == 2
    ((snapshot, destination),) = manager.take_state_copies()
    assert destination == table.state_slot != snapshot
    other = testing.BlockTable(3)
    manager.attach(other, [0, 1, 2, 9, 9, 9])  # other tokens before a state than those it is of
    assert other.blocks == []
    assert manager.take_state_copies() == []
    manager.check_integrity([table, other])


def test_a_state_whose_copy_no_step_has_made_is_not_found() -> None:
    manager = testing.KvCacheManager(20, BLOCK_SIZE, num_state_slots=3)
    tokens = list(range(6))
    table = testing.BlockTable(1)
    manager.attach(table, tokens)
    manager.allocate(table, 0, 4)
    manager.keep_state(table, tokens, 4)  # for the plan of the next step, with this one in flight
    manager.commit(table, tokens, 4)
    assert manager.find_prefix(testing.BlockTable(2), tokens)[0] == []
    assert manager.num_state_snapshots == 0
    manager.allocate(table, 4, 2)
    manager.commit(table, tokens, 6)
    assert manager.num_state_snapshots == 1
    assert len(manager.find_prefix(testing.BlockTable(2), tokens)[0]) == 2


def test_the_snapshot_that_is_copied_is_not_the_slot_it_goes_to() -> None:
    manager = testing.KvCacheManager(20, BLOCK_SIZE, num_state_slots=2)
    tokens = list(range(6))
    computed(manager, 1, tokens, keep_at=4)
    running = testing.BlockTable(2)
    manager.attach(running, [9])  # takes the free slot
    assert not manager.has_state_slot(testing.BlockTable(3), tokens)
    assert manager.has_state_slot(testing.BlockTable(3), [7, 7, 7])
    with pytest.raises(errors.InternalError, match="state slot"):
        manager.attach(testing.BlockTable(3), tokens)
