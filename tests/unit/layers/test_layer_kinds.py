"""What a layer is made of is rows of a table, and another kind is another row."""

from __future__ import annotations

import json
from typing import Any

import checkpoints
import numpy as np
import pytest
from llmserve import _core_testing
from model_runner import PagedRunner

TOKENS = list(range(3, 60))
# Both halves are rounded before they are added, as sums of 40 products instead of one of 80: a few
# of the last bits of logits near 10, through two layers.
SPLIT_TOLERANCE = 2e-4


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "gated"), ("phi3", "gated"), ("gpt2", "plain")]
)
def test_the_names_of_tensors_say_which_feed_forward_layer_a_family_has(
    family: str, kind: str
) -> None:
    text = (checkpoints.checkpoint(family) / "config.json").read_text()
    config = _core_testing.parse_model_config(json.dumps(json.loads(text)), 0)
    assert config["feed_forward_of_layer"] == [kind] * config["num_layers"]


@pytest.mark.parametrize("device", ["ref", "cpu"])
@pytest.mark.parametrize("fields", [{}, {"mlp_bias": True}])
def test_a_model_of_another_kind_of_feed_forward_layer_is_planned_loaded_and_run(
    device: str, fields: dict[str, Any]
) -> None:
    path = checkpoints.checkpoint("llama", **fields)
    whole = PagedRunner(path, device=device)
    split = PagedRunner(path, device=device, splits_mlp=True, max_tokens=len(TOKENS))
    want, got = whole.run(TOKENS), split.run(TOKENS)
    assert not np.array_equal(want, got)
    np.testing.assert_allclose(got, want, atol=SPLIT_TOLERANCE)
    assert split.model.weights()["unused_tensors"] == []
    assert split.model.peak_bytes == split.model.workspace_bytes(len(TOKENS), len(TOKENS))
