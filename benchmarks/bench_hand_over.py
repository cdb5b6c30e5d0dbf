"""How long a prompt's KV blocks take from one engine to another, by transport.

The model is tiny and its cache is that of Llama-3-8B: 128 KiB a token in bf16, so that a few
thousand tokens are some hundred MiB. The sender is a process of its own, but for the transport
within one. A figure is from the receiver's begin to the last block written, the handshake and the
conversion to and from its own layout of keys included; beside it stands copying as many bytes in
memory once. Tokens are compared with those of one engine.

Example:
    pytest benchmarks/bench_hand_over.py --results hand-over.json
"""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmserve import LLM, SamplingParams
from random_models import SHAPES, write_checkpoint

KEY = "a key for a benchmark"
NUM_TOKENS = 2048
SHAPE = "cache-of-llama-3-8b"
SHAPES[SHAPE] = {
    **SHAPES["llama-3.1-8b"],
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "vocab_size": 32000,
}
ONE = SamplingParams(max_tokens=1, temperature=0)
SOME = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def make_llm(folder: Path, dtype: str) -> LLM:
    return LLM(
        str(folder),
        dtype=dtype,
        max_model_len=NUM_TOKENS + 64,
        kv_cache_memory_bytes=3 * NUM_TOKENS * 2**18,
        num_threads=1,
    )


def prompt_of(number: int) -> list[int]:
    return [3 + (number * 977 + i * 131) % 30000 for i in range(NUM_TOKENS)]


def run(llm: LLM, prompt: list[int], params: SamplingParams, ticket: str = "") -> list[int]:
    prompts = [{"prompt_token_ids": prompt}]
    (state,) = llm._admission.admit(prompts, params, 0, (), llm._blocks_of(ticket))
    for _ in llm._runner.run([state], is_streamed=False):
        pass
    return list(state.output().outputs[0].token_ids)


def send(folder: Path, dtype: str, address: str) -> None:
    """The sender's process: computes the prompts whose numbers it reads, and prints tickets."""
    with make_llm(folder, dtype) as llm:
        place = llm.open_hand_over(KEY, [address], timeout=60)
        place.addresses = place.addresses[1:]
        for line in sys.stdin:
            ticket = place.ticket()
            run(llm, prompt_of(int(line)), ONE, ticket)
            print(json.dumps(ticket), flush=True)


class Sender:
    """Another process, or this one."""

    def __init__(self, folder: Path, dtype: str, transport: str) -> None:
        self._llm: LLM | None = None
        if transport == "local":
            self._llm = make_llm(folder, dtype)
            self._place = self._llm.open_hand_over(KEY, timeout=60)
            return
        name = f"shm:llmserve-bench-{secrets.token_hex(8)}"
        address = name if transport == "shm" else "tcp:127.0.0.1:0"
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(folder), dtype, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ticket(self, number: int) -> str:
        if self._llm is not None:
            ticket = self._place.ticket()
            run(self._llm, prompt_of(number), ONE, ticket)
            return ticket
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        return str(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        if self._llm is not None:
            self._llm.close()
            return
        self._process.communicate("")


def copy_s(num_bytes: int) -> float:
    """Of so many bytes in memory, once."""
    import time

    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return min(times)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hand-over")
    write_checkpoint(path, SHAPE)
    return path


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_hand_over(
    folder: Path, transport: str, dtype: str, board: Any, request: pytest.FixtureRequest
) -> None:
    sender = Sender(folder, dtype, transport)
    times, bytes_before, us_before = [], 0, 0
    try:
        with make_llm(folder, dtype) as receiver:
            receiver.open_hand_over(KEY, timeout=60)  # whatever else the machine does
            for number in range(request.config.getoption("--repeats") + 1):
                ticket = sender.ticket(number)
                got = run(receiver, prompt_of(number), SOME, ticket)
                metrics = receiver.get_metrics()
                assert metrics.num_hand_overs_received == number + 1
                num_bytes = metrics.hand_over_received_bytes - bytes_before
                if number:  # the first writes to memory that nobody has touched
                    times.append((metrics.hand_over_receive_us - us_before) / 1e6)
                bytes_before = metrics.hand_over_received_bytes
                us_before = metrics.hand_over_receive_us
            receiver.reset_prefix_cache()
            assert got == run(receiver, prompt_of(number), SOME)
    finally:
        sender.close()
    seconds = statistics.median(times)
    board.add(
        f"{NUM_TOKENS} tokens, {dtype}, {transport}",
        {
            "ms": seconds * 1e3,
            "MiB": num_bytes / 2**20,
            "GB_per_s": num_bytes / seconds / 1e9,
            "us_per_token": seconds / NUM_TOKENS * 1e6,
            "of_a_copy": seconds / copy_s(num_bytes),
        },
        {"ms_min": min(times) * 1e3, "ms_max": max(times) * 1e3},
    )


if __name__ == "__main__":
    send(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
