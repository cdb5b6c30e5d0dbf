"""What the state machines and the long runs over the KV pool have in common."""

from __future__ import annotations

import operator
import random
from collections.abc import Mapping

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kv_pool_model import NUM_SALTS, PREFIXES, PoolModel
from kv_tier_model import TierModel

SALTS = st.integers(0, NUM_SALTS - 1)
PROMPTS = st.builds(
    operator.add,
    st.sampled_from(PREFIXES),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
)
INDICES = st.integers(0, 9)  # of whoever holds blocks, and of what is under way


class PoolRules(RuleBasedStateMachine):
    """Rules of every machine. An `initialize` of its own sets `model`."""

    model: PoolModel

    @rule(idx=INDICES, count=st.integers(1, 6))
    def run_tokens(self, idx: int, count: int) -> None:
        self.model.run(idx, count)

    @rule(idx=INDICES)
    def fork(self, idx: int) -> None:
        self.model.fork(idx)

    @rule(idx=INDICES)
    def release(self, idx: int) -> None:
        self.model.release(idx)

    @rule()
    def reset(self) -> None:
        self.model.reset()

    @invariant()
    def check(self) -> None:
        self.model.check()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.end()


class TierRules(PoolRules):
    """Those of a machine with a lower tier."""

    model: TierModel

    @rule(idx=INDICES, is_done=st.sampled_from([True, True, True, False]))
    def finish(self, idx: int, is_done: bool) -> None:
        self.model.finish(idx, is_done)

    @rule()
    def evict(self) -> None:
        self.model.evict()


def machine_settings(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        database=None,
    )


def drive(model: PoolModel, seed: int, num_operations: int, weights: Mapping[str, float]) -> None:
    """Operations of the model, drawn by their weights, then its end; checked after each."""
    rng = random.Random(seed)
    operations = model.operations(rng)
    assert operations.keys() == weights.keys()
    for name in rng.choices(list(weights), list(weights.values()), k=num_operations):
        operations[name]()
        model.check()
    model.end()
