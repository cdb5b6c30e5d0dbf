"""Experts that stand whole on GPUs: the tokens of one, whoever has a row's expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from gpu_ranks import Faults, expected, make_llm, need_gpus, plainly, run, told_faults, words
from llmserve import LLM
from llmserve import _core_testing as testing
from llmserve.errors import NotSupported

REASON = testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]


@pytest.fixture(scope="module", autouse=True)
def plain_products() -> Iterator[None]:
    yield from plainly()


@pytest.fixture
def faults() -> Iterator[Faults]:
    yield from told_faults()


def make_whole(num_ranks: int, family: str, **options: Any) -> LLM:
    return make_llm(num_ranks, family, enable_expert_parallel=True, **options)


# Routers of all kinds, experts beside one that all tokens have, biases, an expert whose weight
# scales its input. Steps have fewer tokens than ranks, and more.
@pytest.mark.parametrize(
    ("family", "num_ranks"), [("qwen3_moe", 2), ("deepseek_v3", 3), ("gpt_oss", 2)]
)
def test_tokens_are_those_of_one_rank(family: str, num_ranks: int) -> None:
    need_gpus(num_ranks)
    tokens = expected(family)
    with make_whole(num_ranks, family) as llm:
        assert words(run(llm)) == tokens
        use = llm.get_memory_use()
        assert llm.get_metrics().num_rank_failures == 0
    with make_llm(num_ranks, family) as llm:
        assert words(run(llm)) == tokens
        # Whole or cut, they take about as much.
        assert use.weight_bytes == pytest.approx(llm.get_memory_use().weight_bytes, rel=0.05)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_other_weights_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    need_gpus(2)
    monkeypatch.setenv("LLMSERVE_CUDA_GEMM", "invariant")
    tokens = expected("qwen3_moe", **options)
    with make_whole(2, "qwen3_moe", **options) as llm:
        assert words(run(llm)) == tokens


def test_stages_and_replicas_of_whole_experts_have_the_same_tokens() -> None:
    need_gpus(4)
    tokens = expected("qwen3_moe", count_expert_loads=True)
    for field in ("pipeline_parallel_size", "data_parallel_size"):
        with make_whole(2, "qwen3_moe", **{field: 2}) as llm:
            assert words(run(llm)) == tokens


def test_a_rank_that_fails_is_computed_again(faults: Faults) -> None:
    tokens = expected("qwen3_moe")
    with make_whole(2, "qwen3_moe") as llm:
        faults.tell(rank=1, call=15, fault=1)
        assert words(run(llm)) == tokens
        assert llm.get_metrics().num_rank_failures == 1


def test_experts_of_gpus_are_not_balanced() -> None:
    need_gpus(2)
    with pytest.raises(NotSupported, match="enable_eplb on device 'cuda': ranks run experts from"):
        make_whole(2, "qwen3_moe", enable_eplb=True)
