"""Ranks with GPUs that cut o_proj and down_proj along K: sums in one order, whoever has what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gpu_ranks import PARAMS, expected, make_llm, need_gpus, plainly, run, words
from llmserve import LLM, SamplingParams
from llmserve import _core_testing as testing

REASON = testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]

# As tests/invariance/test_ranks_along_k.py has it, of float32.
TOLERANCE = 1e-4
PROMPT = {"prompt_token_ids": list(range(3, 43))}


@pytest.fixture(scope="module", autouse=True)
def plain_products() -> Iterator[None]:
    yield from plainly()


def logprobs(llm: LLM) -> np.ndarray:
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    rows = llm.generate([PROMPT], params, use_tqdm=False)[0].prompt_logprobs
    assert rows is not None
    tokens = PROMPT["prompt_token_ids"]
    return np.array(
        [row[t].logprob for t, row in zip(tokens[1:], rows[1:], strict=True) if row is not None]
    )


@pytest.mark.parametrize(
    ("family", "num_ranks", "options"),
    [
        ("qwen3", 2, {}),
        ("deepseek_v3", 3, {}),
        ("qwen3_moe", 2, {"enable_expert_parallel": True}),
    ],
    ids=str,
)
def test_rows_are_within_a_tolerance_of_one_rank(
    family: str, num_ranks: int, options: dict[str, Any]
) -> None:
    need_gpus(num_ranks)
    with make_llm(1, family) as llm:
        whole = logprobs(llm)
    with make_llm(num_ranks, family, tensor_parallel_cut="rows", **options) as llm:
        cut = logprobs(llm)
        np.testing.assert_allclose(cut, whole, rtol=0, atol=TOLERANCE)
        # In any company, and again.
        both = [words(run(llm)) for _ in range(2)]
        assert both[0] == both[1]
        alone = [
            words(llm.generate([{"prompt_token_ids": output.prompt_token_ids}], params))
            for output, params in zip(run(llm), PARAMS, strict=True)
        ]
        assert [row for rows in alone for row in rows] == both[0]
    assert not np.array_equal(cut, whole)  # it is another sum


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_a_tree_has_the_same_bits_at_any_number_of_ranks(family: str) -> None:
    need_gpus(3)
    options = {"tensor_parallel_cut": "tree"}
    tokens = expected(family, **options)
    assert tokens != expected(family)
    for num_ranks in (2, 3):
        with make_llm(num_ranks, family, **options) as llm:
            assert words(run(llm)) == tokens
