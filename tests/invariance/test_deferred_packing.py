"""Weights that run on their rows until they are packed: the same bits before, during and after."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from checkpoints import FAMILIES, checkpoint, copy_checkpoint
from llmserve import LLM, InvalidArgument, SamplingParams
from llmserve.errors import CorruptFile
from model_runner import PagedRunner
from safetensors.numpy import load_file, save_file
from test_invariance import Result, result

DEADLINE_S = 60.0
PROMPTS = [list(range(5, 5 + length)) for length in (1, 17, 40)]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2, temperature=0.8, seed=3)


def answer(llm: LLM) -> list[Result]:
    inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [result(output) for output in llm.generate(inputs, PARAMS, use_tqdm=False)]


def wait_until_packed(llm: LLM, mapped_bytes: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while llm.get_memory_use().mapped_bytes > mapped_bytes:
        assert time.monotonic() < deadline, "an idle engine packs"
        time.sleep(0.001)


def hidden_and_logits(runner: PagedRunner) -> list[np.ndarray]:
    parts = [(runner.add_sequence(), prompt) for prompt in PROMPTS]
    prefill = runner.step(parts)
    decode = runner.step([(sequence, [7]) for sequence, _ in parts])
    return [*prefill, *decode]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_has_the_same_bits_however_many_weights_are_packed(family: str, dtype: str) -> None:
    options = {"device": "cpu", "dtype": dtype, "num_threads": 2}
    path = checkpoint(family)
    expected = hidden_and_logits(PagedRunner(path, **options))
    runner = PagedRunner(path, **options, defer_packing=True)
    model = runner.model
    some_are_packed = model.num_deferred // 2
    while True:
        for array, same in zip(hidden_and_logits(runner), expected, strict=True):
            np.testing.assert_array_equal(array, same)
        if model.num_deferred == 0:
            break
        while model.num_deferred > some_are_packed:
            model.pack_one()
        some_are_packed = 0


def test_an_engine_packs_while_it_is_idle_and_answers_the_same() -> None:
    path = checkpoint("llama")
    with LLM(path, num_threads=2, defer_packing=False) as llm:
        expected = answer(llm)
        use = llm.get_memory_use()
    with LLM(path, num_threads=2, defer_packing=True) as llm:
        assert answer(llm) == expected
        assert llm.get_memory_use().weight_bytes == use.weight_bytes
        wait_until_packed(llm, use.mapped_bytes)
        assert answer(llm) == expected
        llm.sleep(2)
        llm.wake_up()
        assert answer(llm) == expected
        wait_until_packed(llm, use.mapped_bytes)
    with LLM(path, num_threads=2, defer_packing=True):
        pass  # closed while it packs


def test_a_weight_that_is_not_finite_is_refused_at_load_all_the_same(tmp_path: Path) -> None:
    path = copy_checkpoint(checkpoint("llama"), tmp_path / "model")
    arrays = load_file(path / "model.safetensors")
    arrays["model.layers.0.mlp.up_proj.weight"][1, 2] = np.nan
    save_file(arrays, path / "model.safetensors")
    with pytest.raises(CorruptFile, match="is NaN"):
        LLM(path, defer_packing=True)


def test_defer_packing_is_a_bool_or_left_out() -> None:
    with pytest.raises(InvalidArgument, match="defer_packing"):
        LLM(checkpoint("llama"), defer_packing="yes")  # type: ignore[arg-type]
