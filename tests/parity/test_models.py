"""Every architecture against transformers, on tiny checkpoints with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    FAMILIES,
    ROUTERS_THAT_FLIP,
    VOCAB_SIZE,
    architecture,
    checkpoint,
    copy_checkpoint,
    make_checkpoint,
    reference_model,
)
from llmserve import _core, _core_testing
from model_runner import PagedRunner
from ticks import tick

# The promise is 2e-3 on log-probabilities. What separates two f32 implementations here is the order
# of sums of at most 80 terms near 1, a few 1e-6 a layer; logits reach 10 and carry it 10 times.
LOGPROB_TOLERANCE = 2e-4
# The weights are the same bf16 numbers on both sides; keys and values, and activations where a
# kernel multiplies in bf16, are rounded by 2^-9 relative. Logits near 10 carry 10 x 2^-9 for each
# rounding, a handful in a row.
BF16_LOGPROB_TOLERANCE = 0.1
# Rounded keys and values alone move those of exaone4, gemma3_text and olmo3, which norm queries and
# keys and what comes out of every branch, twice as far as others' (0.06, 0.05 and 0.07, by ref).
# Rounded activations move them once more as far (0.10, 0.15 and 0.13, by AVX-512 with bf16). Where
# neither is rounded, the same checkpoints are within 2e-5.
# GPT-Neo does not divide scores by the square root of head_dim, which is 12 here, so that rounding
# moves them 3.5 times as far: 0.06 by ref, 0.11 with rounded activations.
# The weights of experts follow the activations, by which those with experts move half as far again.
SENSITIVE_TO_ROUNDING = dict.fromkeys(
    [
        *("ernie4_5_moe", "exaone4", "gemma3_text", "gpt_neo", "hunyuan_v1_moe"),
        *("mixtral", "olmo3", "olmoe"),
    ],
    2.0,
)
# Keys and values are off by up to 2^-4 of themselves, and logits near 10 by as much of theirs: the
# errors of a row's elements are independent, so that a layer adds less than one of them.
FP8_LOGPROB_TOLERANCE = 10 * 2**-4

CUDA_REASON = _core_testing.unavailable_reason("cuda")
DEVICES = [
    *("cpu", "ref"),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(bool(CUDA_REASON), reason=f"no CUDA here: {CUDA_REASON}"),
        ],
    ),
]


@pytest.fixture(autouse=True)
def _plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 without TF32 and the same bits whatever the batch, which these tests are about."""
    monkeypatch.setenv("LLMSERVE_CUDA_GEMM", "plain")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


def _longrope(original: int) -> dict[str, Any]:
    """Of heads of 12. transformers takes the long factors for prompts beyond the original length,
    ours for a max_model_len (256) beyond it: they agree on prompts of 90."""
    factors = {
        "short_factor": [1.0, 1.1, 1.3, 1.5, 1.9, 2.5],
        "long_factor": [1.0, 2.0, 3.5, 5.0, 9.0, 20.0],
    }
    fields = _rope(rope_type="longrope", original_max_position_embeddings=original, **factors)
    fields["rope_parameters"]["partial_rotary_factor"] = 1.0
    return fields | {"original_max_position_embeddings": original}


