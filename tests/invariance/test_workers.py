"""Two workers that compute the same steps have the same bits, and the results of one.

LLMSERVE_TEST_WORKERS=2 runs the whole suite so.
"""

from __future__ import annotations

import pytest
from test_invariance import PROMPTS, Result, alone, dtype, make_llm, run
from workers import use_workers

__all__ = ["alone", "dtype"]  # fixtures: each request by itself, on one worker


@pytest.fixture(autouse=True)
def _two_workers(alone: list[Result], monkeypatch: pytest.MonkeyPatch) -> None:
    use_workers(monkeypatch, 2)


def test_in_a_batch_and_from_cached_prefixes(dtype: str, alone: list[Result]) -> None:
    with make_llm(dtype) as llm:
        assert run(llm) == alone
        assert run(llm) == alone


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
