"""Ranks that keep one KV cache together have the bits of one rank, in any company."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import VOCAB_SIZE, checkpoint
from llmserve import LLM, InvalidArgument, NotSupported, SamplingParams, _core
from llmserve import _core_testing as testing
from nodes import nodes
from test_invariance import Result, result

# Of two spans, three and one; two of them on a common prefix.
LENGTHS = [1010, 1400, 1040, 30]


def make_prompts() -> list[list[int]]:
    rng = random.Random(5)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    prompts[2][:600] = prompts[0][:600]
    return prompts


PROMPTS = make_prompts()
# The first one grows into its third span.
PARAMS = [
    SamplingParams(max_tokens=count, ignore_eos=True, logprobs=2, temperature=0.8, seed=seed)
    for seed, count in enumerate((20, 8, 8, 24))
]
# Query heads are 4. KV heads: one, two, the latent of all; windows of 20 beside layers without.
FAMILIES = {
    "one KV head": ("llama", {"num_key_value_heads": 1}),
    "two KV heads": ("llama", {"num_key_value_heads": 2}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gemma3_text": ("gemma3_text", {"num_key_value_heads": 1}),
    "gpt_oss": ("gpt_oss", {"num_key_value_heads": 1}),
    "deepseek_v2": ("deepseek_v2", {}),
    "minicpm3": ("minicpm3", {"qk_rope_head_dim": 8}),
}
OPTIONS: dict[str, Any] = {
    "max_model_len": 1440,
    "num_threads": 1,
    "num_gpu_blocks_override": 600,
    "max_num_batched_tokens": 300,
    "max_num_seqs": 4,
}


def path_of(name: str) -> Path:
    family, overrides = FAMILIES[name]
    return checkpoint(family, max_position_embeddings=2048, **overrides)


def run(llm: LLM) -> list[Result]:
    inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [result(output) for output in llm.generate(inputs, PARAMS, use_tqdm=False)]


def results(name: str, num_ranks: int = 1, size: int = 1, **options: Any) -> list[Result]:
    with LLM(
        path_of(name),
        tensor_parallel_size=num_ranks,
        decode_context_parallel_size=size,
        **{**OPTIONS, **options},
    ) as llm:
        return run(llm)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_ranks_that_keep_one_cache_change_no_bit(name: str, dtype: str) -> None:
    one = results(name, dtype=dtype)
    assert len({tuple(tokens) for tokens, _ in one}) == len(PROMPTS)
    pairs = [(4, 2)] if name == "two KV heads" else [(2, 2), (4, 2), (4, 4)]
    for num_ranks, size in pairs:
        assert results(name, num_ranks, size, dtype=dtype) == one, f"{size} of {num_ranks} ranks"


@pytest.mark.parametrize(
    ("name", "num_ranks", "size", "options"),
    [
        ("one KV head", 3, 3, {"kv_cache_dtype": "fp8", "block_size": 8}),
        ("one KV head", 2, 2, {"speculative_config": {"method": "ngram"}}),
        ("one KV head", 6, 3, {"dtype": "bfloat16", "block_size": 32}),  # more than heads
        ("one KV head", 2, 2, {"pipeline_parallel_size": 2}),
        ("minicpm3", 3, 3, {"kv_cache_dtype": "fp8", "num_threads": 5}),
        ("deepseek_v2", 2, 2, {"dtype": "bfloat16", "enable_expert_parallel": True}),
    ],
)
def test_beside_other_options(
    name: str, num_ranks: int, size: int, options: dict[str, Any]
) -> None:
    kept = {key: options[key] for key in ("dtype", "kv_cache_dtype") if key in options}
    one = results(name, **kept)
    assert results(name, num_ranks, size, **options) == one


@pytest.mark.parametrize("name", ["one KV head", "deepseek_v2"])
def test_in_any_company(name: str) -> None:
    """From cached prefixes, in small chunks, after sleep."""
    one = results(name, dtype="float32", enable_prefix_caching=False, max_num_seqs=1)
    sizes = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "dtype": "float32"}
    with LLM(path_of(name), **{**OPTIONS, **sizes, "max_num_batched_tokens": 90}) as llm:
        assert run(llm) == one
        hits = llm.get_metrics().prefix_cache_hits
        assert run(llm) == one
        assert llm.get_metrics().prefix_cache_hits > hits
        llm.sleep(2)
        llm.wake_up()
        assert run(llm) == one


@pytest.mark.parametrize("name", ["one KV head", "deepseek_v2"])
def test_preempted(name: str) -> None:
    """64 and 65 blocks, 37 of them in common, grow to 67 and 69."""
    params = [replace(PARAMS[i], max_tokens=60) for i in range(2)]
    prompts = [{"prompt_token_ids": prompt} for prompt in (PROMPTS[0], PROMPTS[2][:1030])]

    def both(**options: Any) -> tuple[list[Result], int]:
        with LLM(path_of(name), dtype="float32", **{**OPTIONS, **options}) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [result(output) for output in outputs], llm.get_metrics().num_preemptions

    one, _ = both(max_num_seqs=1)
    several, num_preemptions = both(
        tensor_parallel_size=2, decode_context_parallel_size=2, num_gpu_blocks_override=96
    )
    assert several == one
    assert num_preemptions > 0


def test_samples_that_copy_blocks_change_no_bit() -> None:
    """Copies are made before any rank stores or reads."""
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:2]]
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1, temperature=1, seed=3, n=3)

    def samples(**sizes: int) -> list[Result]:
        with LLM(path_of("one KV head"), dtype="float32", **{**OPTIONS, **sizes}) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [result(output, sample) for output in outputs for sample in range(3)]

    one = samples()
    assert samples(tensor_parallel_size=3, decode_context_parallel_size=3) == one


# 8 exchanges a layer of a step in which contexts are shared: the queries are shown, then results.
@pytest.mark.parametrize(("fault", "at"), [("throw", 100), ("leave", 101), ("throw", 102)])
def test_a_rank_that_fails_costs_a_pause(
    fault: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = results("one KV head", dtype="float32")

    def engine(
        loading: _core.LoadingModel, vocabulary: _core.Vocabulary | None = None
    ) -> _core.Engine:
        faults = testing.RankFaultOptions(rank=1, fault=fault, fail_at_exchange=at, timeout_s=20)
        return testing.faulty_engine(loading.config, vocabulary=vocabulary, rank_faults=faults)

    monkeypatch.setattr(_core, "Engine", engine)
    sizes = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    with LLM(path_of("one KV head"), dtype="float32", **{**OPTIONS, **sizes}) as llm:
        assert run(llm) == expected
        assert llm.get_metrics().num_rank_failures == 1


@pytest.mark.parametrize("name", ["one KV head", "gpt_oss", "deepseek_v2"])
def test_two_on_each_of_two_nodes_change_no_bit(name: str) -> None:
    one = results(name)
    sizes = {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}
    given = {**OPTIONS, **sizes, "distributed_timeout_seconds": 60}
    with nodes(path_of(name), 2, **given) as shared, LLM(path_of(name), **shared) as llm:
        assert run(llm) == one
        assert run(llm) == one


def test_the_same_memory_holds_as_many_times_the_tokens() -> None:
    memory = {"kv_cache_memory_bytes": 1 << 20, "max_model_len": 256, "num_threads": 1}

    def plan(name: str, num_ranks: int, size: int) -> Any:
        return LLM.plan(
            path_of(name),
            tensor_parallel_size=num_ranks,
            decode_context_parallel_size=size,
            dtype="float32",
            **memory,
        )

    for name, num_ranks in (("one KV head", 4), ("minicpm3", 4)):
        copies, halves, quarters = (plan(name, num_ranks, size) for size in (1, 2, 4))
        assert copies.kv_bytes_per_token == 2 * halves.kv_bytes_per_token
        assert copies.kv_bytes_per_token == 4 * quarters.kv_bytes_per_token
        assert copies.num_tokens >= 16
        assert halves.num_tokens // copies.num_tokens == 2
        assert quarters.num_tokens // copies.num_tokens == 4
        assert sum(rank.kv_cache_bytes for rank in halves.ranks) == halves.kv_cache_bytes
        sizes = {"tensor_parallel_size": num_ranks, "decode_context_parallel_size": 4}
        with LLM(path_of(name), dtype="float32", **memory, **sizes) as llm:
            assert llm._config.cache.num_blocks == quarters.num_blocks
            assert llm.get_memory_use().kv_cache_bytes == quarters.kv_cache_bytes


@pytest.mark.parametrize(
    ("error", "message", "name", "options"),
    [
        (
            InvalidArgument,
            "decode_context_parallel_size=2 does not divide tensor_parallel_size=3",
            "one KV head",
            {"tensor_parallel_size": 3, "decode_context_parallel_size": 2},
        ),
        (
            NotSupported,
            "decode_context_parallel_size=2: the model has 2 KV heads, of which 2 ranks of "
            "tensor_parallel_size=2 do not keep the same one; use 1, or a tensor_parallel_size "
            "that is a multiple of 4",
            "two KV heads",
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        ),
        (
            NotSupported,
            "decode_context_parallel_size=4: the model has 2 KV heads.*; use 2, or",
            "two KV heads",
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 4},
        ),
        (
            NotSupported,
            "decode_context_parallel_size=2 with nnodes=2: ranks that keep one KV cache read each",
            "one KV head",
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "nnodes": 2},
        ),
        (
            NotSupported,
            "decode_context_parallel_size=2 on device 'cuda'",
            "one KV head",
            {
                "tensor_parallel_size": 2,
                "decode_context_parallel_size": 2,
                "device": "cuda",
            },
        ),
        (
            NotSupported,
            "prefill_context_parallel_size=2 is not supported: ranks share a prompt by heads",
            "one KV head",
            {"prefill_context_parallel_size": 2},
        ),
    ],
)
def test_what_cannot_be_is_refused(
    error: type[Exception], message: str, name: str, options: dict[str, Any]
) -> None:
    with pytest.raises(error, match=message):
        LLM(path_of(name), **{**OPTIONS, **options})