def _phimoe_longrope() -> dict[str, Any]:
    """Within the original length: beyond it transformers takes the short factors all the same."""
    fields = _longrope(256)
    fields["rope_parameters"] |= {"short_mscale": 1.1, "long_mscale": 1.3}
    return fields


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "arcee-biases": ("arcee", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "cohere-biases": ("cohere", {"attention_bias": True}),
    "cohere-qk-norm": ("cohere", {"use_qk_norm": True}),
    "ernie4_5-untied": ("ernie4_5", {"use_bias": False, "tie_word_embeddings": False}),
    "exaone4-head-dim": ("exaone4", {"head_dim": 16, "tie_word_embeddings": True}),
    "exaone4-no-window": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"], **_rope(**LLAMA3)},
    ),
    "exaone4-rope-llama3": ("exaone4", _rope(**LLAMA3)),
    "exaone_moe-plain": (
        "exaone_moe",
        {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["sparse"] * 2},
    ),
    "falcon-mha": ("falcon", {"multi_query": False, "num_kv_heads": 4}),
    "falcon-new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-new-one-norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-sequential": ("falcon", {"parallel_attn": False, "bias": False}),
    "gemma-biases": ("gemma", {"attention_bias": True, "num_key_value_heads": 1}),
    "gemma2-no-caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3-rope-linear": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
            "final_logit_softcapping": 2.0,
        },
    ),
    "glm-no-biases": ("glm", {"attention_bias": False, "head_dim": 12}),
    "glm4-no-biases": ("glm4", {"attention_bias": False, "hidden_act": "gelu_pytorch_tanh"}),
    "gpt2-gelu": ("gpt2", {"activation_function": "gelu", "scale_attn_weights": False}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False}),
    "gpt_bigcode-mha": (
        "gpt_bigcode",
        {"multi_query": False, "activation_function": "gelu", "scale_attn_weights": False},
    ),
    "gpt_bigcode-tied": ("gpt_bigcode", {"tie_word_embeddings": True}),
    "gptj-whole-heads": ("gptj", {"rotary_dim": 12, "activation_function": "gelu"}),
    "gpt_neo-all-global": (
        "gpt_neo",
        {"attention_layers": ["global"], "activation_function": "gelu", "head_dim": 16},
    ),
    "gpt_neo-untied": ("gpt_neo", {"tie_word_embeddings": False, "intermediate_size": None}),
    "gpt_neox-sequential": (
        "gpt_neox",
        {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_fast"},
    ),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "granitemoe-biases": ("granitemoe", {"attention_bias": True}),
    "flex_olmo-normalised": ("flex_olmo", {"norm_topk_prob": True, "attention_bias": True}),
    "hy_v3-all-sparse": (
        "hy_v3",
        {
            "attention_bias": False,
            "num_shared_experts": 1,
            "mlp_layer_types": ["sparse"] * 2,
        },
    ),
    "glm4_moe-plain": (
        "glm4_moe",
        {"attention_bias": False, "use_qk_norm": False, "norm_topk_prob": False, "n_group": 1},
    ),
    "dots1-biases": (
        "dots1",
        {"n_shared_experts": 1, "norm_topk_prob": False, "attention_bias": True},
    ),
    "ernie4_5_moe-interval": (
        "ernie4_5_moe",
        {"moe_layer_start_index": 0, "moe_layer_interval": 2, "tie_word_embeddings": False},
    ),
    "ernie4_5_moe-biases": ("ernie4_5_moe", {"use_bias": True, "moe_layer_end_index": 1}),
    "mixtral-window": ("mixtral", {"sliding_window": 20, "head_dim": 16}),
    "olmoe-normalised": ("olmoe", {"norm_topk_prob": True, "attention_bias": True}),
    "phimoe-wide-masks": ("phimoe", {"router_jitter_noise": 0.3, "attention_bias": False}),
    "phimoe-longrope": ("phimoe", _phimoe_longrope()),
    "qwen2_moe-normalised": (
        "qwen2_moe",
        {"norm_topk_prob": True, "qkv_bias": False, "decoder_sparse_step": 2},
    ),
    "qwen3_moe-not-normalised": (
        "qwen3_moe",
        {"norm_topk_prob": False, "mlp_only_layers": [], "attention_bias": True},
    ),
    "helium-biases": ("helium", {"attention_bias": True, "mlp_bias": True}),
    "hunyuan_v1_dense-biases": ("hunyuan_v1_dense", {"attention_bias": True}),
    "hunyuan_v1_dense-rope-default": ("hunyuan_v1_dense", _rope(rope_type="default")),
    "hunyuan_v1_dense-rope-dynamic": ("hunyuan_v1_dense", _rope(rope_type="dynamic", factor=2.0)),
    "minicpm3-no-factors": (
        "minicpm3",
        {
            "scale_depth": None,
            "dim_model_base": None,
            "v_head_dim": None,
            "tie_word_embeddings": True,
            **_rope(**LLAMA3),
        },
    ),
    "ministral3-window": ("ministral3", {"sliding_window": 20}),
    "nemotron-biases": ("nemotron", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "olmo2-biases": ("olmo2", {"attention_bias": True}),
    "opt-no-biases": ("opt", {"enable_bias": False, "activation_function": "gelu"}),
    "opt-tied": ("opt", {"tie_word_embeddings": True}),
    "persimmon-no-qk-norm": ("persimmon", {"qk_layernorm": False, "tie_word_embeddings": True}),
    "phi-qk-norm": ("phi", {"qk_layernorm": True, "hidden_act": "gelu"}),
    "phi-tied": ("phi", {"tie_word_embeddings": True}),
    "phi3-partial": ("phi3", _rope(rope_type="default", partial_rotary_factor=0.5)),
    "phi3-longrope-short": ("phi3", _longrope(256)),
    "phi3-longrope-long": ("phi3", _longrope(64)),
    "phi3-window": ("phi3", {"sliding_window": 20}),
    "smollm3-window": (
        "smollm3",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "seed_oss-other-biases": (
        "seed_oss",
        {"attention_bias": False, "attention_out_bias": False, "mlp_bias": True},
    ),
    "solar_open-plain": (
        "solar_open",
        {
            "attention_bias": False,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
            **_rope(**LLAMA3),
        },
    ),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "stablelm-qk-norm": ("stablelm", {"qk_layernorm": True, "tie_word_embeddings": True}),
    "starcoder2-no-biases": ("starcoder2", {"use_bias": False, "sliding_window": 20}),
    "youtu-halves": ("youtu", {"rope_interleave": False}),
    "youtu-one-projection": ("youtu", {"q_lora_rank": None, **_rope(rope_type="default")}),
    "llama-rope-longrope": ("llama", _longrope(64)),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-head-dim": ("llama", {"head_dim": 10}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-rope-theta": ("llama", _rope(rope_type="default", rope_theta=500000.0)),
    "llama-rope-linear": ("llama", _rope(rope_type="linear", factor=2.0)),
    "llama-rope-dynamic": ("llama", _rope(rope_type="dynamic", factor=2.0)),
    "llama-rope-yarn": ("llama", _rope(**YARN)),
    "llama-rope-yarn-mscale": (
        "llama",
        _rope(**YARN, mscale=0.8, mscale_all_dim=0.5, beta_fast=16, beta_slow=2, truncate=False),
    ),
    "llama-rope-yarn-attention-factor": ("llama", _rope(**YARN, attention_factor=1.25)),
    "llama-rope-llama3": ("llama", _rope(**LLAMA3)),
    "mistral-window": ("mistral", {"sliding_window": 20}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
    "qwen3-window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


def _prompt(length: int = 90, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _reference_logprobs(path: Path, tokens: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        logits = reference_model(path)(torch.tensor([tokens])).logits[0]
    return _log_softmax(logits.numpy())


def test_every_architecture_of_the_registry_has_a_case() -> None:
    configs = [checkpoint(family) / "config.json" for family in FAMILIES]
    architectures = {json.loads(config.read_text())["architectures"][0] for config in configs}
    assert architectures == {name for name, _ in _core.supported_architectures()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_logprobs_agree_with_transformers(case: str, device: str) -> None:
    family, overrides = CASES[case]
    path = checkpoint(family, **overrides)
    tokens = _prompt()
    logits = PagedRunner(path, device=device).run(tokens)
    difference = np.abs(_log_softmax(logits) - _reference_logprobs(path, tokens)).max()
    assert difference < LOGPROB_TOLERANCE
    if device == "cuda" and case == family:
        tick(architecture(family), "cuda/float32", is_expected=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_logprobs_agree_with_transformers(family: str, device: str) -> None:
    path = checkpoint(family, dtype="bfloat16")
    tokens = _prompt()
    logits = PagedRunner(path, device=device, kv_dtype="bfloat16").run(tokens)
    rows = np.abs(_log_softmax(logits) - _reference_logprobs(path, tokens)).max(axis=1)
    difference = np.median(rows) if family in ROUTERS_THAT_FLIP else rows.max()
    assert difference < BF16_LOGPROB_TOLERANCE * SENSITIVE_TO_ROUNDING.get(family, 1.0)
    if device == "cuda":
        tick(architecture(family), "cuda/bfloat16", is_expected=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ROUTERS_THAT_FLIP)
def test_where_nothing_is_rounded_bf16_weights_agree(family: str, device: str) -> None:
    path = checkpoint(family, dtype="bfloat16")
    tokens = _prompt()
    logits = PagedRunner(path, device=device, dtype="float32", kv_dtype="float32").run(tokens)
    difference = np.abs(_log_softmax(logits) - _reference_logprobs(path, tokens)).max()
    assert difference < LOGPROB_TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "minicpm3", "qwen3"])
def test_logprobs_over_an_fp8_cache_agree_with_transformers(family: str, device: str) -> None:
    # Rows are of a multiple of 4 elements.
    path = checkpoint(family, **({"qk_rope_head_dim": 8} if family == "minicpm3" else {}))
    tokens = _prompt()
    logits = PagedRunner(path, device=device, kv_dtype="fp8").run(tokens)
    difference = np.abs(_log_softmax(logits) - _reference_logprobs(path, tokens))
    assert difference.max() < FP8_LOGPROB_TOLERANCE
    assert difference.max() > LOGPROB_TOLERANCE  # or nothing was rounded
    again = PagedRunner(path, device=device, kv_dtype="fp8", block_size=8).run(tokens, [3, 10])
    assert device == "cuda" or np.array_equal(logits, again)


@pytest.mark.parametrize("device", DEVICES)
def test_f16_checkpoint_runs_in_f32(device: str) -> None:
    path = checkpoint("llama", dtype="float16")
    runner = PagedRunner(path, device=device)
    tokens = _prompt()
    difference = np.abs(_log_softmax(runner.run(tokens)) - _reference_logprobs(path, tokens)).max()
    assert difference < LOGPROB_TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["llama-biases", "mistral-window", "qwen2-window", "qwen3"])
def test_chunks_give_the_bits_of_the_whole(case: str, device: str, dtype: str) -> None:
    family, overrides = CASES[case]
    path = checkpoint(family, **overrides)
    tokens = _prompt()
    options = {"device": device, "dtype": dtype, "kv_dtype": dtype}
    whole = PagedRunner(path, **options).run(tokens)
    for block_size, chunks in [(8, [1, 2, 30]), (16, [16, 16]), (32, [1] * 89)]:
        chunked = PagedRunner(path, block_size=block_size, **options).run(tokens, chunks)
        assert np.array_equal(whole, chunked)


@pytest.mark.parametrize("device", DEVICES)
def test_ragged_batch_gives_the_bits_of_each_sequence_alone(device: str) -> None:
    path = checkpoint("qwen3")
    prompts = [_prompt(length, seed) for seed, length in enumerate([1, 5, 40, 17])]
    alone = [PagedRunner(path, device=device).run(prompt) for prompt in prompts]
    batch = PagedRunner(path, device=device)
    ids = [batch.add_sequence() for _ in prompts]
    # Prompts of different lengths and a chunk in one step; then a decode beside the chunk's rest.
    first = [prompt[: min(len(prompt), 20)] for prompt in prompts]
    _, logits = batch.step(list(zip(ids, first, strict=True)))
    _, rest = batch.step([(ids[2], prompts[2][20:]), (ids[0], [7])])
    got = np.split(logits, np.cumsum([len(tokens) for tokens in first])[:-1])
    got[2] = np.concatenate([got[2], rest[:20]])
    for want, have in zip(alone, got, strict=True):
        assert np.array_equal(want, have)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_threads_give_the_bits_of_one(dtype: str) -> None:
    path = checkpoint("qwen3")
    options = {"device": "cpu", "dtype": dtype, "kv_dtype": dtype}
    one = PagedRunner(path, num_threads=1, **options).run(_prompt())
    two = PagedRunner(path, num_threads=2, **options).run(_prompt(), [1, 30])
    assert np.array_equal(one, two)


def test_more_rows_than_the_mlp_takes_at_once_change_nothing() -> None:
    path = checkpoint("llama", max_position_embeddings=1024)
    tokens = _prompt(600)
    options = {"num_blocks": 64, "max_tokens": 600, "max_logit_rows": 600}
    whole = PagedRunner(path, **options).run(tokens)
    assert np.array_equal(whole, PagedRunner(path, **options).run(tokens, [300]))


@pytest.mark.parametrize("device", DEVICES)
def test_dynamic_rope_past_the_original_length_agrees_at_max_model_len(device: str) -> None:
    # transformers grows the base with the sequence; ours is fixed at max_model_len, so that they
    # agree on a prompt of just that length.
    path = checkpoint("llama", max_position_embeddings=64, **CASES["llama-rope-dynamic"][1])
    tokens = _prompt(100)
    logits = PagedRunner(path, device=device, max_model_len=100).run(tokens)
    difference = np.abs(_log_softmax(logits) - _reference_logprobs(path, tokens)).max()
    assert difference < LOGPROB_TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [*FAMILIES, "llama-biases", "llama-tied", "falcon-new"])
def test_plan_is_what_is_allocated(case: str, dtype: str, device: str) -> None:
    family, overrides = CASES[case]
    path = checkpoint(family, **overrides)
    plan = _core.inspect_checkpoint(
        str(path),
        device=device,
        dtype=dtype,
        kv_cache_dtype=dtype,
        max_tokens=90,
        max_logit_rows=90,
    )["plan"]
    runner = PagedRunner(path, device=device, dtype=dtype, max_tokens=90, max_logit_rows=90)
    loaded = runner.model.weights()
    assert plan["group_bytes"] == loaded["group_bytes"]
    assert plan["total_bytes"] == loaded["total_bytes"] > 0
    assert plan["kv_bytes_per_token"] == runner.model.kv_bytes_per_token(dtype)
    runner.run(_prompt(90))
    assert plan["workspace_bytes"] == runner.model.peak_bytes


def test_one_token_and_one_row_use_the_workspace_planned_for_them() -> None:
    runner = PagedRunner(checkpoint("llama"), max_tokens=1, max_logit_rows=1)
    runner.run([5])
    assert runner.model.peak_bytes == runner.model.workspace_bytes(1, 1)


def test_a_base_model_saved_without_its_prefix_gives_the_same_bits(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    path = copy_checkpoint(checkpoint("gpt2"), tmp_path / "base")
    tensors = load_file(path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 4, 4), np.float32)  # the causal mask of old exports
    save_file(bare, path / "model.safetensors")
    runner = PagedRunner(path)
    assert runner.model.weights()["unused_tensors"] == []
    tokens = _prompt(20)
    assert np.array_equal(runner.run(tokens), PagedRunner(checkpoint("gpt2")).run(tokens))


def test_shards_give_the_bits_of_the_single_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = _prompt(20)
    single = PagedRunner(checkpoint("llama")).run(tokens)
    assert np.array_equal(single, PagedRunner(tmp_path).run(tokens))
