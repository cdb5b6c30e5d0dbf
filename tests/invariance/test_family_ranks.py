"""Every architecture has the bits of one rank at two to five: any heads, norms and experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES, checkpoint
from llmserve import LLM
from test_family_invariance import PROMPTS, run
from test_invariance import Result

NUM_RANKS = [2, 3, 5]


def results(path: Path | str, num_ranks: int, **options: Any) -> list[Result]:
    """In chunks, and the second half of the prompts from the cache of the first."""
    defaults = {"max_model_len": 112, "num_threads": 1, "num_gpu_blocks_override": 64}
    with LLM(
        path,
        tensor_parallel_size=num_ranks,
        max_num_batched_tokens=50,
        max_num_seqs=4,
        **{**defaults, **options},
    ) as llm:
        return run(llm, list(range(len(PROMPTS))))


def assert_ranks_change_no_bit(path: Path | str, num_ranks: list[int], **options: Any) -> None:
    one = results(path, 1, **options)
    for count in num_ranks:
        assert results(path, count, **options) == one, f"{count} ranks"


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_change_no_bit(family: str) -> None:
    assert_ranks_change_no_bit(checkpoint(family), NUM_RANKS, dtype="float32")
    assert_ranks_change_no_bit(checkpoint(family), [4], dtype="bfloat16")
