"""How fast a model is alone, read off the times of its requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from llmserve.bench.speed import measure_speed


def llm_of(prompts: list[float], tokens: list[float]) -> Any:
    """Answers with these seconds of the prompt and of each further token, in turn."""
    calls = iter(zip(prompts, tokens, strict=True))

    def generate(asked: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        assert len(asked[0]["prompt_token_ids"]) == 256
        prompt, token = next(calls)
        first = 100.0 + prompt
        last = first + (params.max_tokens - 1) * token
        times = SimpleNamespace(scheduled_ts=100.0, first_token_ts=first, last_token_ts=last)
        return [SimpleNamespace(metrics=times)]

    tokenizer = SimpleNamespace(num_tokens=50)
    return SimpleNamespace(generate=generate, max_model_len=2048, get_tokenizer=lambda: tokenizer)


def test_speeds_are_medians_without_the_first_run() -> None:
    speed = measure_speed(llm_of([9, 2, 1, 4, 2, 2], [9, 0.5, 0.25, 0.5, 4, 0.5]))
    assert speed.prefill_per_s == pytest.approx(128)
    assert speed.decode_per_s == pytest.approx(2)
