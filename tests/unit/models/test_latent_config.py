"""config.json of models with latent attention."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from llmserve import _core_testing
from llmserve.errors import CorruptFile


def parse(config: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return _core_testing.parse_model_config(json.dumps({**config, **fields}), 0)


LATENT: dict[str, Any] = {
    "architectures": ["YoutuForCausalLM"],
    "model_type": "youtu",
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
}


def test_latent_attention_keeps_one_row_a_token() -> None:
    config = parse(LATENT)
    assert config["ropes"][0]["rotary_dim"] == 6
    dims = {"query_rank": 20, "rank": 24, "plain_dim": 10, "rotary_dim": 6, "value_dim": 14}
    assert config["latent"] == dims
    # Neither is read: all heads make their keys and values of one latent.
    assert parse(LATENT, num_key_value_heads=3, head_dim=40) == config
    assert parse(LATENT, q_lora_rank=None)["latent"] == {**dims, "query_rank": 0}
    llama = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 256}
    assert parse(LATENT, **llama)["latent"] is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank: expected an integer from 1 to 1048576, got 0"),
        ({"q_lora_rank": "20"}, "q_lora_rank: expected an integer"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim: expected an even number of rotated elements"),
        ({"v_head_dim": -1}, "v_head_dim: expected an integer from 1"),
        ({"qk_nope_head_dim": None}, "qk_nope_head_dim: expected an integer"),
        (
            {"kv_lora_rank": 1 << 19},
            "num_attention_heads: expected heads of 524294 elements, up to",
        ),
    ],
)
def test_damaged_dims_of_latent_attention_are_named(fields: Any, message: str) -> None:
    with pytest.raises(CorruptFile, match=re.escape(message)):
        parse(LATENT, **fields)
