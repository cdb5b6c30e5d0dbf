"""One engine's measurements on a GPU, in its own environment: JSON on the standard input says what,
the last such line of the standard output has seconds by name. Needs the engine alone."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

# Prompts, tokens to generate after each, temperature.
Generate = Callable[[list[list[int]], list[int], float], None]


def by_library(asked: dict[str, Any]) -> Generate:
    """vLLM, or llmserve, whose names are the same."""
    settings = {
        "model": asked["checkpoint"],
        "max_model_len": asked["max_model_len"],
        "max_num_seqs": asked["max_num_seqs"],
        "enable_prefix_caching": False,
        "dtype": "bfloat16",
    }
    if asked["system"] == "llmserve":
        from llmserve import LLM, SamplingParams

        settings["device"] = "cuda"
    else:
        from vllm import LLM, SamplingParams
    llm = LLM(**settings)

    def generate(prompts: list[list[int]], max_tokens: list[int], temperature: float) -> None:
        params = [
            SamplingParams(
                temperature=temperature, max_tokens=count, ignore_eos=True, detokenize=False
            )
            for count in max_tokens
        ]
        llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    return generate


def by_sglang(asked: dict[str, Any]) -> Generate:
    import sglang

    engine = sglang.Engine(
        model_path=asked["checkpoint"],
        context_length=asked["max_model_len"],
        max_running_requests=asked["max_num_seqs"],
        disable_radix_cache=True,
        skip_tokenizer_init=True,
        dtype="bfloat16",
    )

    def generate(prompts: list[list[int]], max_tokens: list[int], temperature: float) -> None:
        params = [
            {"temperature": temperature, "max_new_tokens": count, "ignore_eos": True}
            for count in max_tokens
        ]
        engine.generate(input_ids=prompts, sampling_params=params)

    return generate


def main() -> None:
    asked = json.load(sys.stdin)
    generate = by_sglang(asked) if asked["system"] == "sglang" else by_library(asked)
    draw = random.Random(1)

    def seconds(lengths: list[int], count: int) -> float:
        prompts = [[draw.randrange(asked["vocab_size"]) for _ in range(n)] for n in lengths]
        start = time.perf_counter()
        generate(prompts, [count] * len(lengths), 0.0)
        return time.perf_counter() - start

    times: dict[str, float] = {}
    length, count = asked["decode"]
    seconds([length], 4)
    rounds = [seconds([length], count + 1) - seconds([length], 1) for _ in range(3)]
    times["decode batch 1"] = statistics.median(rounds)
    for length in asked["prefills"]:
        times[f"prefill {length}"] = min(seconds([length], 1) for _ in range(4))
    for _ in range(2):  # the first warms up
        start = time.perf_counter()
        generate(asked["prompts"], asked["max_tokens"], 0.6)
        times["nano-vllm"] = time.perf_counter() - start
    print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
