"""Speculation changes no token, log-probability, text or end: any drafter, any number of guesses,
in any company. On models; each case is one run of several requests at once."""

from __future__ import annotations

import atexit
import functools
import itertools
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE, checkpoint, copy_checkpoint
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from llmserve import (
    LLM,
    BeamSearchParams,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    _core,
    _core_testing,
)
from safetensors.numpy import load_file, save_file

Result = list[tuple[Any, ...]]

# What a request may ask for beside its tokens.
COMPANY: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "seed": 3},
    "filtered": {"temperature": 1.1, "seed": 4, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "penalties": {
        "temperature": 0.7,
        "seed": 5,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.2,
    },
    "bias": {"temperature": 1.0, "seed": 6, "logit_bias": {7: 3.0, 9: -100.0}},
    "allowed": {"temperature": 1.0, "seed": 7, "allowed_token_ids": list(range(0, 60, 3))},
    "min_tokens": {"temperature": 1.0, "seed": 8, "min_tokens": 9, "stop_token_ids": [4, 5, 6]},
    "stop": {"temperature": 1.0, "seed": 9, "stop": ["a", "th"]},
    "logprobs": {"temperature": 0.8, "seed": 10, "logprobs": 3},
    "samples": {"temperature": 0.9, "seed": 11, "n": 3, "logprobs": 1},
    "bad_words": {"temperature": 0.9, "seed": 12, "bad_words": ["the", "a b"]},
    "prompt_logprobs": {"temperature": 0.9, "seed": 13, "prompt_logprobs": 1},
    "one": {"temperature": 0.9, "seed": 14, "max_tokens": 1},
    "thinking": {"temperature": 1.0, "seed": 15, "thinking_token_budget": 3},
    "grammar": {"temperature": 1.0, "seed": 16, "structured_outputs": {"regex": "(a|th|[x-z]e)+"}},
    "several": {
        "temperature": 0.9,
        "seed": 17,
        "n": 2,
        "logprobs": 2,
        "presence_penalty": 0.4,
        "bad_words": ["a"],
        "min_tokens": 4,
        "stop": ["e"],
    },
}
NAMES = sorted(COMPANY)


def params_of(name: str, max_tokens: int) -> SamplingParams:
    fields: dict[str, Any] = {"max_tokens": max_tokens, **COMPANY[name]}
    if "structured_outputs" in fields:
        fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
    if "min_tokens" in fields:
        fields["min_tokens"] = min(fields["min_tokens"], max_tokens)
    return SamplingParams(**fields)


def prompt_of(seed: int) -> dict[str, list[int]]:
    """Some repeat themselves, some share a beginning."""
    rng = random.Random(seed)
    kind = seed % 3
    length = rng.randrange(1, 45)
    if kind == 0:
        period = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 6))]
        tokens = (period * length)[: length + 3]
    else:
        shared = random.Random(1)
        common = [shared.randrange(3, VOCAB_SIZE) for _ in range(24)] if kind == 1 else []
        tokens = common + [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
    return {"prompt_token_ids": tokens}


def results(outputs: list[RequestOutput]) -> Result:
    return [
        (
            completion.text,
            tuple(completion.token_ids),
            completion.finish_reason,
            completion.stop_reason,
            repr(completion.logprobs),
            completion.cumulative_logprob,
            repr(output.prompt_logprobs),
            completion.error,
        )
        for output in outputs
        for completion in output.outputs
    ]


# The target's family and its sizes, and how it runs.
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    "few blocks": {"num_gpu_blocks_override": 14, "max_num_seqs": 8},
    "no cache": {"enable_prefix_caching": False},
    "static": {"scheduling_policy": "static", "max_num_seqs": 4},
    "one seat": {"max_num_seqs": 1},
    "small blocks": {"block_size": 8, "num_gpu_blocks_override": 40},
    "two threads": {"num_threads": 2},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4-g32", "hidden_size": 64, "intermediate_size": 128},
    "window": {"family": "mistral", "sliding_window": 16},
}
_SIZES = ("sliding_window", "hidden_size", "intermediate_size")


@functools.cache
def target(engine: str = "plain") -> Path:
    fields = ENGINES[engine]
    sizes = {name: fields[name] for name in _SIZES if name in fields}
    return checkpoint(fields.get("family", "llama"), eos_token_id=2, **sizes)


@functools.cache
def draft() -> Path:
    """Of the same vocabulary and no relation: hardly ever right."""
    return checkpoint("llama", seed=5, num_hidden_layers=1, eos_token_id=2)


