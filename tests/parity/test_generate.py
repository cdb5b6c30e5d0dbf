"""End to end against transformers in f32: greedy tokens equal, logprobs within a tolerance."""

from __future__ import annotations

import random
from typing import Any

import pytest
from checkpoints import VOCAB_SIZE, checkpoint, reference_model
from llmserve import LLM, SamplingParams

NUM_TOKENS = 48
# Two f32 computations of the same sum in another order differ by about 1e-6 of its terms; a few
# layers amplify that. The bar of the requirements, ten times what is seen at worst.
LOGPROB_TOLERANCE = 2e-3

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {"sliding_window": 13}),
    ("qwen2", {}),
    ("qwen3", {}),
]


def make_prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (1, 2, 7, 16, 17, 40, 64, 90)]


def reference(directory: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens and their logprobs, one forward over the growing sequence a token."""
    import torch

    torch.set_num_threads(1)  # matrices too small to share
    model = reference_model(directory)
    tokens: list[int] = []
    logprobs: list[float] = []
    with torch.inference_mode():
        step = model(torch.tensor([prompt]), use_cache=True)
        for _ in range(NUM_TOKENS):
            row = torch.log_softmax(step.logits[0, -1].float(), dim=-1)
            tokens.append(int(row.argmax()))
            logprobs.append(float(row.max()))
            step = model(
                torch.tensor([tokens[-1:]]), past_key_values=step.past_key_values, use_cache=True
            )
    return tokens, logprobs


@pytest.mark.parametrize(("family", "overrides"), CASES, ids=lambda v: str(v))
def test_greedy_tokens_equal_those_of_transformers(family: str, overrides: dict[str, Any]) -> None:
    directory = checkpoint(family, **overrides)
    prompts = make_prompts()
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    with LLM(str(directory), dtype="float32", max_num_batched_tokens=64, max_num_seqs=8) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
    worst = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens, logprobs = reference(directory, prompt)
        completion = output.outputs[0]
        assert list(completion.token_ids) == tokens
        assert completion.logprobs is not None
        for token, expected, row in zip(tokens, logprobs, completion.logprobs, strict=True):
            assert row[token].rank == 1
            worst = max(worst, abs(row[token].logprob - expected))
    assert worst < LOGPROB_TOLERANCE
