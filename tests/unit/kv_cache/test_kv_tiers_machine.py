"""A KV pool with a lower tier against a model that keeps the contents of every block and slot.

Transfers end late, in any order, with or without success, and sequences leave meanwhile.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from kv_pool_model import NUM_SALTS, WINDOWS
from kv_tier_model import TierModel

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
