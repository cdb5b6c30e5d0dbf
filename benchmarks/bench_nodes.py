"""Prompts on two nodes over a slow wire: steps that run at once beside steps in two halves.

Both nodes are processes of this machine with a thread each, and a third process is the wire
(tests/slow_wire.py): what goes through comes a tenth of a millisecond later, at a gigabit a second
and direction. An engine of either kind stands ready, and they run by turns. "hidden" is the share
of what the wire adds that halves take away again; the wire adds what steps that run at once take
beyond those over a loopback. A wire takes processor time here, which a network's would not.

Example:
    pytest benchmarks/bench_nodes.py --repeats 5 --results nodes-halves.json
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import slow_wire
from llmserve import LLM, SamplingParams
from nodes import NodeProcess, free_port
from random_models import SHAPES, write_checkpoint

DELAY_S, BYTES_PER_S = 1e-4, 125e6
DENSE, EXPERTS = "8 layers of 1024", "4 layers of 16 experts"
SHAPES[DENSE] = {
    **SHAPES["llama-3.1-8b"],
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
}
SHAPES[EXPERTS] = {
    **SHAPES["olmoe-1b-7b"],
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
}
ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
MAX_TOKENS = 2048


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


@contextmanager
def engine(path: Path, has_wire: bool, **options: Any) -> Iterator[LLM]:
    shared = {
        "tensor_parallel_size": 2,
        "nnodes": 2,
        "master_port": free_port(),
        "num_threads": 1,
        "max_model_len": MAX_TOKENS + 16,
        "max_num_batched_tokens": MAX_TOKENS,
        "num_gpu_blocks_override": 2 * MAX_TOKENS // 16,
        **options,
    }
    with ExitStack() as stack:
        port = shared["master_port"]
        if has_wire:
            script = [sys.executable, slow_wire.__file__, *map(str, (port, DELAY_S, BYTES_PER_S))]
            wire = subprocess.Popen(
                script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.callback(wire.communicate, "")
            assert wire.stdout is not None
            port = int(wire.stdout.readline())
        other = NodeProcess(path, {**shared, "node_rank": 1, "master_port": port})
        stack.callback(other.stop)
        yield stack.enter_context(
            LLM(path, seed=0, enable_prefix_caching=False, max_stall_ms=0, **shared)
        )


def run(llm: LLM, num_tokens: int) -> tuple[float, list[int]]:
    prompt = {"prompt_token_ids": [(7 * j) % 31000 + 3 for j in range(num_tokens)]}
    began = time.perf_counter()
    (output,) = llm.generate([prompt], ONE, use_tqdm=False)
    return time.perf_counter() - began, list(output.outputs[0].token_ids)


@pytest.mark.parametrize("shape", [DENSE, EXPERTS])
def test_halves(folder: Path, board: Any, request: pytest.FixtureRequest, shape: str) -> None:
    path = folder / shape
    write_checkpoint(path, shape)
    experts = {"enable_expert_parallel": True} if shape == EXPERTS else {}
    with ExitStack() as stack:
        engines = {
            kind: stack.enter_context(
                engine(path, kind != "loopback", enable_dbo=kind == "halves", **experts)
            )
            for kind in ("loopback", "at once", "halves")
        }
        for num_tokens in (512, 1024, 2048):
            seconds: dict[str, list[float]] = {kind: [] for kind in engines}
            answers = set()
            for turn in range(request.config.getoption("--repeats") + 1):
                for kind, llm in engines.items():
                    taken, answer = run(llm, num_tokens)
                    answers.add(tuple(answer))
                    if turn > 0:
                        seconds[kind].append(taken)
            assert len(answers) == 1
            loopback, whole, halves = (
                statistics.median(seconds[kind]) for kind in ("loopback", "at once", "halves")
            )
            board.add(
                f"{shape}, a prompt of {num_tokens}",
                {
                    "loopback_ms": loopback * 1e3,
                    "at_once_ms": whole * 1e3,
                    "halves_ms": halves * 1e3,
                    "halves_to_at_once": halves / whole,
                    "hidden": (whole - halves) / (whole - loopback),
                },
                {"seconds": seconds},
            )
