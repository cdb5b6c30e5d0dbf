"""A KV pool with a lower tier against a model that keeps the contents of every block and slot.

Transfers end late, in any order, with or without success, and sequences leave meanwhile.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from kv_machine import PROMPTS, SALTS, TierRules, drive, machine_settings
from kv_pool_model import WINDOWS
from kv_tier_model import TierModel

# Tiers smaller than the pool, as large and larger.
NUM_SLOTS = [3, 10, 40]
WEIGHTS = {
    "admit": 25,
    "run": 25,
    "fork": 3,
    "release": 22,
    "evict": 7,
    "finish": 17.8,
    "reset": 0.2,
}


class TierMachine(TierRules):
    @initialize(
        windows=st.sampled_from(WINDOWS),
        num_slots=st.sampled_from(NUM_SLOTS),
        max_stores=st.sampled_from([1, 3, 100]),
    )
    def start(self, windows: tuple[int, ...], num_slots: int, max_stores: int) -> None:
        self.model = TierModel(windows, num_slots, max_stores)

    @rule(salt=SALTS, tokens=PROMPTS, loads=st.booleans())
    def admit(self, salt: int, tokens: list[int], loads: bool) -> None:
        self.model.admit(salt, tokens, loads)


TestTiers = TierMachine.TestCase
TestTiers.settings = machine_settings(max_examples=90)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_what_comes_from_a_lower_tier_is_what_went_there(windows: tuple[int, ...]) -> None:
    model = TierModel(windows, num_slots=40, max_stores=8)
    drive(model, len(windows), 2_000, WEIGHTS)
    assert model.num_loaded > 20


@pytest.mark.long
@pytest.mark.parametrize("num_slots", NUM_SLOTS)
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_a_quarter_million_operations_with_a_tier_keep_every_block(
    windows: tuple[int, ...], num_slots: int
) -> None:
    drive(TierModel(windows, num_slots, max_stores=4), num_slots, 250_000, WEIGHTS)
