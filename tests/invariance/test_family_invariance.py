"""H1 for every architecture: the bits of a request alone, in any company."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES, VOCAB_SIZE, checkpoint
from llmserve import LLM, SamplingParams
from test_invariance import Result, result

# On a common prefix of 40, longer than the windows of 20 that some families have.
LENGTHS = [5, 22, 24, 26]


def make_prompts() -> list[list[int]]:
    rng = random.Random(11)
    common = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
    tails = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    return [common + tail for tail in tails]


PROMPTS = make_prompts()
PARAMS = [
    SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2, temperature=0.8, seed=seed)
    for seed in range(len(PROMPTS))
]
COMPANY = {
    "in a batch": {},
    "in chunks": {"max_num_batched_tokens": 19, "max_num_seqs": 4},
    # 10 blocks for the prompts, with what they share, and 21 at the end.
    "preempted": {"num_gpu_blocks_override": 14},
    "in small blocks, on two threads": {"block_size": 8, "num_threads": 2},
}


def run(llm: LLM, which: list[int]) -> list[Result]:
    inputs = [{"prompt_token_ids": PROMPTS[i]} for i in which]
    outputs = llm.generate(inputs, [PARAMS[i] for i in which], use_tqdm=False)
    return [result(output) for output in outputs]


def assert_company_changes_no_bit(path: Path, **options: Any) -> None:
    """Of what an LLM made of `path` and `options` answers to PROMPTS."""
    defaults = {"max_model_len": 112, "num_threads": 1, "num_gpu_blocks_override": 64, **options}
    with LLM(path, **defaults, enable_prefix_caching=False) as llm:
        alone = [run(llm, [i])[0] for i in range(len(PROMPTS))]
    assert len({tuple(tokens) for tokens, _ in alone}) == len(PROMPTS)
    order = list(range(len(PROMPTS)))
    for name, company in COMPANY.items():
        with LLM(path, **{**defaults, **company}) as llm:
            assert run(llm, order) == alone, name
            hits = llm.get_metrics().prefix_cache_hits
            assert run(llm, order[::-1]) == alone[::-1], f"{name}, with a cached prefix"
            metrics = llm.get_metrics()
            assert metrics.prefix_cache_hits > hits
            assert (metrics.num_preemptions > 0) == (name == "preempted")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_company_changes_no_bit(family: str, dtype: str) -> None:
    assert_company_changes_no_bit(checkpoint(family), dtype=dtype)
