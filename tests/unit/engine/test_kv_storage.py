"""The memory of a KV cache is what the layers' specs say: rows of any widths, values within keys,
states."""

from __future__ import annotations

from typing import Any

import pytest
from llmserve import _core, _core_testing
from llmserve._core import KvLayerSpec

testing: Any = _core_testing
PAGED = KvLayerSpec(2, 16, 8)
LATENT = KvLayerSpec(1, 24, 16, values_in_keys=True)
STATE = KvLayerSpec(1, 8, 8, state_bytes=100)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_keys_and_values_have_pools_of_their_own_widths(dtype: str, size: int) -> None:
    cache = testing.lay_out_cache([PAGED, PAGED], num_blocks=3, block_size=16, dtype=dtype)
    keys, values = 3 * 16 * 2 * 16 * size, 3 * 16 * 2 * 8 * size
    assert cache["num_bytes"] == 2 * (keys + values)
    assert cache["block_bytes"] == 2 * 16 * 2 * (16 + 8) * size
    assert cache["keys"] == [0, keys + values]
    assert cache["values"] == [keys, 2 * keys + values]
    assert cache["value_strides"] == [8 * size] * 2


def test_values_within_keys_take_no_room() -> None:
    cache = testing.lay_out_cache([LATENT, PAGED], num_blocks=2, block_size=16)
    latent = 2 * 16 * 24 * 4
    assert cache["keys"] == [0, latent]
    assert cache["values"] == [0, latent + 2 * 16 * 2 * 16 * 4]
    assert cache["value_strides"] == [24 * 4, 8 * 4]
    assert cache["num_bytes"] == latent + 2 * 16 * 2 * (16 + 8) * 4
    assert _core.kv_bytes_per_token([LATENT], "float32") == 24 * 4
    # One scale a row, and there is one row.
    with_scales = _core.kv_bytes_per_token([LATENT], "fp8")
    assert with_scales - _core.kv_bytes_per_token([LATENT], "fp8", with_scales=False) == 4


def test_a_layer_with_a_state_has_one_for_each_sequence() -> None:
    cache = testing.lay_out_cache([STATE, PAGED, STATE], num_blocks=2, block_size=16, num_states=5)
    pools = 2 * cache["block_bytes"]
    assert cache["states"] == [pools, -1, pools + 500]
    assert cache["num_bytes"] == pools + 2 * 500
