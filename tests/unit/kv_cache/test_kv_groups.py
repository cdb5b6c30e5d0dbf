"""Cache groups through the engine: windows free memory, and neither plan nor tokens suffer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from checkpoints import VOCAB_SIZE, checkpoint
from llmserve import LLM, SamplingParams, _core_testing

PARAMS = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True, logprobs=0)
PROMPT = [random.Random(3).randrange(3, VOCAB_SIZE) for _ in range(90)]
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "num_threads": 1}


def parse(family: str, max_model_len: int = 0, **fields: Any) -> dict[str, Any]:
    config = json.loads((checkpoint(family) / "config.json").read_text())
    return _core_testing.parse_model_config(json.dumps({**config, **fields}), max_model_len)


def generate(path: Path, **options: Any) -> tuple[Any, int]:
    """Tokens with logprobs, and the most blocks that were in use."""
    with LLM(str(path), **{**OPTIONS, **options}) as llm:
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], PARAMS, use_tqdm=False)
        used = max(step.num_blocks_used for step in llm.trace())
    (completion,) = output.outputs
    assert completion.finish_reason == "length"
    assert completion.logprobs is not None
    rows = zip(completion.token_ids, completion.logprobs, strict=True)
    return [(token, row[token].logprob) for token, row in rows], used


def test_layers_of_one_kind_are_one_group() -> None:
    assert parse("llama")["kv_windows"] == [0]
    assert parse("mistral", sliding_window=20)["kv_windows"] == [20]
    assert parse("mistral", 20, sliding_window=20)["kv_windows"] == [0]  # nothing ever leaves it


def test_the_rarest_kind_says_how_many_layers_a_block_holds() -> None:
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    config = parse("gemma3_text", num_hidden_layers=14, layer_types=[*layers, *layers, *layers[:2]])
    assert config["kv_windows"] == [0, *[20] * 6]
    places = list(zip(config["kv_group_of_layer"], config["kv_lane_of_layer"], strict=True))
    assert len(set(places)) == 14
    assert places[5] == (0, 0)
    assert places[11] == (0, 1)
    assert {lane for _, lane in places} == {0, 1}


@pytest.mark.parametrize("family", ["mistral", "phi3"])
def test_a_windowed_model_outgrows_a_small_pool(family: str) -> None:
    """240 tokens are 15 blocks; a window of 20 and steps of 16 take 4."""
    path = checkpoint(family, sliding_window=20)
    roomy, _ = generate(path, num_gpu_blocks_override=40, enable_prefix_caching=False)
    tight, used = generate(path, num_gpu_blocks_override=4)
    assert tight == roomy
    assert used <= 4


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "cohere2", "ministral"])
def test_windowed_layers_beside_full_ones_take_their_window(family: str) -> None:
    path = checkpoint(family)
    roomy, used = generate(path, num_gpu_blocks_override=40)
    assert used <= 15 + 4
    tight, used = generate(path, num_gpu_blocks_override=16 + 4)
    assert tight == roomy
    assert used <= 15 + 4


def test_the_plan_counts_groups() -> None:
    options = {**OPTIONS, "num_gpu_blocks_override": 40, "contexts": [16, 256]}
    plan = LLM.plan(str(checkpoint("gemma2")), **options)
    block_bytes = plan.kv_bytes_per_token // 2 * 16
    assert plan.kv_cache_bytes == 40 * block_bytes
    assert plan.num_tokens == 20 * 16
    assert plan.sequence_bytes == (16 + 4) * block_bytes
    assert (plan.num_users(16), plan.num_users(256)) == (20, 2)
    refused = LLM.plan(str(checkpoint("gemma2")), **{**options, "num_gpu_blocks_override": 19})
    assert refused.refusal is not None
    assert "pass num_gpu_blocks_override=20 or more" in refused.refusal