@functools.cache
def near(engine: str) -> Path:
    """The target with noise on its weights: its second choice is often the target's first."""
    folder = Path(tempfile.mkdtemp(prefix="near-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy_checkpoint(target(engine), folder)
    rng = np.random.default_rng(0)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            noise = rng.standard_normal(tensor.shape, dtype=np.float32) * tensor.std() * 0.1
            tensors[name] = tensor + noise.astype(tensor.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


FULL_TREE = [path for level in (1, 2, 3) for path in itertools.product((0, 1), repeat=level)]
CONFIGS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix"},
    "itself": {"method": "draft_model", "model": "target"},
    "stranger": {"method": "draft_model", "model": "draft"},
    "greedy": {"method": "draft_model", "model": "target", "draft_sample_method": "greedy"},
    "decided": {"method": "draft_model", "model": "target", "adaptive": True},
    "tree": {"method": "draft_model", "model": "near", "speculative_eagle_topk": 3},
    "given tree": {"method": "draft_model", "model": "near", "speculative_token_tree": FULL_TREE},
    "decided tree": {
        "method": "draft_model",
        "model": "near",
        "speculative_eagle_topk": 2,
        "adaptive": True,
    },
}


def speculation(name: str, k: int, engine: str = "plain") -> dict[str, Any]:
    config = {"adaptive": False, **CONFIGS[name], "num_speculative_tokens": k}
    if "model" in config:
        models = {"target": target, "near": near}
        is_kin = config["model"] in models
        config["model"] = str(models[config["model"]](engine) if is_kin else draft())
        if is_kin and "quantization" in ENGINES[engine]:
            config["quantization"] = ENGINES[engine]["quantization"]
    return config


@functools.cache
def llm(engine: str, drafter: str | None, k: int) -> LLM:
    fields = {name: v for name, v in ENGINES[engine].items() if name not in (*_SIZES, "family")}
    options: dict[str, Any] = {
        "max_model_len": 128,
        "num_gpu_blocks_override": 64,
        "num_threads": 1,
        "dtype": "float32",
        "reasoning_config": {"reasoning_start_str": "e", "reasoning_end_str": "ab"},
        **fields,
    }
    if drafter is not None:
        options["speculative_config"] = speculation(drafter, k, engine)
    return LLM(str(target(engine)), **options)


@pytest.fixture(scope="module", autouse=True)
def close_all() -> Iterator[None]:
    yield
    llm.cache_clear()


Case = tuple[str, str, int, list[tuple[int, str, int]]]
CASES = st.tuples(
    st.sampled_from(sorted(ENGINES)),
    st.sampled_from(sorted(CONFIGS)),
    st.sampled_from([1, 4, 7]),
    st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from(NAMES), st.integers(1, 30)),
        min_size=1,
        max_size=6,
    ),
)


def check(case: Case) -> None:
    engine, drafter, k, requests = case
    prompts = [prompt_of(seed) for seed, _, _ in requests]
    params = [params_of(name, count) for _, name, count in requests]
    expected = llm(engine, None, 0).generate(prompts, params, use_tqdm=False)
    found = llm(engine, drafter, k).generate(prompts, params, use_tqdm=False)
    assert results(found) == results(expected)


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
@given(CASES)
def test_any_drafter_in_any_company_gives_what_plain_steps_give(case: Case) -> None:
    check(case)


@pytest.mark.long
@settings(max_examples=20_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(CASES)
def test_it_does_so_in_very_many_cases(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("engine", ["bfloat16", "fp8 cache", "int8", "int4", "window"])
@pytest.mark.parametrize("drafter", ["ngram", "itself"])
def test_guesses_are_accepted_in_every_arithmetic(engine: str, drafter: str) -> None:
    prompts = [prompt_of(seed) for seed in range(6)]
    names = ["greedy", "sampled", "penalties", "logprobs", "samples", "filtered"]
    params = [replace(params_of(name, 40), ignore_eos=True) for name in names]
    expected = llm(engine, None, 0).generate(prompts, params, use_tqdm=False)
    drafted = llm(engine, drafter, 5)
    before = drafted.get_metrics()
    found = drafted.generate(prompts, params, use_tqdm=False)
    assert results(found) == results(expected)
    metrics = drafted.get_metrics()
    num_accepted = metrics.num_accepted_tokens - before.num_accepted_tokens
    assert num_accepted > 0
    if drafter == "itself" and engine not in ("bfloat16", "fp8 cache"):
        # All but those that were cut by an end: the draft is the target.
        assert num_accepted == metrics.num_draft_tokens - before.num_draft_tokens


def test_a_grammar_holds_and_its_masks_roll_back() -> None:
    shape = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=40,
            structured_outputs=StructuredOutputsParams(json=shape),
        )
        for seed in range(4)
    ]
    prompts = [prompt_of(seed) for seed in range(4)]
    expected = llm("plain", None, 0).generate(prompts, params, use_tqdm=False)
    for drafter in ("ngram", "itself", "stranger"):
        found = llm("plain", drafter, 4).generate(prompts, params, use_tqdm=False)
        assert results(found) == results(expected)


