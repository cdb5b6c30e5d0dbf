"""Ranks with GPUs on several nodes, which are threads here: the tokens of one rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint
from gpu_ranks import FIELDS, Faults, need_gpus, plainly, run, told_faults, words
from llmserve import LLM
from llmserve import _core_testing as testing
from llmserve.errors import NotSupported
from nodes import Node, free_port, nodes
from test_cuda_speculation import OPTIONS, params, prompts
from unit.speculation.heads import bigram_target, right_head

REASON = testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]


@pytest.fixture(scope="module", autouse=True)
def plain_products() -> Iterator[None]:
    yield from plainly()


@pytest.fixture(autouse=True)
def shared_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node takes the visible GPUs from the first on, and here all see the same ones."""
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")


@pytest.fixture
def faults() -> Iterator[Faults]:
    yield from told_faults()


def path(family: str = "qwen3") -> str:
    return str(checkpoint(family, num_hidden_layers=3))


@pytest.fixture(scope="module")
def alone() -> list[object]:
    with LLM(path(), **FIELDS) as llm:
        return words(run(llm))


@pytest.mark.parametrize(
    ("num_nodes", "options"),
    [
        (2, {"tensor_parallel_size": 3}),
        (2, {"pipeline_parallel_size": 2}),
        (3, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    ],
    ids=str,
)
def test_tokens_are_those_of_one_rank(
    alone: list[object], num_nodes: int, options: dict[str, Any]
) -> None:
    need_gpus(2)
    with nodes(path(), num_nodes, **FIELDS, **options) as shared, LLM(path(), **shared) as llm:
        assert words(run(llm)) == alone
        llm.sleep(level=2)
        llm.wake_up()
        assert words(run(llm)) == alone
        assert llm.get_metrics().num_rank_failures == 0


def test_experts_stand_whole_on_nodes() -> None:
    need_gpus(2)
    with LLM(path("qwen3_moe"), **FIELDS) as llm:
        tokens = words(run(llm))
    options = {**FIELDS, "tensor_parallel_size": 2, "enable_expert_parallel": True}
    moe = path("qwen3_moe")
    with nodes(moe, 2, **options) as shared, LLM(moe, **shared) as llm:
        assert words(run(llm)) == tokens


@pytest.mark.parametrize(("rank", "fault"), [(1, 1), (0, 2)])
def test_a_rank_that_fails_or_hangs_is_computed_again(
    faults: Faults, alone: list[object], rank: int, fault: int
) -> None:
    options = {**FIELDS, "tensor_parallel_size": 2}
    with nodes(path(), 2, **options) as shared, LLM(path(), **shared) as llm:
        assert words(run(llm)) == alone
        faults.tell(rank=rank, call=9, fault=fault)
        assert words(run(llm)) == alone
        assert llm.get_metrics().num_rank_failures >= 1
        faults["fail_rank"] = -1
        assert words(run(llm)) == alone


def test_a_node_that_goes_and_comes_back_loses_no_token(alone: list[object]) -> None:
    need_gpus(2)
    shared = {**FIELDS, "tensor_parallel_size": 2, "nnodes": 2, "master_port": free_port()}
    other = Node(path(), {**shared, "node_rank": 1})
    try:
        with LLM(path(), **shared) as llm:
            assert words(run(llm)) == alone
            results: list[list[object]] = []
            thread = threading.Thread(target=lambda: results.append(words(run(llm))))
            thread.start()
            other.stop()
            other = Node(path(), {**shared, "node_rank": 1})
            thread.join(60)
            assert results == [alone]
        other.end()
        assert other.failure is None
    finally:
        other.stop()


def test_a_draft_model_guesses_for_nodes(alone: list[object]) -> None:
    need_gpus(2)
    config = {"model": path(), "num_speculative_tokens": 3, "adaptive": False}
    options = {**FIELDS, "tensor_parallel_size": 2, "speculative_config": config}
    with nodes(path(), 2, **options) as shared, LLM(path(), **shared) as llm:
        assert words(run(llm)) == alone
        assert llm.get_metrics().num_accepted_tokens > 0


# Of three ranks two are on one node, each with states of its own; stages send them on.
@pytest.mark.parametrize(
    ("method", "ranks"),
    [
        ("eagle3", {"tensor_parallel_size": 3}),
        ("eagle", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    ],
)
def test_a_head_drafts_on_the_gpus_of_nodes(
    tmp_path: Path, method: str, ranks: dict[str, int]
) -> None:
    need_gpus(2)
    target = str(bigram_target(tmp_path / "target"))
    drafter = right_head(method, Path(target), tmp_path)
    with LLM(target, **OPTIONS) as llm:
        alone = tokens_of(llm)
    config = {"model": str(drafter), "num_speculative_tokens": 3, "adaptive": False}
    options = {**OPTIONS, **ranks, "speculative_config": config}
    with nodes(target, 2, **options) as shared, LLM(target, **shared) as llm:
        assert tokens_of(llm) == alone
        metrics = llm.get_metrics()
    assert metrics.num_accepted_tokens > 0.8 * metrics.num_draft_tokens
    assert metrics.num_rank_failures == 0


def tokens_of(llm: LLM) -> list[tuple[int, ...]]:
    outputs = llm.generate(prompts(), params(12), use_tqdm=False)
    return [tuple(sample.token_ids) for output in outputs for sample in output.outputs]


def test_what_the_gpus_of_nodes_cannot_do_is_refused_by_name() -> None:
    need_gpus(1)
    options = {**FIELDS, "tensor_parallel_size": 2, "nnodes": 2}
    with pytest.raises(NotSupported, match="enable_dbo on device 'cuda'"):
        LLM(path(), **options, enable_dbo=True)
