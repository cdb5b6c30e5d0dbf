"""What balanced experts gain where a router prefers those of one rank: two ranks of a thread each.

The routers' rows of the first half of the experts are four times as large as they were drawn, so
that most tokens choose among them, and the rank that has them computes most. An engine that leaves
experts and rows where they are and one that balances them run by turns. `rank_balance` is the
busiest rank's rows over the mean (llmserve.plan.load_balance).

Example:
    pytest benchmarks/bench_expert_balance.py --repeats 5 --results expert-balance.json
"""

from __future__ import annotations

import json
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmserve import LLM, SamplingParams
from llmserve.plan import load_balance
from random_models import SHAPES, write_checkpoint

SHAPE = "8 layers of 32 experts"
SHAPES[SHAPE] = {
    **SHAPES["olmoe-1b-7b"],
    "hidden_size": 1024,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 32000,
}
SHAPES[SHAPE].pop("num_drawn_layers", None)
_FOUR_TIMES = 2 << 7  # of a bfloat16 that is not 0: its exponent
KINDS = {
    "as placed": {"step_interval": 0, "capacity_factor": None},
    "balanced": {"step_interval": 16, "window_size": 16},
}


def skew(path: Path) -> None:
    """Makes the routers prefer the first half of the experts."""
    file = path / "model.safetensors"
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    for name, entry in header.items():
        if not name.endswith("mlp.gate.weight"):
            continue
        begin, end = entry["data_offsets"]
        words = np.memmap(
            file, np.uint16, "r+", offset=8 + size + begin, shape=((end - begin) // 2,)
        )
        half = words[: words.size // 2]
        half[(half & 0x7F80) != 0] += _FOUR_TIMES
        words.flush()


def run(llm: LLM, num_sequences: int, length: int, num_tokens: int) -> tuple[float, list[Any]]:
    prompts = [
        {"prompt_token_ids": [(7 * i + 11 * j) % 31000 + 3 for j in range(length)]}
        for i in range(num_sequences)
    ]
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    taken = time.perf_counter() - began
    return taken, [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("balance")
    write_checkpoint(folder, SHAPE)
    skew(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "case"),
    [("a prompt of 1,024", (1, 1024, 1)), ("16 sequences decode", (16, 4, 24))],
)
def test_balance(
    path: Path, board: Any, request: pytest.FixtureRequest, name: str, case: tuple[int, int, int]
) -> None:
    with ExitStack() as stack:
        engines = {
            kind: stack.enter_context(
                LLM(
                    path,
                    seed=0,
                    tensor_parallel_size=2,
                    num_threads=2,
                    max_model_len=2048,
                    max_num_batched_tokens=1024,
                    num_gpu_blocks_override=256,
                    enable_expert_parallel=True,
                    enable_prefix_caching=False,
                    defer_packing=False,
                    enable_eplb=True,
                    eplb_config=config,
                )
            )
            for kind, config in KINDS.items()
        }
        for llm in engines.values():  # experts have been placed by their loads
            run(llm, 4, 8, 24)
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        answers = []
        for turn in range(request.config.getoption("--repeats") + 1):
            for kind, llm in engines.items():
                taken, answer = run(llm, *case)
                answers.append(answer)
                if turn > 0:
                    seconds[kind].append(taken)
        assert all(answer == answers[0] for answer in answers)
        balances = {
            kind: statistics.mean(map(load_balance, llm.expert_rank_rows().values()))
            for kind, llm in engines.items()
        }
        plain, balanced = (statistics.median(seconds[kind]) for kind in KINDS)
        board.add(
            name,
            {
                "as_placed_ms": plain * 1e3,
                "balanced_ms": balanced * 1e3,
                "balanced_to_as_placed": balanced / plain,
                "rank_balance_as_placed": balances["as placed"],
                "rank_balance_balanced": balances["balanced"],
            },
            {"seconds": seconds},
        )
