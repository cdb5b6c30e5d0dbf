"""Rows of each expert, counted on the device: those that the reference counts on the host."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import checkpoint
from llmserve import LLM, SamplingParams, _core_testing

REASON = _core_testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]

PROMPTS = [{"prompt_token_ids": list(range(5 + i, 8 + 2 * i))} for i in range(9)]


@pytest.fixture(scope="module", autouse=True)
def plain_products() -> Any:
    """With the same bits whatever the batch is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMSERVE_CUDA_GEMM", "plain")
        yield


def run(family: str, device: str, **options: Any) -> tuple[Any, Any, int]:
    """Loads after one call and after another, and how many steps were replayed."""
    params = [SamplingParams(temperature=0, max_tokens=4 + i, ignore_eos=True) for i in range(9)]
    fields = {"max_model_len": 64, "max_num_batched_tokens": 32, "max_num_seqs": 12, **options}
    with LLM(checkpoint(family), device=device, count_expert_loads=True, **fields) as llm:
        llm.generate(PROMPTS, params, use_tqdm=False)
        first = llm.expert_loads()
        llm.generate(PROMPTS[:2], params[:2], use_tqdm=False)
        return first, llm.expert_loads(), llm.get_metrics().num_graph_replays


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_recorded_steps_count_what_the_host_counts(family: str) -> None:
    """Nine rows run as twelve, of which three fill up."""
    options = {"dtype": "float32", "num_gpu_blocks_override": 64, "enable_prefix_caching": False}
    expected, expected_later, _ = run(family, "ref", **options)
    counted, later, num_replays = run(family, "cuda", **options)
    assert num_replays > 0
    assert counted == expected
    assert later == expected_later
    eager, _, num_replays = run(family, "cuda", enforce_eager=True, **options)
    assert num_replays == 0
    assert eager == expected
