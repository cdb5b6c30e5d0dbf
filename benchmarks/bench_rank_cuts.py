"""What ranks cost beside one rank, by how they cut layers: threads of a process, and two nodes.

The model has 8 layers of 1,024. One rank has two threads, each of two ranks one; nodes are
processes that exchange over the loopback. All take turns, and a figure is the median over rounds of
the ratio to one rank with the default cut, and to as many ranks of it that meet likewise. Log-
probabilities are compared first: of columns they are those of one rank, of rows within a tolerance,
and of a tree those of a tree on one rank.

Example:
    pytest benchmarks/bench_rank_cuts.py --cases bfloat16 --results ranks-along-k.json
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from llmserve import LLM, SamplingParams
from llmserve.cli.follow import make_node
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
# Prompts, tokens of each, tokens that are generated.
LOADS = {"1 decodes": (1, 4, 33), "8 decode": (8, 4, 17), "a prompt of 512": (1, 512, 1)}
COMMON = {"max_model_len": 1024, "num_gpu_blocks_override": 600, "seed": 0}
# Of log-probabilities of the model of random weights, whatever rounds otherwise.
TOLERANCE = 0.1


def run(llm: LLM, load: str) -> list[float]:
    """The tokens' log-probabilities."""
    count, length, num_out = LOADS[load]
    prompts = [
        {"prompt_token_ids": [(7 * i + j) % 31000 + 3 for j in range(length)]} for i in range(count)
    ]
    params = SamplingParams(max_tokens=num_out, ignore_eos=True, temperature=0, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].cumulative_logprob or 0.0 for output in outputs]


def first_logprobs(llm: LLM) -> list[float]:
    prompt = [(7 * j) % 31000 + 3 for j in range(64)]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    rows = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    return [row[token].logprob for token, row in rows if row is not None]


def follow(folder: str, options: str) -> None:
    """The process of node 1."""
    make_node(folder, json.loads(options)).run()


@contextmanager
def made(folder: Path, kind: str, options: dict[str, Any]) -> Iterator[LLM]:
    own = {**COMMON, **options, "defer_packing": False, "enable_prefix_caching": False}
    if kind != "nodes":
        with LLM(str(folder), num_threads=2, **own) as llm:
            yield llm
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**own, "nnodes": 2, "master_port": port, "num_threads": 1}
    node = subprocess.Popen(
        [sys.executable, __file__, str(folder), json.dumps({**shared, "node_rank": 1})]
    )
    try:
        with LLM(str(folder), **shared) as llm:
            yield llm
        node.wait(60)
    finally:
        node.kill()
        node.wait()


def cases(weights: dict[str, str]) -> dict[str, tuple[str, dict[str, Any]]]:
    two = {**weights, "tensor_parallel_size": 2}
    found: dict[str, tuple[str, dict[str, Any]]] = {
        "1 rank, columns": ("threads", weights),
        "1 rank, tree": ("threads", {**weights, "tensor_parallel_cut": "tree"}),
    }
    for kind in ("threads", "nodes"):
        for cut in ("columns", "rows", "tree"):
            found[f"2 {kind}, {cut}"] = (kind, {**two, "tensor_parallel_cut": cut})
    return found


@pytest.mark.parametrize("weights", ["bfloat16", "int4"])
def test_ranks(weights: str, board: Any, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if request.config.getoption("--cases") not in weights:
        pytest.skip("not asked for")
    write_checkpoint(tmp_path, SHAPE)
    settings = {"dtype": "bfloat16"} | ({"quantization": weights} if weights == "int4" else {})
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(made(tmp_path, kind, options))
            for name, (kind, options) in cases(settings).items()
        }
        told = {name: first_logprobs(llm) for name, llm in llms.items()}
        for name, logprobs in told.items():
            like = told["1 rank, tree" if name.endswith("tree") else "1 rank, columns"]
            if not name.endswith("rows"):
                assert logprobs == like, name
            assert max(abs(a - b) for a, b in zip(logprobs, like, strict=True)) < TOLERANCE
        seconds: dict[tuple[str, str], list[float]] = {}
        for turn in range(request.config.getoption("--repeats") + 1):
            for name in list(llms)[:: 1 if turn % 2 else -1]:
                for load in LOADS:
                    began = time.perf_counter()
                    run(llms[name], load)
                    if turn:  # the first packs, and touches memory
                        seconds.setdefault((load, name), []).append(time.perf_counter() - began)
    for load in LOADS:
        plain = seconds[load, "1 rank, columns"]
        for name in llms:
            own = seconds[load, name]
            ratios = [mine / first for mine, first in zip(own, plain, strict=True)]
            columns = seconds[load, name.replace("rows", "columns").replace("tree", "columns")]
            of_columns = [mine / other for mine, other in zip(own, columns, strict=True)]
            board.add(
                f"{weights}, {load}: {name}",
                {
                    "ms": statistics.median(own) * 1e3,
                    "of_one_rank": statistics.median(ratios),
                    "of_columns": statistics.median(of_columns),
                },
                {"ms_min": min(own) * 1e3, "ms_max": max(own) * 1e3},
            )


if __name__ == "__main__":
    follow(sys.argv[1], sys.argv[2])
