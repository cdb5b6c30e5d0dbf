"""Stages with GPUs of their own: the tokens of one rank, with steps in several of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from checkpoints import checkpoint
from gpu_ranks import (
    FIELDS,
    Faults,
    need_gpus,
    plainly,
    run,
    told_faults,
    words,
)
from llmserve import LLM, SamplingParams
from llmserve import _core_testing as testing

REASON = testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]


@pytest.fixture(scope="module", autouse=True)
def plain_products() -> Iterator[None]:
    yield from plainly()


@pytest.fixture
def faults() -> Iterator[Faults]:
    yield from told_faults()


def make_llm(num_stages: int, family: str = "qwen3", **options: Any) -> LLM:
    fields = {**FIELDS, "pipeline_parallel_size": num_stages, **options}
    return LLM(checkpoint(family, num_hidden_layers=3), **fields)


def most_in_flight(llm: LLM) -> int:
    return max(step.num_in_flight for step in llm.trace())


@pytest.fixture(scope="module")
def alone() -> list[object]:
    with make_llm(1) as llm:
        return words(run(llm))


@pytest.mark.parametrize(("num_stages", "num_ranks"), [(3, 1), (2, 2)])
def test_as_many_steps_as_stages_change_no_bit(
    alone: list[object], num_stages: int, num_ranks: int
) -> None:
    need_gpus(num_stages * num_ranks)
    with make_llm(num_stages, tensor_parallel_size=num_ranks) as llm:
        assert words(run(llm)) == alone
        assert words(run(llm)) == alone
        assert most_in_flight(llm) == num_stages
        metrics = llm.get_metrics()
        assert f"rank 0 of {num_stages * num_ranks}" in llm.description
    assert metrics.num_overlapped_steps > 0
    assert metrics.num_rank_failures == 0


def test_one_step_at_a_time_has_the_same_tokens(alone: list[object]) -> None:
    need_gpus(2)
    with make_llm(2, async_scheduling=False) as llm:
        assert words(run(llm)) == alone
        assert most_in_flight(llm) == 1


def test_a_draft_model_guesses_between_two_steps(alone: list[object]) -> None:
    need_gpus(2)
    config = {"model": checkpoint("qwen3"), "num_speculative_tokens": 3, "adaptive": False}
    with make_llm(2, speculative_config=config) as llm:
        assert words(run(llm)) == alone
        assert llm.get_metrics().num_draft_tokens > 0


def test_rows_of_experts_are_counted_in_all_stages() -> None:
    need_gpus(2)
    loads = []
    for num_stages in (1, 2):
        with make_llm(num_stages, "qwen3_moe", count_expert_loads=True) as llm:
            prompt = {"prompt_token_ids": list(range(5, 25))}
            llm.generate([prompt], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
            loads.append(llm.expert_loads())
    assert loads[0] == loads[1]
    assert set(loads[0]) == {0, 2}  # layer 1 is dense


# Of the first stage and of the last, in the first step and in a later one.
@pytest.mark.parametrize(("rank", "call"), [(0, 2), (1, 9)])
def test_an_error_that_nccl_reports_is_computed_again(
    faults: Faults, alone: list[object], rank: int, call: int
) -> None:
    with make_llm(2) as llm:
        faults.tell(rank=rank, call=call, fault=1)
        assert words(run(llm)) == alone
        metrics = llm.get_metrics()
        assert words(run(llm)) == alone
    assert metrics.num_rank_failures == 1
    assert metrics.num_nccl_errors >= 1


def test_a_stage_that_hangs_is_noticed(faults: Faults, alone: list[object]) -> None:
    with make_llm(2) as llm:
        assert words(run(llm)) == alone
        faults.tell(rank=0, call=7, fault=2)
        assert words(run(llm)) == alone
        assert llm.get_metrics().num_rank_failures == 1


def test_the_memory_of_stages_is_planned(alone: list[object]) -> None:
    need_gpus(4)
    options = {"num_gpu_blocks_override": None, "gpu_memory_utilization": 0.01}
    for num_ranks in (1, 2):
        with make_llm(2, tensor_parallel_size=num_ranks, **options) as llm:
            use, config = llm._engine.memory_use, llm._config
            llm.sleep()
            assert llm._engine.memory_use.kv_cache_bytes == 0
            llm.wake_up()
            assert words(run(llm)) == alone
        plan = LLM.plan(
            checkpoint("qwen3", num_hidden_layers=3),
            **{**FIELDS, **options},
            pipeline_parallel_size=2,
            tensor_parallel_size=num_ranks,
        )
        assert plan.num_blocks == config.cache.num_blocks
        assert use.weight_bytes == sum(rank.weight_bytes for rank in plan.ranks)
        assert use.workspace_bytes == sum(rank.workspace_bytes for rank in plan.ranks)
        assert use.kv_cache_bytes == sum(rank.kv_cache_bytes for rank in plan.ranks)
