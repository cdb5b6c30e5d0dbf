"""A model that is cut among ranks has the bits of one rank.

LLMSERVE_TEST_RANKS=2 runs the whole suite so.
"""

from __future__ import annotations

import pytest
from ranks import use_ranks
from test_invariance import PROMPTS, Result, alone, dtype, make_llm, run

__all__ = ["alone", "dtype"]  # fixtures: each request by itself, on one rank


@pytest.fixture(autouse=True, params=[2, 3])
def _several_ranks(
    alone: list[Result], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_ranks(monkeypatch, request.param)


def test_in_a_batch_and_from_cached_prefixes(dtype: str, alone: list[Result]) -> None:
    with make_llm(dtype) as llm:
        assert run(llm) == alone
        assert run(llm) == alone
        assert llm.get_metrics().prefix_cache_hits > 0


def test_in_chunks(dtype: str, alone: list[Result]) -> None:
    with make_llm(dtype, max_num_batched_tokens=17, max_num_seqs=12) as llm:
        assert run(llm) == alone


def test_preempted(dtype: str, alone: list[Result]) -> None:
    with make_llm(dtype, num_gpu_blocks_override=24) as llm:
        assert run(llm) == alone
        assert llm.get_metrics().num_preemptions > 0


def test_after_sleep(dtype: str, alone: list[Result]) -> None:
    with make_llm(dtype) as llm:
        llm.sleep(2)
        llm.wake_up()
        assert run(llm) == alone


@pytest.mark.parametrize("task", ["token_embed", "token_logits"])
def test_pooled_states_and_logits(task: str) -> None:
    with make_llm("float32") as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.encode(prompts, pooling_task=task, use_tqdm=False)
        assert [len(output.outputs.data) for output in outputs] == [len(p) for p in PROMPTS]
