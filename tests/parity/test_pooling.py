"""Hidden states, embeddings and logits out: transformers', and equal bits in any company."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE, checkpoint, copy_checkpoint, reference_model
from llmserve import (
    LLM,
    BeamSearchParams,
    CorruptFile,
    InvalidArgument,
    NotSupported,
    PoolingParams,
    ResourceExhausted,
    SamplingParams,
)
from llmserve.pooling_params import PoolingConfig

# Two f32 computations of the same sums in another order; the bar of the requirements, far above
# what is seen (about 1e-5).
TOLERANCE = 2e-3
HIDDEN_SIZE = 48


def make_prompts() -> list[list[int]]:
    rng = random.Random(11)
    common = [rng.randrange(3, VOCAB_SIZE) for _ in range(32)]
    tails = [[rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (1, 2, 15, 16, 33, 90)]
    return [*(common + tail for tail in tails), [5], common]


PROMPTS = make_prompts()


SIZES: dict[str, Any] = {"max_model_len": 256, "num_gpu_blocks_override": 200, "num_threads": 1}


def make_llm(directory: Path | None = None, **options: Any) -> LLM:
    return LLM(directory or checkpoint("llama"), dtype="float32", **{**SIZES, **options})


def encode(llm: LLM, task: str, params: PoolingParams | None = None) -> list[np.ndarray]:
    prompts = [{"prompt_token_ids": p} for p in PROMPTS]
    outputs = llm.encode(prompts, params, pooling_task=task, use_tqdm=False)
    assert all(output.finished and output.error is None for output in outputs)
    return [np.asarray(output.outputs.data) for output in outputs]


def reference_states(prompt: list[int]) -> np.ndarray:
    import torch

    with torch.inference_mode():
        model = reference_model(checkpoint("llama")).model
        return model(torch.tensor([prompt])).last_hidden_state[0].numpy()


def normalized(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@pytest.fixture(scope="module")
def alone() -> list[np.ndarray]:
    """The hidden states of each prompt run by itself."""
    with make_llm(enable_prefix_caching=False) as llm:
        states = []
        for prompt in PROMPTS:
            (output,) = llm.encode({"prompt_token_ids": prompt}, use_tqdm=False)
            states.append(np.asarray(output.outputs.data))
    return states


def test_token_embeddings_are_the_last_hidden_states_of_transformers(
    alone: list[np.ndarray],
) -> None:
    for prompt, states in zip(PROMPTS, alone, strict=True):
        assert states.shape == (len(prompt), HIDDEN_SIZE)
        assert np.abs(states - reference_states(prompt)).max() < TOLERANCE


def test_token_logits_are_those_of_transformers() -> None:
    import torch

    with make_llm() as llm:
        given = encode(llm, "token_logits")
    for prompt, logits in zip(PROMPTS, given, strict=True):
        with torch.inference_mode():
            expected = reference_model(checkpoint("llama"))(torch.tensor([prompt])).logits[0]
        assert logits.shape == (len(prompt), VOCAB_SIZE)
        assert np.abs(logits - expected.numpy()).max() < TOLERANCE


def test_an_embedding_is_the_last_state_normalized(alone: list[np.ndarray]) -> None:
    with make_llm() as llm:
        outputs = llm.embed([{"prompt_token_ids": p} for p in PROMPTS], use_tqdm=False)
        raw = encode(llm, "embed", PoolingParams(use_activation=False))
        cut = encode(llm, "embed", PoolingParams(dimensions=10))
    for output, states, plain, short in zip(outputs, alone, raw, cut, strict=True):
        assert np.array_equal(plain, states[-1])
        np.testing.assert_allclose(output.outputs.embedding, normalized(states[-1]), atol=1e-6)
        np.testing.assert_allclose(short, normalized(states[-1][:10]), atol=1e-6)
        assert output.outputs.hidden_size == HIDDEN_SIZE


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 8, "max_num_seqs": 8},
        {"max_num_batched_tokens": 33, "max_num_seqs": 3},
        {"num_threads": 3, "block_size": 8},
        {"enable_chunked_prefill": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("task", ["token_embed", "token_logits"])
def test_bits_do_not_depend_on_company_chunks_threads_or_cache(
    alone: list[np.ndarray], task: str, options: dict[str, Any]
) -> None:
    with make_llm(enable_prefix_caching=False) as llm:
        expected = alone if task == "token_embed" else encode(llm, task)
    with make_llm(**options) as llm:
        for _ in range(2):
            for states, known in zip(encode(llm, task), expected, strict=True):
                assert np.array_equal(states, known)
        assert llm.get_metrics().prefix_cache_hits == 0


def test_bits_do_not_depend_on_preemption(alone: list[np.ndarray]) -> None:
    """Long generations outgrow the pool while prompts run two tokens a step behind them."""
    params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.0)
    prompts = [{"prompt_token_ids": [10 + i] * 20} for i in range(4)]
    inputs = [{"prompt_token_ids": p} for p in PROMPTS]
    preempted: set[int] = set()
    with make_llm(num_gpu_blocks_override=16, max_num_batched_tokens=6, max_num_seqs=6) as llm:
        while not preempted:  # a slow start of the later requests may spare them
            generating = llm._admission.admit(prompts, params, None)
            pooling = llm._admission.admit_pooling(inputs, None, "token_embed", PoolingConfig())
            for _ in llm._runner.run([*generating, *pooling], is_streamed=False):
                pass
            decisions = [decision for step in llm.trace() for decision in step.decisions]
            preempted = {d.request_id for d in decisions if d.kind == "preempted"}
            preempted &= {state.request_id for state in pooling}
            for state, known in zip(pooling, alone, strict=True):
                assert np.array_equal(np.asarray(state.pooling_output().outputs.data), known)


def test_pooling_runs_no_decode_step_and_leaves_its_blocks_to_the_cache() -> None:
    with make_llm() as llm:
        encode(llm, "embed")
        metrics = llm.get_metrics()
        assert metrics.num_decode_steps == 0
        assert metrics.num_generation_tokens == 0
        assert metrics.num_blocks_used == 0
        assert metrics.num_prefill_tokens == sum(map(len, PROMPTS))
        params = SamplingParams(max_tokens=1)
        outputs = llm.generate([{"prompt_token_ids": PROMPTS[5]}], params, use_tqdm=False)
        assert outputs[0].num_cached_tokens == 112


def test_pooled_requests_share_batches_with_generating_ones() -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    prompts = [{"prompt_token_ids": p} for p in PROMPTS]
    with make_llm() as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        llm.reset_prefix_cache()
        results: list[Any] = []
        generating = threading.Thread(
            target=lambda: results.extend(llm.generate(prompts, params, use_tqdm=False))
        )
        generating.start()
        encode(llm, "token_embed")
        generating.join()
    assert [o.outputs[0].token_ids for o in results] == expected


def test_arrays_outlive_the_engine_and_cross_without_a_copy() -> None:
    import torch

    with make_llm() as llm:
        (output,) = llm.encode({"prompt_token_ids": PROMPTS[0]}, use_tqdm=False)
    data = output.outputs.data
    array, tensor = np.asarray(data), torch.from_dlpack(data)
    assert array.ctypes.data == tensor.data_ptr()
    known = array.copy()
    del output, data, array
    assert np.array_equal(tensor.numpy(), known)


def test_a_prompt_may_fill_the_context() -> None:
    prompt = (PROMPTS[5] * 3)[:64]
    with make_llm(max_model_len=64) as llm:
        (output,) = llm.encode({"prompt_token_ids": prompt}, use_tqdm=False)
        assert np.asarray(output.outputs.data).shape == (64, HIDDEN_SIZE)
        with pytest.raises(InvalidArgument, match=r"65 tokens.*max_model_len=64 has to hold the"):
            llm.encode({"prompt_token_ids": [*prompt, 5]}, use_tqdm=False)


def test_a_truncated_prompt_is_pooled_as_its_last_tokens() -> None:
    with make_llm() as llm:
        long = [5 + idx % 100 for idx in range(300)]
        for keep, wanted in ((7, long[-7:]), (-1, long[-llm.max_model_len :])):
            params = PoolingParams(truncate_prompt_tokens=keep)
            (cut,), (whole,) = (
                llm.embed([long], params, use_tqdm=False),
                llm.embed([wanted], use_tqdm=False),
            )
            assert cut.prompt_token_ids == wanted
            assert cut.outputs.embedding == whole.outputs.embedding


def test_no_request_takes_memory_that_was_not_planned() -> None:
    """Prompt logprobs, logits and states of long prompts run in the workspace of the plan: past it
    the engine would fail."""
    budget = 200
    plan = LLM.plan(checkpoint("llama"), dtype="float32", max_num_batched_tokens=budget, **SIZES)
    with make_llm(max_num_batched_tokens=budget) as llm:
        for task in ("embed", "token_embed", "token_logits"):
            encode(llm, task)
        params = SamplingParams(max_tokens=2, prompt_logprobs=3)
        llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
        llm.beam_search([{"prompt_token_ids": p} for p in PROMPTS], BeamSearchParams(16, 4))
        assert max(step.num_tokens for step in llm.trace()) == budget
        workspace_bytes = llm._open_engine().memory_use.workspace_bytes
    assert workspace_bytes == plan.workspace_bytes


# --- what a checkpoint says of its pooling ------------------------------------------------------


def sentence_transformer(directory: Path, mode: str, *more_modules: str) -> Path:
    copy_checkpoint(checkpoint("llama"), directory)
    modules = ["Transformer", "Pooling", *more_modules]
    entries = [
        {"idx": i, "path": f"{i}_{name}", "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(modules)
    ]
    (directory / "modules.json").write_text(json.dumps(entries))
    (directory / "1_Pooling").mkdir()
    fields = {"word_embedding_dimension": HIDDEN_SIZE, "pooling_mode_cls_token": False, mode: True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(fields))
    return directory


@pytest.mark.parametrize("budget", [8, 512])
@pytest.mark.parametrize("mode", ["cls_token", "mean_tokens", "lasttoken"])
def test_sentence_transformers_files_choose_the_pooling(
    tmp_path: Path, alone: list[np.ndarray], mode: str, budget: int
) -> None:
    directory = sentence_transformer(tmp_path / "model", f"pooling_mode_{mode}", "Normalize")
    pool = {"cls_token": lambda s: s[0], "mean_tokens": lambda s: s.mean(0)}.get(
        mode, lambda s: s[-1]
    )
    with make_llm(directory, max_num_batched_tokens=budget, max_num_seqs=8) as llm:
        outputs = llm.embed([{"prompt_token_ids": p} for p in PROMPTS], use_tqdm=False)
    for output, states in zip(outputs, alone, strict=True):
        expected = normalized(pool(states.astype(np.float64)))
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-6)


def test_without_a_normalize_module_an_embedding_keeps_its_length(
    tmp_path: Path, alone: list[np.ndarray]
) -> None:
    directory = sentence_transformer(tmp_path / "model", "pooling_mode_lasttoken")
    with make_llm(directory) as llm:
        (output,) = llm.embed({"prompt_token_ids": PROMPTS[0]}, use_tqdm=False)
    assert np.array_equal(np.asarray(output.outputs.data), alone[0][-1])


def test_modules_that_are_not_there_are_refused_by_name(tmp_path: Path) -> None:
    dense = sentence_transformer(tmp_path / "dense", "pooling_mode_lasttoken", "Dense")
    with make_llm(dense) as llm, pytest.raises(NotSupported, match="module Dense"):
        llm.embed("a", use_tqdm=False)
    maximum = sentence_transformer(tmp_path / "max", "pooling_mode_max_tokens")
    with make_llm(maximum) as llm, pytest.raises(NotSupported, match="pooling_mode_max_tokens"):
        llm.embed("a", use_tqdm=False)
    (maximum / "1_Pooling" / "config.json").unlink()
    with make_llm(maximum) as llm, pytest.raises(CorruptFile, match=r"1_Pooling/config\.json"):
        llm.embed("a", use_tqdm=False)
    (maximum / "modules.json").write_text("{}")
    with make_llm(maximum) as llm, pytest.raises(CorruptFile, match="expected a list of modules"):
        llm.embed("a", use_tqdm=False)


# --- what is refused ----------------------------------------------------------------------------


def test_bad_pooling_arguments_are_refused_with_the_field_and_the_value() -> None:
    with pytest.raises(InvalidArgument, match="dimensions must be between 1 and"):
        PoolingParams(dimensions=0)
    with pytest.raises(InvalidArgument, match="task must be one of embed, token_embed"):
        PoolingParams(task="embedding")
    with pytest.raises(InvalidArgument, match="did you mean 'dimensions'"):
        PoolingParams(dimension=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match="truncate_prompt_tokens must be at least 1"):
        PoolingParams(truncate_prompt_tokens=0)
    with make_llm() as llm:
        with pytest.raises(NotSupported, match="classify is not supported yet"):
            llm.encode("a", pooling_task="classify", use_tqdm=False)
        for method in (llm.classify, llm.score):
            with pytest.raises(NotSupported, match="heads for classification and scores"):
                method("a")
        with pytest.raises(InvalidArgument, match="this call's is 'embed'"):
            llm.embed("a", PoolingParams(task="token_embed"), use_tqdm=False)
        with pytest.raises(InvalidArgument, match=r"dimensions must be at most .* 48, got 49"):
            llm.embed("a", PoolingParams(dimensions=49), use_tqdm=False)
        with pytest.raises(InvalidArgument, match="dimensions cut embeddings, not logits"):
            encode(llm, "token_logits", PoolingParams(dimensions=3))
        with pytest.raises(InvalidArgument, match="8 prompts need one PoolingParams or 8, got 2"):
            llm.embed([{"prompt_token_ids": p} for p in PROMPTS], [PoolingParams()] * 2)


def test_an_answer_that_is_too_large_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    directory = checkpoint("llama", vocab_size=300_000, max_position_embeddings=1024)
    with (
        make_llm(directory, max_model_len=1024) as llm,
        pytest.raises(ResourceExhausted, match=r"900 x 300000 float32 = 1080000000 bytes.*894 t"),
    ):
        llm.encode({"prompt_token_ids": [5] * 900}, pooling_task="token_logits", use_tqdm=False)
