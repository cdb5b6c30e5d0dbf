"""Log-probabilities of prompts against transformers, and equal bits whatever the company."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from checkpoints import VOCAB_SIZE, checkpoint, reference_model
from llmserve import LLM, RequestOutput, SamplingParams

# As for generated tokens, see test_generate.py.
LOGPROB_TOLERANCE = 2e-3
NUM_TOP = 5
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=NUM_TOP)

Rows = list[dict[int, tuple[float, int | None]] | None]


def make_prompts() -> list[list[int]]:
    rng = random.Random(5)
    common = [rng.randrange(3, VOCAB_SIZE) for _ in range(32)]
    lengths = [1, 2, 17, 40, 70, 100]
    return [common + [rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in lengths] + [[7]]


PROMPTS = make_prompts()


def make_llm(**options: Any) -> LLM:
    defaults = {"max_model_len": 256, "num_gpu_blocks_override": 200, "num_threads": 1}
    return LLM(checkpoint("llama"), dtype="float32", **{**defaults, **options})


def run(llm: LLM, params: SamplingParams = PARAMS) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)


def rows(output: RequestOutput) -> Rows:
    assert output.prompt_logprobs is not None
    return [
        None if row is None else {i: (lp.logprob, lp.rank) for i, lp in row.items()}
        for row in output.prompt_logprobs
    ]


@pytest.fixture(scope="module")
def alone() -> list[Rows]:
    with make_llm(enable_prefix_caching=False) as llm:
        return [
            rows(llm.generate({"prompt_token_ids": p}, PARAMS, use_tqdm=False)[0]) for p in PROMPTS
        ]


def test_they_equal_those_of_transformers(alone: list[Rows]) -> None:
    import torch

    model = reference_model(checkpoint("llama"))
    worst = 0.0
    for prompt, given in zip(PROMPTS, alone, strict=True):
        assert given[0] is None
        assert len(given) == len(prompt)
        with torch.inference_mode():
            expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), dim=-1)
        for position, row in enumerate(given[1:], start=1):
            assert row is not None
            logprobs = expected[position - 1]
            token_id = prompt[position]
            assert next(iter(row)) == token_id
            assert len(row) in (NUM_TOP, NUM_TOP + 1)
            assert {i for i, (_, rank) in row.items() if rank <= NUM_TOP} == set(
                logprobs.topk(NUM_TOP).indices.tolist()
            )
            assert row[token_id][1] == 1 + int((logprobs > logprobs[token_id]).sum())
            worst = max(worst, *(abs(lp - float(logprobs[i])) for i, (lp, _) in row.items()))
    assert worst < LOGPROB_TOLERANCE


@pytest.mark.parametrize("budget", [8, 16, 33, 512])
def test_they_do_not_depend_on_chunks(alone: list[Rows], budget: int) -> None:
    with make_llm(max_num_batched_tokens=budget, max_num_seqs=7) as llm:
        assert [rows(output) for output in run(llm)] == alone


def test_they_do_not_depend_on_preemption(alone: list[Rows]) -> None:
    """A pool of 16 blocks for requests that need 70, in chunks."""
    params = SamplingParams(
        temperature=0.0, max_tokens=100, ignore_eos=True, prompt_logprobs=NUM_TOP
    )
    with make_llm(num_gpu_blocks_override=16, max_num_batched_tokens=24, max_num_seqs=7) as llm:
        assert [rows(output) for output in run(llm, params)] == alone
        assert llm.get_metrics().num_preemptions > 0


def test_they_do_not_read_the_prefix_cache_and_do_not_depend_on_it(alone: list[Rows]) -> None:
    with make_llm() as llm:
        for _ in range(2):
            outputs = run(llm)
            assert [rows(output) for output in outputs] == alone
            assert [output.num_cached_tokens for output in outputs] == [0] * len(PROMPTS)
        plain = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        assert sum(output.num_cached_tokens for output in run(llm, plain)) > 100


@pytest.mark.parametrize("num_threads", [2, 3])
def test_they_do_not_depend_on_threads_or_on_n(alone: list[Rows], num_threads: int) -> None:
    params = SamplingParams(
        n=3, temperature=0.9, seed=1, top_k=5, max_tokens=4, prompt_logprobs=NUM_TOP
    )
    with make_llm(num_threads=num_threads) as llm:
        outputs = run(llm, params)
    assert [rows(output) for output in outputs] == alone
    assert [len(output.outputs) for output in outputs] == [3] * len(PROMPTS)


def test_minus_one_is_the_whole_vocabulary() -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=-1)
    with make_llm(max_logprobs=VOCAB_SIZE) as llm:
        (output,) = llm.generate({"prompt_token_ids": PROMPTS[0]}, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    for row in output.prompt_logprobs[1:]:
        assert row is not None
        assert len(row) == VOCAB_SIZE
        assert sorted(rank for rank in (lp.rank or 0 for lp in row.values()))[0] == 1
        assert math.isclose(sum(math.exp(lp.logprob) for lp in row.values()), 1, abs_tol=1e-4)
