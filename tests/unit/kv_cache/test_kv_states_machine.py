"""Fixed states of sequences: each snapshot is the state of the very tokens that it is found by."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from kv_pool_model import BLOCK_SIZE, NUM_SALTS
from kv_tier_model import TierModel
from llmserve import _core_testing as testing
from llmserve import errors

WINDOWS = [(0,), (0, 3), (5,)]
PREFIXES = [[], [0, 0, 1, 0], [0, 0, 1, 1, 1, 0, 0, 1]]


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

    def check(self) -> None:
        super().check()
        slots = [entry.table.state_slot for entry in self.held + self.loading]
        assert len(set(slots)) == len(slots)

    def end(self) -> None:
        super().end()
        num_free = self.manager.num_free_state_slots
        assert num_free + self.manager.num_state_snapshots == self.num_state_slots


class StateMachine(RuleBasedStateMachine):
    @initialize(
        windows=st.sampled_from(WINDOWS),
        num_state_slots=st.sampled_from([1, 2, 5]),
        num_slots=st.sampled_from([0, 10]),
    )
    def start(self, windows: tuple[int, ...], num_state_slots: int, num_slots: int) -> None:
        self.model = StateModel(windows, num_state_slots, num_slots)

    @rule(
        salt=st.integers(0, NUM_SALTS - 1),
        prefix=st.sampled_from(PREFIXES),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        loads=st.booleans(),
    )
    def admit(self, salt: int, prefix: list[int], tokens: list[int], loads: bool) -> None:
        self.model.admit(salt, prefix + tokens, loads)
        self.model.check()

    @rule(idx=st.integers(0, 9), count=st.integers(1, 4), keeps=st.booleans())
    def run_tokens(self, idx: int, count: int, keeps: bool) -> None:
        if keeps:
            self.model.keep(idx)
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

    @rule(idx=st.integers(0, 9), is_done=st.booleans())
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
        assert self.model.manager.num_state_snapshots == 0
        self.model.check()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.end()


TestStates = StateMachine.TestCase
TestStates.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True, database=None
)


def drive(model: StateModel, rng: random.Random, num_operations: int) -> None:
    for _ in range(num_operations):
        choice = rng.random()
        if choice < 0.25:
            tokens = rng.choice(PREFIXES) + rng.choices((0, 1), k=rng.randint(1, 4))
            model.admit(rng.randrange(NUM_SALTS), tokens, rng.random() < 0.5)
        elif choice < 0.6:
            idx = rng.randrange(10)
            if rng.random() < 0.6:
                model.keep(idx)
            model.run(idx, rng.randint(1, 4))
        elif choice < 0.64:
            model.fork(rng.randrange(10))
        elif choice < 0.85:
            model.release(rng.randrange(10))
        elif choice < 0.9:
            model.evict()
        elif choice < 0.998:
            model.finish(rng.randrange(10), is_done=rng.random() < 0.85)
        else:
            model.reset()
        model.check()
    model.end()


@pytest.mark.parametrize("num_state_slots", [4, 16])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_a_state_that_is_found_is_that_of_the_tokens(
    windows: tuple[int, ...], num_state_slots: int
) -> None:
    model = StateModel(windows, num_state_slots, num_slots=10)
    drive(model, random.Random(len(windows)), 2_000)
    assert model.num_restored + model.num_loaded > num_state_slots


@pytest.mark.long
@pytest.mark.parametrize("num_slots", [0, 10])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_a_quarter_million_operations_keep_every_state(
    windows: tuple[int, ...], num_slots: int
) -> None:
    drive(StateModel(windows, 5, num_slots), random.Random(num_slots), 250_000)


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
