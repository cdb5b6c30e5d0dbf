"""Ranks and stages on several nodes have the bits of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES, checkpoint
from llmserve import LLM
from nodes import nodes
from test_family_invariance import PROMPTS, run
from test_invariance import Result

SIZES = {"max_model_len": 112, "num_threads": 1, "num_gpu_blocks_override": 64}
SIZES |= {"max_num_batched_tokens": 50, "max_num_seqs": 4}
# Windows, experts, latent attention, sinks, norms over all heads, one KV head, biases, tied heads.
DIFFERENT = ("llama", "gemma3_text", "mixtral", "deepseek_v3", "gpt_oss", "olmo2", "gpt_bigcode")


def alone(path: Path, **options: Any) -> list[Result]:
    with LLM(path, **{**SIZES, **options}) as llm:
        return run(llm, list(range(len(PROMPTS))))


def assert_no_bit_changes(
    path: Path, num_nodes: int, parallel: dict[str, Any], **options: Any
) -> None:
    given = {**SIZES, **options}
    with nodes(path, num_nodes, **parallel, **given) as shared, LLM(path, **shared) as llm:
        assert run(llm, list(range(len(PROMPTS)))) == alone(path, **options), parallel


@pytest.mark.parametrize("family", [family for family in DIFFERENT if family in FAMILIES])
def test_two_nodes_change_no_bit(family: str) -> None:
    assert_no_bit_changes(checkpoint(family), 2, {"tensor_parallel_size": 2}, dtype="float32")


@pytest.mark.parametrize(
    ("num_nodes", "parallel", "options"),
    [
        (3, {"tensor_parallel_size": 3}, {"dtype": "bfloat16"}),
        (2, {"tensor_parallel_size": 4}, {"quantization": "int8"}),
        (2, {"tensor_parallel_size": 3}, {"quantization": "int4-g32"}),
        (2, {"pipeline_parallel_size": 2}, {"dtype": "float32"}),
        (3, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, {"dtype": "float32"}),
        (
            2,
            {"tensor_parallel_size": 2},
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        ),
    ],
)
def test_ranks_and_stages_over_nodes_change_no_bit(
    num_nodes: int, parallel: dict[str, Any], options: dict[str, Any]
) -> None:
    path = checkpoint("llama", num_hidden_layers=4)
    assert_no_bit_changes(path, num_nodes, parallel, **options)


def test_experts_that_stand_whole_on_nodes_change_no_bit() -> None:
    parallel = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    assert_no_bit_changes(checkpoint("mixtral"), 2, parallel, dtype="float32")


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_nodes_change_no_bit_of_any_architecture(family: str) -> None:
    assert_no_bit_changes(checkpoint(family), 2, {"tensor_parallel_size": 2}, dtype="float32")
    assert_no_bit_changes(checkpoint(family), 3, {"tensor_parallel_size": 3}, dtype="bfloat16")
