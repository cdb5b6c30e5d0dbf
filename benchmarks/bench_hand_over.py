"""How long a prompt's KV blocks take from one engine to another, by transport.

The model is tiny and its cache is that of Llama-3-8B: 128 KiB a token in bf16, so that a few
thousand tokens are some hundred MiB. The sender is a process of its own, but for the transport
within one. A figure of test_hand_over is from the receiver's begin to the last block written, the
handshake and the conversion to and from its own layout of keys included; beside it stands copying
as many bytes in memory once. Tokens are compared with those of one engine.

test_first_token is of a model that computes for longer, in chunks: how long the first token takes,
and what of it comes after the prompt's end, if the receiver is asked then or once blocks are there.

Example:
    pytest benchmarks/bench_hand_over.py --results hand-over.json
"""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
import sys
import threading
import time
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
CHUNKED = "8 layers of 512"
SHAPES[CHUNKED] = {
    **SHAPES["llama-3.1-8b"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
ONE = SamplingParams(max_tokens=1, temperature=0)
SOME = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def make_llm(folder: Path, dtype: str, **options: Any) -> LLM:
    return LLM(
        str(folder),
        dtype=dtype,
        max_model_len=NUM_TOKENS + 64,
        kv_cache_memory_bytes=3 * NUM_TOKENS * 2**18,
        num_threads=1,
        **options,
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


class TimedPrompt:
    """A prompt that the sender computes beside the receiver."""

    def __init__(self, sender: LLM, prompt: list[int], ticket: str) -> None:
        self.began = time.perf_counter()
        self.ended = 0.0
        self._thread = threading.Thread(target=self._run, args=(sender, prompt, ticket))
        self._thread.start()

    def _run(self, sender: LLM, prompt: list[int], ticket: str) -> None:
        run(sender, prompt, ONE, ticket)
        self.ended = time.perf_counter()

    def join(self) -> None:
        self._thread.join()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_first_token(
    transport: str, board: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, CHUNKED)
    name = f"shm:llmserve-bench-{secrets.token_hex(8)}"
    address = name if transport == "shm" else "tcp:127.0.0.1:0"
    first: dict[str, list[float]] = {"end": [], "chunks": []}
    rest: dict[str, list[float]] = {"end": [], "chunks": []}
    options = {"max_num_batched_tokens": 256}
    with (
        make_llm(tmp_path, "bfloat16", **options) as sender,
        make_llm(tmp_path, "bfloat16", **options) as receiver,
    ):
        place = sender.open_hand_over(KEY, [address], timeout=60)
        place.addresses = place.addresses[1:]
        receiver.open_hand_over(KEY, timeout=60)
        for number in range(request.config.getoption("--repeats") + 1):
            for asked in first:
                sender.reset_prefix_cache()
                receiver.reset_prefix_cache()
                ticket = place.ticket()
                timed = TimedPrompt(sender, prompt_of(number), ticket)
                while asked == "chunks" and not place.has_begun(ticket):
                    time.sleep(0.001)
                if asked == "end":
                    timed.join()
                run(receiver, prompt_of(number), ONE, ticket)
                got = time.perf_counter()
                timed.join()
                if number:  # the first writes to memory that nobody has touched
                    first[asked].append(got - timed.began)
                    rest[asked].append(got - timed.ended)
        received = receiver.get_metrics().num_hand_overs_received
        assert received == 2 * (request.config.getoption("--repeats") + 1)
    for asked in first:
        board.add(
            f"{NUM_TOKENS} tokens in chunks of 256, bfloat16, {transport}, by {asked}",
            {
                "first_token_ms": statistics.median(first[asked]) * 1e3,
                "after_the_prompt_ms": statistics.median(rest[asked]) * 1e3,
            },
            {"first_token_ms_min": min(first[asked]) * 1e3},
        )


if __name__ == "__main__":
    send(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