@pytest.mark.parametrize("drafter", ["itself", "greedy"])
def test_guesses_are_of_what_the_grammar_allows_next(drafter: str) -> None:
    """Its masks are made for the guesses, too: a draft that is the target is always right."""
    prompts = [prompt_of(seed) for seed in range(4)]
    for temperature in (0.0, 1.0) if drafter == "itself" else (0.0,):
        params = [
            SamplingParams(
                temperature=temperature,
                seed=seed,
                max_tokens=40,
                structured_outputs=StructuredOutputsParams(regex=regex),
            )
            for seed, regex in enumerate(["(a|th|[x-z]e)+", "[0-9]+", "(ab|cd)*", "[a-z ]{60}"])
        ]
        engine = llm("plain", drafter, 4)
        before = engine.get_metrics()
        found = engine.generate(prompts, params, use_tqdm=False)
        assert results(found) == results(
            llm("plain", None, 0).generate(prompts, params, use_tqdm=False)
        )
        after = engine.get_metrics()
        num_drafted = after.num_draft_tokens - before.num_draft_tokens
        num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
        # A guess that is a text's end is not counted among those that are right.
        assert num_drafted > 12
        assert num_drafted - num_accepted <= len(params)


def test_beams_pooling_and_logits_processors_are_not_guessed() -> None:
    engine = llm("plain", "itself", 4)
    before = engine.get_metrics().num_drafts
    prompts = [prompt_of(2)]
    engine.beam_search(prompts, BeamSearchParams(beam_width=2, max_tokens=6))
    engine.embed(prompts)
    processors = [lambda _tokens, logits: logits]
    engine.generate(prompts, SamplingParams(max_tokens=6, logits_processors=processors))
    assert engine.get_metrics().num_drafts == before


def test_requests_and_metrics_tell_of_guesses() -> None:
    engine = llm("plain", "itself", 4)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (output,) = engine.generate([prompt_of(2)], params, use_tqdm=False)
    assert output.metrics.num_draft_tokens > 0
    assert output.metrics.num_accepted_tokens == output.metrics.num_draft_tokens
    names = {metric.name for metric in engine.get_metrics()}
    assert "vllm:spec_decode_num_accepted_tokens_per_pos" in names


def test_the_plan_knows_the_draft_model_and_the_engine_holds_no_more() -> None:
    options: dict[str, Any] = {
        "max_model_len": 128,
        "num_gpu_blocks_override": 64,
        "num_threads": 1,
        "dtype": "float32",
        "speculative_config": speculation("stranger", 4),
    }
    plan = LLM.plan(str(target()), **options)
    assert plan.draft is not None
    assert plan.draft.kv_cache_bytes > 0
    with LLM(str(target()), **options) as engine:
        use = engine.get_memory_use()
    assert use.weight_bytes == plan.weight_bytes + plan.draft.weight_bytes
    assert use.workspace_bytes == plan.workspace_bytes + plan.draft.workspace_bytes
    assert use.kv_cache_bytes == plan.kv_cache_bytes + plan.draft.kv_cache_bytes
    assert "draft" in str(plan)


def test_a_draft_of_another_vocabulary_is_refused() -> None:
    from llmserve import InvalidArgument

    other = checkpoint("llama", vocab_size=VOCAB_SIZE + 8)
    with pytest.raises(InvalidArgument, match=r"speculative_config: model .* has a vocabulary of"):
        LLM(str(target()), speculative_config={"model": str(other)}, max_model_len=128)


def test_a_short_draft_context_ends_the_guesses_and_no_request() -> None:
    short = checkpoint("llama", max_position_embeddings=32, eos_token_id=2)
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    expected = llm("plain", None, 0).generate([prompt_of(2)], params, use_tqdm=False)
    config = {"model": str(short), "num_speculative_tokens": 4, "adaptive": False}
    options: dict[str, Any] = {"num_threads": 1, "dtype": "float32", "num_gpu_blocks_override": 64}
    with LLM(str(target()), max_model_len=128, speculative_config=config, **options) as engine:
        found = engine.generate([prompt_of(2)], params, use_tqdm=False)
        assert results(found) == results(expected)


def test_recorded_guesses_of_known_accuracy_on_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter of the figures."""
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=60, ignore_eos=True)
    (expected,) = llm("plain", None, 0).generate([prompt_of(2)], params, use_tqdm=False)
    recorded = {0: expected.outputs[0].token_ids}

    def engine(
        loading: _core.LoadingModel, vocabulary: _core.Vocabulary | None = None
    ) -> _core.Engine:
        return _core_testing.faulty_engine(
            loading.config,
            vocabulary=vocabulary,
            drafter=_core_testing.RecordedDrafter(
                recorded=recorded, vocab_size=VOCAB_SIZE, accuracy=0.8
            ),
        )

    monkeypatch.setattr(_core, "Engine", engine)
    with LLM(
        str(target()),
        max_model_len=128,
        num_gpu_blocks_override=64,
        num_threads=1,
        dtype="float32",
        speculative_config={"method": "ngram", "adaptive": False},
    ) as drafted:
        (found,) = drafted.generate([prompt_of(2)], params, use_tqdm=False)
        assert results([found]) == results([expected])
        assert 0.4 < found.metrics.num_accepted_tokens / found.metrics.num_draft_tokens < 0.95
