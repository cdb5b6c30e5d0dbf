"""The memory of a KV cache is what its groups say: rows of any widths, values in keys, states."""

from __future__ import annotations

from typing import Any

import pytest
from llmserve import _core, _core_testing, errors
from llmserve._core import CacheGroupSpec

testing: Any = _core_testing
PAGED = CacheGroupSpec(num_layers=2, num_kv_heads=2, key_dim=16, value_dim=8)
LATENT = CacheGroupSpec(num_layers=2, num_kv_heads=1, key_dim=24, value_dim=16, values_in_keys=True)
STATES = CacheGroupSpec(num_layers=3, state_bytes=100)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_keys_and_values_have_pools_of_their_own_widths(dtype: str, size: int) -> None:
    cache = testing.lay_out_cache([PAGED], num_blocks=3, block_size=16, dtype=dtype)
    keys, values = 3 * 16 * 2 * 16 * size, 3 * 16 * 2 * 8 * size
    assert cache["num_bytes"] == 2 * (keys + values)
    assert cache["block_bytes"] == 2 * 16 * 2 * (16 + 8) * size
    assert cache["keys"] == [0, keys + values]
    assert cache["values"] == [keys, 2 * keys + values]
    assert cache["value_strides"] == [8 * size] * 2


def test_values_within_keys_take_no_room() -> None:
    cache = testing.lay_out_cache([LATENT], num_blocks=2, block_size=16)
    latent = 2 * 16 * 24 * 4
    assert cache["keys"] == cache["values"] == [0, latent]
    assert cache["value_strides"] == [24 * 4] * 2
    assert cache["num_bytes"] == 2 * latent
    assert _core.kv_bytes_per_token([LATENT], "float32") == 2 * 24 * 4
    # One scale a row, and there is one row.
    with_scales = _core.kv_bytes_per_token([LATENT], "fp8")
    assert with_scales - _core.kv_bytes_per_token([LATENT], "fp8", with_scales=False) == 2 * 4


def test_groups_share_the_pools_of_the_one_with_the_most_layers() -> None:
    other = CacheGroupSpec(window=32, num_layers=1, num_kv_heads=2, key_dim=16, value_dim=8)
    cache = testing.lay_out_cache([PAGED, other], num_blocks=3, block_size=16)
    assert cache["keys"][2] == cache["keys"][0]
    assert cache["num_bytes"] == 3 * cache["block_bytes"]


def test_a_layer_with_a_state_has_one_in_each_slot() -> None:
    cache = testing.lay_out_cache([PAGED, STATES], num_blocks=2, block_size=16, num_state_slots=5)
    pools = 2 * cache["block_bytes"]
    first = cache["states"][2]
    assert cache["states"] == [-1, -1, first, first + 500, first + 1000]
    assert first >= pools or first + 1500 <= 0  # in memory of their own
    assert cache["keys"][2:] == [-1] * 3
    assert cache["num_bytes"] == pools + 3 * 500


@pytest.mark.parametrize(
    ("groups", "num_state_slots", "message"),
    [
        ([STATES], 1, "cache groups of rows must be at least 1"),
        ([PAGED, STATES, PAGED], 1, "cache groups of rows come before those of states"),
        ([PAGED, STATES], 0, "num_state_slots must be at least 1 where a group keeps states"),
        ([PAGED], 1, "num_state_slots must be 0 where no group keeps states"),
    ],
)
def test_groups_that_no_cache_has_are_refused(
    groups: list[CacheGroupSpec], num_state_slots: int, message: str
) -> None:
    with pytest.raises(errors.InvalidArgument, match=message):
        testing.check_cache_config(groups, num_state_slots)
