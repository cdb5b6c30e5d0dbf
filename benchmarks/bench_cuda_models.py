"""Times a model of a published shape on the GPU: batch-1 decoding, prompts of 2k and 8k, the host's
own time a step at batch 256, and the workload of nano-vllm's bench.py; then what the invariant mode
costs, and what PyTorch does on the same GPU.

Limits come from the same run: the bandwidth of copies within the GPU's memory, and the largest rate
of a bf16 product. Weights are random, in bf16, written to memory (/dev/shm) where there is room.

Example:
    python benchmarks/bench_cuda_models.py qwen3-0.6b --json bench.json
"""

from __future__ import annotations

import itertools
import math
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_rows import Limits, Row, measure_device, read_arguments, report, torch_device
from llmserve import LLM, SamplingParams, _core
from llmserve.bench.machine import Rates
from peers.workloads import Workload
from random_models import SHAPES, tensors_of, write_checkpoint


@dataclass(frozen=True)
class Sizes:
    """How much of everything is run."""

    copy_bytes: int = 2**29
    product: int = 8192
    max_model_len: int = 8192
    max_step_tokens: int = 8192
    decode: tuple[int, int] = (256, 256)  # a prompt's tokens, and those generated after it
    prefills: tuple[int, ...] = (2048, 8191)  # and one token to draw
    batch: int = 256
    batch_tokens: int = 128
    nano: tuple[int, int, int] = (256, 100, 1024)  # requests, least and most tokens of both kinds
    torch_batch: int = 64


# What the emulator of tests/cuda runs in seconds: to see that nothing fails.
SMALL = Sizes(
    copy_bytes=2**14,
    product=32,
    max_model_len=96,
    max_step_tokens=64,
    decode=(8, 6),
    prefills=(16, 40),
    batch=3,
    batch_tokens=8,
    nano=(3, 4, 8),
    torch_batch=2,
)


def nano_vllm(sizes: Sizes) -> tuple[Workload, list[list[int]]]:
    """The workload of nano-vllm's bench.py, number for number: 142,827 tokens in, 133,966 out."""
    count, least, most = sizes.nano
    draw = random.Random(0)
    prompts = [
        [draw.randint(0, 10000) for _ in range(draw.randint(least, most))] for _ in range(count)
    ]
    outputs = tuple(draw.randint(least, most) for _ in range(count))
    return Workload("nano-vllm", tuple(map(len, prompts)), outputs), prompts


