"""What one request asks of the sampler changes nothing for its neighbours, nor do they change its
own result: requests with every kind of edit run alone, with plain neighbours, preempted and forked.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE, checkpoint
from llmserve import (
    LLM,
    RepetitionDetectionParams,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)

MAX_TOKENS = 24
SCHEMA = {"type": "array", "items": {"enum": ["owl", "fox", 12, None]}, "minItems": 2}
COMMON = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "logprobs": 3}


def pull_down_the_even(token_ids: np.ndarray, logits: np.ndarray) -> None:
    logits[::2] -= 0.25 * len(token_ids)


SPECIAL = [
    SamplingParams(presence_penalty=1.5, temperature=0.0, **COMMON),
    SamplingParams(frequency_penalty=2.0, temperature=0.5, seed=1, **COMMON),
    SamplingParams(repetition_penalty=1.4, temperature=0.8, seed=1, **COMMON),
    SamplingParams(logit_bias={7: 8.0, 198: -9.0}, temperature=1.0, seed=3, **COMMON),
    SamplingParams(allowed_token_ids=list(range(5, 90, 3)), seed=4, **COMMON),
    SamplingParams(bad_words=["ame", "^ld"], temperature=0.0, **COMMON),
    SamplingParams(min_tokens=9, stop_token_ids=list(range(20, 200)), seed=5, **COMMON),
    SamplingParams(logprob_token_ids=[4, 300, 8], seed=6, **COMMON),
    SamplingParams(thinking_token_budget=4, seed=7, **COMMON),
    SamplingParams(
        repetition_detection=RepetitionDetectionParams(8, 1, 2), temperature=0.0, **COMMON
    ),
    SamplingParams(logits_processors=[pull_down_the_even], temperature=0.9, seed=9, **COMMON),
    SamplingParams(
        repetition_penalty=1.2,
        frequency_penalty=0.1,
        logit_bias={50: 5.0},
        allowed_token_ids=range(10, 310),  # type: ignore[arg-type]
        bad_words=["owl"],
        top_p=0.9,
        seed=10,
        **COMMON,
    ),
    SamplingParams(structured_outputs=StructuredOutputsParams(json=SCHEMA), seed=11, **COMMON),
    SamplingParams(
        structured_outputs=StructuredOutputsParams(regex=r"[a-m]{2,9}(-[0-9]{2})*"),
        logits_processors=[pull_down_the_even],
        allowed_token_ids=range(2, 300),  # type: ignore[arg-type]
        presence_penalty=0.7,
        min_tokens=6,
        seed=12,
        **COMMON,
    ),
    SamplingParams(
        structured_outputs=StructuredOutputsParams(choice=["yes", "no", "not sure"]),
        temperature=0.0,
        min_tokens=20,
        **COMMON,
    ),
]
PLAIN = [
    SamplingParams(temperature=0.0, **COMMON),
    SamplingParams(temperature=0.9, seed=20, top_p=0.9, **COMMON),
    SamplingParams(temperature=1.0, seed=21, **COMMON),
]

Result = tuple[list[int], list[dict[int, tuple[float, int | None]]]]


def prompt_of(idx: int) -> list[int]:
    rng = random.Random(idx)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(5 + 7 * (idx % 9))]


def results(outputs: list[RequestOutput]) -> list[list[Result]]:
    """For each request its samples: tokens, and the logprobs reported with each."""
    return [
        [
            (
                list(sample.token_ids),
                [{i: (lp.logprob, lp.rank) for i, lp in row.items()} for row in sample.logprobs],
            )
            for sample in output.outputs
            if sample.logprobs is not None
        ]
        for output in outputs
    ]


def run(llm: LLM, params: list[SamplingParams], n: int = 1) -> list[list[Result]]:
    prompts = [{"prompt_token_ids": prompt_of(idx)} for idx in range(len(params))]
    all_params = [dataclasses.replace(p, n=n) for p in params]
    return results(llm.generate(prompts, all_params, use_tqdm=False))  # type: ignore[arg-type]


def make_llm(**options: object) -> LLM:
    defaults = {
        "max_model_len": 128,
        "num_gpu_blocks_override": 1024,
        "num_threads": 1,
        "reasoning_config": {"reasoning_start_str": "E", "reasoning_end_str": "fox"},
    }
    return LLM(checkpoint("llama"), **{**defaults, **options})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm() as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[Result]]:
    """Every request by itself, special ones first."""
    found = []
    for idx, params in enumerate(SPECIAL + PLAIN):
        prompt = {"prompt_token_ids": prompt_of(idx)}
        found += results(llm.generate(prompt, params, use_tqdm=False))  # type: ignore[arg-type]
    return found


def test_each_kind_of_edit_changes_the_tokens(llm: LLM, alone: list[list[Result]]) -> None:
    """Else the tests below would show nothing."""
    names = {f.name: f.default for f in dataclasses.fields(SamplingParams)}
    kept = {"temperature", "seed", "top_p", "top_k", "logprob_token_ids", *COMMON}
    for idx, params in enumerate(SPECIAL):
        plain = dataclasses.replace(
            params,
            **{k: v for k, v in names.items() if k not in kept and k != "logit_bias"},
            logit_bias=None,
        )
        prompt = {"prompt_token_ids": prompt_of(idx)}
        (found,) = results(llm.generate(prompt, plain, use_tqdm=False))  # type: ignore[arg-type]
        assert (found[0][0] != alone[idx][0][0]) == (params.logprob_token_ids is None), params


def test_in_one_batch_with_plain_neighbours(llm: LLM, alone: list[list[Result]]) -> None:
    llm.reset_prefix_cache()
    assert run(llm, SPECIAL + PLAIN) == alone


def test_beside_one_neighbour_at_a_time(llm: LLM, alone: list[list[Result]]) -> None:
    for idx, special in enumerate(SPECIAL):
        params = list(SPECIAL + PLAIN)
        prompts = [{"prompt_token_ids": prompt_of(i)} for i in (len(SPECIAL) + 1, idx)]
        pair = [params[len(SPECIAL) + 1], special]
        found = results(llm.generate(prompts, pair, use_tqdm=False))  # type: ignore[arg-type]
        assert found == [alone[len(SPECIAL) + 1], alone[idx]]


def test_preempted_and_in_chunks(alone: list[list[Result]]) -> None:
    with make_llm(num_gpu_blocks_override=18, max_num_batched_tokens=16, max_num_seqs=8) as llm:
        assert run(llm, SPECIAL + PLAIN) == alone
        assert llm.get_metrics().num_preemptions > 0


def test_the_first_of_n_samples_is_the_only_sample(llm: LLM, alone: list[list[Result]]) -> None:
    whole = run(llm, SPECIAL + PLAIN, n=3)
    assert [samples[:1] for samples in whole] == alone
    with make_llm(num_gpu_blocks_override=16, max_num_seqs=9) as small:
        assert run(small, SPECIAL + PLAIN, n=3) == whole
        assert small.get_metrics().num_preemptions > 0
