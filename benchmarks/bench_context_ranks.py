"""What ranks that keep one KV cache gain: decode over long contexts, beside ranks with a copy each.

Two ranks of one thread. Both engines are there at once and run by turns; the ratio of a row is the
median over rounds of (seconds a token with one cache / with copies), so that below 1 one cache is
quicker. Tokens are compared. The models are few layers of usual heads with a narrow rest, so that
attention is most of a step, as it is in long contexts of large models.

Example:
    pytest benchmarks/bench_context_ranks.py --results context-ranks.json
"""

from __future__ import annotations

import json
import statistics
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmserve import LLM, SamplingParams
from random_models import SHAPES, write_checkpoint

CONTEXTS = (4096, 16384)
MOST_TOKENS = 20480  # of a batch
NUM_TOKENS = 128
_NARROW = {"hidden_size": 512, "intermediate_size": 512, "vocab_size": 4096}
_LONG = {"max_position_embeddings": 32768}
SHAPES["1 KV head, 16 heads of 128"] = {
    **SHAPES["llama-3.1-8b"],
    **_NARROW,
    **_LONG,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "head_dim": 128,
}
SHAPES["latents of 512 + 64, 16 heads"] = {
    **SHAPES["deepseek-v2-lite-9l"],
    **_NARROW,
    **_LONG,
    "num_hidden_layers": 2,
    "num_dense_layers": 2,
    "first_k_dense_replace": 2,
    "num_drawn_layers": 2,
}
NAMES = ("1 KV head, 16 heads of 128", "latents of 512 + 64, 16 heads")


def write_model(folder: Path, name: str) -> None:
    """With the latents' matrices as Hugging Face's files have them: both in one."""
    write_checkpoint(folder, name)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + size])
    parts = {}
    for key in [key for key in entries if key.endswith(".k_b_proj.weight")]:
        pair = entries.pop(key), entries.pop(key.replace(".k_b_proj.", ".v_b_proj."))
        heads, rank, plain = pair[0]["shape"]
        shape = [heads * (plain + pair[1]["shape"][1]), rank]
        parts[key.replace(".k_b_proj.", ".kv_b_proj.")] = pair, shape
    if not parts:
        return
    pieces, offset = [], 0

    def add(name: str, shape: list[int], dtype: str, *offsets: list[int]) -> None:
        nonlocal offset
        begin = offset
        for first, last in offsets:
            pieces.append(data[8 + size + first : 8 + size + last])
            offset += last - first
        joined[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, offset]}

    joined: dict[str, Any] = {}
    for key, entry in entries.items():
        if key != "__metadata__":
            add(key, entry["shape"], entry["dtype"], entry["data_offsets"])
    for key, (pair, shape) in parts.items():
        add(key, shape, pair[0]["dtype"], *(part["data_offsets"] for part in pair))
    header = json.dumps(joined).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"".join(pieces))


def seconds_a_token(llm: LLM, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    begun = max(output.metrics.first_token_ts for output in outputs)
    ended = min(output.metrics.last_token_ts for output in outputs)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return (ended - begun) / (NUM_TOKENS - 1), tokens


@pytest.mark.parametrize("name", NAMES)
def test_decode(name: str, board: Any, repeats: int, tmp_path: Path) -> None:
    write_model(tmp_path, name)
    rng = np.random.default_rng(0)
    options: dict[str, Any] = {"max_model_len": CONTEXTS[-1] + 64, "num_threads": 2}
    options |= {"dtype": "bfloat16", "tensor_parallel_size": 2, "num_gpu_blocks_override": 5000}
    with ExitStack() as stack:
        copies, one = (
            stack.enter_context(LLM(tmp_path, decode_context_parallel_size=size, **options))
            for size in (1, 2)
        )
        for context in CONTEXTS:
            for batch in (1, 4):
                if batch * context > MOST_TOKENS:
                    continue
                prompts = rng.integers(3, 4000, (batch, context)).tolist()
                times: dict[LLM, list[float]] = {copies: [], one: []}
                for i in range(repeats + 1):
                    order = (copies, one) if i % 2 else (one, copies)
                    answers = {}
                    for llm in order:
                        taken, answers[llm] = seconds_a_token(llm, prompts)
                        if i:  # the first one computes the prompts
                            times[llm].append(taken)
                    assert answers[copies] == answers[one]
                board.add(
                    f"{name}, bfloat16, {batch} of {context} tokens",
                    {
                        "ratio": statistics.median(
                            mine / other
                            for mine, other in zip(times[one], times[copies], strict=True)
                        ),
                        "copies_ms": statistics.median(times[copies]) * 1e3,
                        "one_cache_ms": statistics.median(times[one]) * 1e3,
                    },
                )


@pytest.mark.parametrize("name", NAMES)
def test_memory(name: str, board: Any, tmp_path: Path) -> None:
    """Of the plan: tokens that a GiB holds."""
    write_model(tmp_path, name)
    for size in (1, 2, 4):
        plan = LLM.plan(
            tmp_path,
            dtype="bfloat16",
            tensor_parallel_size=4,
            decode_context_parallel_size=size,
            kv_cache_memory_bytes=2**30,
            max_model_len=16384,
        )
        board.add(
            f"{name}, 4 ranks, {size} keep one cache",
            {"bytes_a_token": plan.kv_bytes_per_token, "tokens_in_1_GiB": plan.num_tokens},
        )