class Bench:
    """One model, and what it is compared with."""

    def __init__(self, name: str, limits: Limits, sizes: Sizes) -> None:
        self.name, self.limits, self.sizes = name, limits, sizes
        self.config = SHAPES[name]
        products = limits.gflop_per_s * 1e9
        # Tensor cores do twice as many products of bytes.
        rates = {"bfloat16": {"torch": products}, "int8": {"torch": 2 * products}}
        self.rates = Rates(limits.gb_per_s * 1e9, rates)
        self.nano, self.nano_prompts = nano_vllm(sizes)
        vocab = self.config["vocab_size"]
        self.nano_prompts = [[t % vocab for t in prompt] for prompt in self.nano_prompts]

    def row(self, what: str, seconds: float, work: Workload, form: str = "bfloat16") -> Row:
        """The share is of what no program beats: prompts and decoding one after the other."""
        bound = self.bound_s(work, form)
        row = self.limits.row(f"{what}, {self.name}", seconds, 0, 0, work.num_tokens)
        row.share_of_gpu = bound / seconds
        return row

    def bound_s(self, work: Workload, form: str) -> float:
        parts = [work]
        if not work.is_decode and max(work.max_tokens) > 1:
            ones = (1,) * len(work.prompt_lens)
            parts = [
                Workload("prompts", work.prompt_lens, ones),
                Workload("decoding", work.prompt_lens, work.max_tokens, is_decode=True),
            ]
        return sum(part.bound_s(self.config, form, self.rates) for part in parts)

    def decode_work(self) -> Workload:
        prompt, count = self.sizes.decode
        return Workload("decode", (prompt,), (count + 1,), is_decode=True)

    def engine_rows(self, directory: Path, mode: str) -> Iterator[Row]:
        sizes = self.sizes
        options: dict[str, Any] = {
            "max_model_len": sizes.max_model_len,
            "max_num_batched_tokens": sizes.max_step_tokens,
            "max_num_seqs": max(sizes.batch, sizes.nano[0]),
        }
        start = time.perf_counter()
        with LLM(directory, device="cuda", **options) as llm:
            size = (directory / "model.safetensors").stat().st_size
            seconds = time.perf_counter() - start
            yield self.limits.row(f"{mode}load, weights in memory, {self.name}", seconds, size)
            yield from self.short_rows(llm, mode)
            runner = Runner(llm, self.config["vocab_size"])
            for run in ("first", "second"):
                seconds = runner.generate(self.nano_prompts, self.nano.max_tokens, 0.6)
                yield self.row(f"{mode}nano-vllm workload, {run} run", seconds, self.nano)
                llm.reset_prefix_cache()

    def short_rows(self, llm: LLM, mode: str, form: str = "bfloat16") -> Iterator[Row]:
        """Decoding alone, prompts, steps of many. form: whose bytes and rates the bound is of."""
        runner = Runner(llm, self.config["vocab_size"])
        prompt, count = self.sizes.decode
        runner.seconds([prompt], [4])
        times = [
            runner.seconds([prompt], [count + 1]) - runner.seconds([prompt], [1]) for _ in range(3)
        ]
        seconds = statistics.median(times)
        yield self.row(f"{mode}decode batch 1", seconds, self.decode_work(), form)
        for length in self.sizes.prefills:
            times = [runner.seconds([length], [1]) for _ in range(4)]
            work = Workload("prefill", (length,), (1,))
            yield self.row(f"{mode}prefill {length}", min(times[1:]), work, form)
        yield from self.step_rows(llm, runner, mode, form)

    @staticmethod
    def step_seconds(steps: Sequence[_core.StepRecord]) -> tuple[float, float]:
        """Medians of steps of one kind: from one to the next, since they overlap, each launched
        while the one before is under way, and what the host did meanwhile."""
        host = statistics.median(
            s.schedule_us + s.execute_us - s.wait_us + s.commit_us for s in steps
        )
        starts = [step.start_us for step in steps]
        whole = statistics.median(b - a for a, b in itertools.pairwise(starts))
        return whole * 1e-6, host * 1e-6

    def step_rows(self, llm: LLM, runner: Runner, mode: str, form: str) -> Iterator[Row]:
        """Medians of the decode steps with so many sequences."""
        batch, count = self.sizes.batch, self.sizes.batch_tokens
        lengths = [min(64, self.sizes.decode[0])] * batch
        runner.seconds(lengths, [count] * batch)
        trace = llm.trace()
        steps = [s for s in trace if s.phase == "decode" and s.num_sequences == batch]
        whole, host = self.step_seconds(steps)
        work = Workload("step", (lengths[0] + count // 2,) * batch, (2,) * batch, is_decode=True)
        yield self.row(f"{mode}decode batch {batch}, a step", whole, work, form)
        yield self.limits.row(
            f"{mode}the host's own time a step, batch {batch}, {self.name}", host, 0
        )

    def torch_rows(self, device: str) -> Iterator[Row]:
        import torch_model

        sizes = self.sizes
        prompt, count = sizes.decode
        context = max(sizes.max_model_len, prompt + count)
        model = torch_model.TorchModel(self.config, device, 1, context)
        seconds = torch_model.decode_seconds(model, prompt, count) * count
        yield self.row("torch with a CUDA graph: decode batch 1", seconds, self.decode_work())
        for length in sizes.prefills:
            seconds = torch_model.prefill_seconds(model, length)
            work = Workload("prefill", (length,), (1,))
            yield self.row(f"torch: prefill {length}", seconds, work)
        del model
        lengths = max(self.nano.prompt_lens) + max(self.nano.max_tokens)
        model = torch_model.TorchModel(self.config, device, sizes.torch_batch, lengths)
        seconds = torch_model.generate_seconds(
            model, self.nano_prompts, list(self.nano.max_tokens), sizes.torch_batch, 0.6
        )
        name = f"torch: nano-vllm workload in batches of {sizes.torch_batch}"
        yield self.row(name, seconds, self.nano)


class Runner:
    """Runs prompts that nothing was cached of."""

    def __init__(self, llm: LLM, vocab_size: int) -> None:
        self.llm, self.vocab_size, self.draw = llm, vocab_size, random.Random(1)

    def prompts(self, lengths: list[int]) -> list[Any]:
        draws = ([self.draw.randrange(self.vocab_size) for _ in range(n)] for n in lengths)
        return [{"prompt_token_ids": prompt} for prompt in draws]

    def seconds(self, lengths: list[int], max_tokens: list[int]) -> float:
        return self.generate(
            [prompt["prompt_token_ids"] for prompt in self.prompts(lengths)], max_tokens, 0.0
        )

    def generate(self, prompts: list[list[int]], max_tokens: Any, temperature: float) -> float:
        params = [
            SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, seed=i)
            for i, n in enumerate(max_tokens)
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        self.llm.generate(inputs, params, use_tqdm=False)
        return time.perf_counter() - start


def checkpoint_folder(config: dict[str, Any]) -> Path:
    """In memory where it has room: a container's /dev/shm may be tiny."""
    elements = sum(math.prod(dims) for _, dims in tensors_of(config))
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > 2 * elements + 2**28
    return Path(tempfile.mkdtemp(prefix="llmserve-", dir=memory if has_room else None))


def invariant_rows(bench: Bench, directory: Path) -> Iterator[Row]:
    before = os.environ.get("LLMSERVE_CUDA_GEMM")
    os.environ["LLMSERVE_CUDA_GEMM"] = "invariant"
    try:
        yield from bench.engine_rows(directory, "invariant: ")
    finally:
        del os.environ["LLMSERVE_CUDA_GEMM"]
        if before is not None:
            os.environ["LLMSERVE_CUDA_GEMM"] = before


def all_rows(bench: Bench, is_small: bool) -> Iterator[Row]:
    directory = checkpoint_folder(bench.config)
    try:
        write_checkpoint(directory, bench.name)
        yield from bench.engine_rows(directory, "")
        yield from invariant_rows(bench, directory)
    finally:
        shutil.rmtree(directory)
    device = torch_device(is_small)
    if device:
        yield from bench.torch_rows(device)


def main() -> None:
    args = read_arguments(__doc__, "model", SHAPES)
    sizes = SMALL if args.small else Sizes()
    device, limits = measure_device(sizes)
    bench = Bench("tiny" if args.small else args.model, limits, sizes)
    report(device, limits, all_rows(bench, args.small), args.json)


if __name__ == "__main__":
    main()
