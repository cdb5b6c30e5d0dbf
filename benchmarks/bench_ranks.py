"""What ranks and stages of one machine gain and cost, beside one rank of as many threads.

Threads are shared out: two ranks, or two stages, have one thread each where one rank has two. The
model is a Llama of 8 layers, a hidden size of 1,024 and a vocabulary of 32,000. All engines of a
case exist at once and run by turns, in changing order; a ratio is of the medians over --repeats
rounds, to the time of one rank: below 1 they are quicker. Tokens are compared.

Example:
    pytest benchmarks/bench_ranks.py -k bfloat16 --results ranks.json
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from llmserve import LLM, SamplingParams
from random_models import SHAPES, write_checkpoint

SHAPE = "8 layers of 1024"
SHAPES[SHAPE] = {
    **SHAPES["llama-3.1-8b"],
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
}
NUM_THREADS = 2
ONE = "one rank"
ENGINES: dict[str, dict[str, Any]] = {
    ONE: {},
    "tensor ranks": {"tensor_parallel_size": NUM_THREADS},
    "stages": {"pipeline_parallel_size": NUM_THREADS},
    "stages, one step at a time": {
        "pipeline_parallel_size": NUM_THREADS,
        "async_scheduling": False,
    },
}
# Sequences, tokens of a prompt, tokens that each generates.
CASES = {
    "1 decodes": (1, 4, 64),
    "8 decode": (8, 4, 48),
    "16 decode": (16, 4, 48),
    "a prompt of 512": (1, 512, 1),
    "8 prompts of 256": (8, 256, 1),
    "8 of 128 in, 32 out": (8, 128, 32),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    write_checkpoint(path, SHAPE)
    return path


def run(llm: LLM, number: int, case: tuple[int, int, int]) -> tuple[float, list[list[int]]]:
    count, num_prompt_tokens, num_tokens = case
    prompts = [
        {
            "prompt_token_ids": [
                3 + (number * 977 + 131 * i + j) % 31000 for j in range(num_prompt_tokens)
            ]
        }
        for i in range(count)
    ]
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0, detokenize=False)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began, [list(o.outputs[0].token_ids) for o in outputs]


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int4"])
def test_ranks(folder: Path, weights: str, board: Any, request: pytest.FixtureRequest) -> None:
    settings: dict[str, Any] = {"max_model_len": 1024, "num_gpu_blocks_override": 600}
    settings |= {"enable_prefix_caching": False, "defer_packing": False}
    settings |= {"quantization": "int4"} if weights == "int4" else {"dtype": weights}
    engines = {
        name: LLM(str(folder), num_threads=NUM_THREADS, **settings, **options)
        for name, options in ENGINES.items()
    }
    try:
        for case_name, case in CASES.items():
            times: dict[str, list[float]] = {name: [] for name in engines}
            for number in range(request.config.getoption("--repeats") + 1):
                names = list(engines)
                turn = number % len(names)
                tokens = []
                for name in names[turn:] + names[:turn]:
                    seconds, got = run(engines[name], number, case)
                    tokens.append(got)
                    if number:
                        times[name].append(seconds)
                assert all(got == tokens[0] for got in tokens)
            one = statistics.median(times[ONE])
            for name, own in times.items():
                board.add(
                    f"{weights}, {case_name}, {name}",
                    {
                        "ms": statistics.median(own) * 1e3,
                        "of_one_rank": statistics.median(own) / one,
                    },
                    {"ms_min": min(own) * 1e3, "of_one_rank_by_min": min(own) / min(times[ONE])},
                )
    finally:
        for llm in engines.values():
            llm.close()
