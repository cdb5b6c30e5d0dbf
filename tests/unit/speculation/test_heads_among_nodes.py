"""Heads of a model whose ranks are on several nodes: the guesses and the tokens of one rank."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from checkpoints import VOCAB_SIZE, make_checkpoint
from heads import add_draft_layer, bigram_target, right_head
from llmserve import LLM, DeviceError, SamplingParams
from nodes import Node, free_port, nodes
from test_heads import OPTIONS, check_right_head, prompts, sampled, tokens

NODES = {**OPTIONS, "cluster_key": "a key of these tests", "distributed_timeout_seconds": 60}
ASKED = prompts(1, 20, 45, 33)
PARAMS = [sampled(1), sampled(2, n=3), sampled(3, temperature=0.0), sampled(4)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bigram_target(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture(scope="module")
def expected(target: Path) -> list[list[int]]:
    with LLM(str(target), **OPTIONS) as llm:
        return tokens(llm.generate(ASKED, PARAMS, use_tqdm=False))


@pytest.mark.parametrize(
    ("method", "num_nodes", "options"),
    [
        ("eagle3", 2, {"tensor_parallel_size": 2}),
        ("eagle", 2, {"tensor_parallel_size": 3, "max_num_batched_tokens": 16, "max_num_seqs": 8}),
        ("medusa", 3, {"tensor_parallel_size": 3, "enable_dbo": True}),
    ],
)
def test_a_head_that_fits_is_right_on_several_nodes(
    tmp_path: Path,
    target: Path,
    expected: list[list[int]],
    method: str,
    num_nodes: int,
    options: dict[str, Any],
) -> None:
    config = {
        "model": str(right_head(method, target, tmp_path)),
        "num_speculative_tokens": 4,
        "adaptive": False,
    }
    given = {**NODES, **options, "speculative_config": config}
    with nodes(target, num_nodes, **given) as shared, LLM(str(target), **shared) as llm:
        plan = LLM.plan(str(target), **shared)
        least = 0.2 if method == "medusa" else 0.9
        check_right_head(llm, plan, ASKED, PARAMS, expected, least)
        assert llm.get_metrics().num_rank_failures == 0


@pytest.mark.parametrize("topk", [1, 3])
def test_a_layer_of_the_models_own_file_guesses_the_same_on_two_nodes(
    tmp_path: Path, topk: int
) -> None:
    make_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=2, eos_token_id=None)
    add_draft_layer(tmp_path, 2, VOCAB_SIZE)
    config: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    if topk > 1:
        config["speculative_eagle_topk"] = topk
    asked, params = prompts(20, 3), sampled(max_tokens=30)

    def run(llm: LLM) -> tuple[list[list[int]], list[int]]:
        found = tokens(llm.generate(asked, params, use_tqdm=False))
        counts = llm.get_metrics()
        return found, [counts.num_draft_tokens, counts.num_accepted_tokens]

    with LLM(str(tmp_path), **OPTIONS) as llm:
        plain = tokens(llm.generate(asked, params, use_tqdm=False))
    with LLM(str(tmp_path), **OPTIONS, speculative_config=config) as llm:
        alone = run(llm)
    assert alone[0] == plain
    given = {**NODES, "tensor_parallel_size": 2, "speculative_config": config}
    with nodes(tmp_path, 2, **given) as shared, LLM(str(tmp_path), **shared) as llm:
        assert run(llm) == alone


def test_a_node_that_comes_back_has_no_head_and_costs_no_token(
    tmp_path: Path, target: Path
) -> None:
    asked, params = prompts(20, 7, 9, 11), SamplingParams(seed=1, max_tokens=60)
    with LLM(str(target), **OPTIONS) as llm:
        plain = tokens(llm.generate(asked, params, use_tqdm=False))
    config = {"model": str(right_head("eagle3", target, tmp_path)), "adaptive": False}
    given = {**NODES, "tensor_parallel_size": 2, "nnodes": 2, "speculative_config": config}
    given["master_port"] = free_port()
    other = Node(target, {**given, "node_rank": 1})
    try:
        with LLM(str(target), **given) as llm:
            assert tokens(llm.generate(asked, params, use_tqdm=False)) == plain
            other.stop()
            other = Node(target, {**given, "node_rank": 1})
            assert tokens(llm.generate(asked, params, use_tqdm=False)) == plain
            assert llm.get_metrics().num_rank_failures in (0, 1)  # or it was the head's exchange
            drafted = llm.get_metrics().num_draft_tokens
            assert tokens(llm.generate(asked, params, use_tqdm=False)) == plain
            assert llm.get_metrics().num_draft_tokens == drafted
    finally:
        other.stop()


def test_a_node_with_another_head_is_refused(tmp_path: Path, target: Path) -> None:
    head = right_head("eagle3", target, tmp_path / "one")
    other_head = tmp_path / "other"
    shutil.copytree(head, other_head)
    for file in other_head.glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    given = {**NODES, "tensor_parallel_size": 2, "nnodes": 2, "master_port": free_port()}
    other = Node(
        target, {**given, "node_rank": 1, "speculative_config": {"model": str(other_head)}}
    )
    try:
        with pytest.raises(DeviceError, match="would compute something else: its weights is "):
            LLM(
                str(target),
                **{**given, "distributed_timeout_seconds": 1},
                speculative_config={"model": str(head)},
            )
    finally:
        other.stop()
