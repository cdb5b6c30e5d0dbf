"""Steps of several GPUs recorded with their exchanges: on all ranks or on none, the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from checkpoints import checkpoint
from gpu_ranks import FIELDS, Faults, need_gpus, plainly, told_faults
from llmserve import LLM, SamplingParams
from llmserve import _core_testing as testing

REASON = testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]

# Rows that end at different times, so that a step runs fewer than the one before has drawn.
PROMPTS = [[5, 6, 7], list(range(3, 23)), [9] * 17, [8, 4]]
PARAMS = [
    SamplingParams(
        max_tokens=5 + 4 * i, ignore_eos=True, temperature=0.9 if i % 2 else 0.0, seed=i, top_p=0.9
    )
    for i in range(4)
]


@pytest.fixture(scope="module", autouse=True)
def plain_products() -> Iterator[None]:
    yield from plainly()


@pytest.fixture
def faults() -> Iterator[Faults]:
    for told in told_faults():
        told["num_stuck"] = 0
        yield told
        told["num_failing_captures"] = 0
        assert told["num_stuck"] == 0  # no communicator was ended while a graph had it


def make_llm(family: str = "qwen3", **options: Any) -> LLM:
    return LLM(checkpoint(family), **{**FIELDS, **options})


def tokens(llm: LLM, params: list[SamplingParams] = PARAMS) -> list[tuple[int, ...]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [tuple(sample.token_ids) for output in outputs for sample in output.outputs]


def counts(llm: LLM) -> tuple[int, int]:
    metrics = llm.get_metrics()
    return metrics.num_graph_captures, metrics.num_graph_replays


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, ...]]:
    with make_llm(enforce_eager=True) as llm:
        return tokens(llm)


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 3},
        {"tensor_parallel_size": 2, "async_scheduling": False},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_recorded_steps_have_the_tokens_of_one_gpu(
    alone: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    need_gpus(4)
    with make_llm(**options) as llm:
        assert tokens(llm) == alone
        assert tokens(llm) == alone
        num_captures, num_replays = counts(llm)
        assert llm.get_metrics().num_rank_failures == 0
    assert num_captures > 1
    assert num_replays > 2 * num_captures


@pytest.mark.parametrize(
    "options",
    [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}],
    ids=str,
)
def test_rows_that_ask_for_more_are_drawn_behind_the_layers_of_all_ranks(
    options: dict[str, Any],
) -> None:
    need_gpus(4)
    more = [{"repetition_penalty": 1.4}, {}, {"logprobs": 2}, {"allowed_token_ids": [3, 4, 5, 6]}]
    params = [
        SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.0, seed=i, **fields)
        for i, fields in enumerate(more)
    ]
    with make_llm(enforce_eager=True) as llm:
        expected = tokens(llm, params)
    with make_llm(**options) as llm:
        assert tokens(llm, params) == expected
        num_captures, num_replays = counts(llm)
    assert num_replays > num_captures > 0


def test_graphs_of_two_ranks_that_may_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch, alone: list[tuple[int, ...]]
) -> None:
    need_gpus(1)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setenv("LLMSERVE_EMULATOR_DEVICES", "1")
    if testing.num_gpus() > 1:
        pytest.skip("several GPUs are visible: ranks do not share one")
    with make_llm(tensor_parallel_size=2) as llm:
        assert tokens(llm) == alone
        num_captures, num_replays = counts(llm)
        assert llm.get_metrics().num_rank_failures == 0
    assert num_replays > num_captures > 0


def test_experts_that_stand_whole_are_exchanged_in_graphs() -> None:
    need_gpus(2)
    with make_llm("qwen3_moe", enforce_eager=True) as llm:
        expected = tokens(llm)
    options = {"enable_expert_parallel": True, "count_expert_loads": True}
    with make_llm("qwen3_moe", tensor_parallel_size=2, **options) as llm:
        assert tokens(llm) == expected
        num_captures, num_replays = counts(llm)
    assert num_replays > num_captures > 0


def test_eager_ranks_record_nothing(alone: list[tuple[int, ...]]) -> None:
    need_gpus(2)
    with make_llm(tensor_parallel_size=2, enforce_eager=True) as llm:
        assert tokens(llm) == alone
        assert counts(llm) == (0, 0)


@pytest.mark.parametrize("device", ["0", "1"])
def test_no_rank_launches_what_another_could_not_record(
    faults: Faults, alone: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setenv("LLMSERVE_EMULATOR_NO_GRAPHS", device)
    with make_llm(tensor_parallel_size=2) as llm:
        assert tokens(llm) == alone
        assert llm.get_metrics().num_rank_failures == 0
        assert counts(llm)[1] == 0


def test_what_was_recorded_is_recorded_again_after_sleep(alone: list[tuple[int, ...]]) -> None:
    need_gpus(2)
    with make_llm(tensor_parallel_size=2) as llm:
        assert tokens(llm) == alone
        num_captures, _ = counts(llm)
        llm.sleep()
        llm.wake_up()
        assert tokens(llm) == alone
        assert counts(llm)[0] > num_captures


def test_memory_that_moves_on_one_rank_ends_the_graphs_of_all(alone: list[tuple[int, ...]]) -> None:
    """Rank 0 alone has rows that are edited; their working memory grows, and graphs are anew."""
    need_gpus(2)
    edited = [
        SamplingParams(max_tokens=3, ignore_eos=True, temperature=1.0, seed=1, logit_bias={3: 1.0})
    ] * len(PROMPTS)
    with make_llm(tensor_parallel_size=2) as llm:
        assert tokens(llm) == alone
        tokens(llm, edited)
        assert tokens(llm) == alone
        assert llm.get_metrics().num_rank_failures == 0


# An error that comes later, and a rank that never comes.
@pytest.mark.parametrize(("fault", "rank"), [(1, 0), (1, 1), (2, 1)])
def test_a_step_that_fails_in_a_graph_is_computed_and_recorded_again(
    faults: Faults, alone: list[tuple[int, ...]], fault: int, rank: int
) -> None:
    with make_llm(tensor_parallel_size=2) as llm:
        assert tokens(llm) == alone
        assert tokens(llm) == alone
        num_captures, _ = counts(llm)
        faults.tell(rank=rank, call=150, fault=fault)  # in a step of the replays
        assert tokens(llm) == alone
        assert faults["num_faults"] == 0
        assert llm.get_metrics().num_rank_failures == 1
        _, num_replays = counts(llm)
        assert tokens(llm) == alone
        assert counts(llm)[0] > num_captures
        assert counts(llm)[1] > num_replays


@pytest.mark.parametrize(("rank", "num_before"), [(0, 0), (1, 0), (1, 3)])
def test_ranks_do_without_graphs_where_exchanges_fail_as_they_are_captured(
    faults: Faults, alone: list[tuple[int, ...]], rank: int, num_before: int
) -> None:
    """Also where the graph has the communicator by then."""
    with make_llm(tensor_parallel_size=2) as llm:
        faults["fail_rank"], faults["num_failing_captures"] = rank, 1000
        faults["num_whole_captures"], faults["fail_call"] = num_before, 10**9
        assert tokens(llm) == alone
        assert tokens(llm) == alone
        assert llm.get_metrics().num_rank_failures == 1
        assert counts(llm)[1] == 0
