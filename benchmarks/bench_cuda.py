"""Times the CUDA backend's ops and batch-1 decoding next to what the GPU was measured to do.

The limits come from the same run: the bandwidth of copies within the GPU's memory (bytes read and
written) and the largest rate of a bf16 product. Ops work on arrays that stay on the GPU and are
queued back to back, so that one below some ten microseconds shows the host's time to launch it.
Models have random weights of published shapes, written to memory (/dev/shm) and nowhere else.

Example:
    python benchmarks/bench_cuda.py --json bench.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llmserve import LLM, SamplingParams, _core
from random_models import SHAPES, tensors_of, write_checkpoint

testing = _core.testing

MODELS = ("qwen3-0.6b", "llama-3.2-1b")
# Sequences, tokens of each in the step, and their context.
ATTENTION_STEPS = ((1, 1, 4096), (64, 1, 1024), (256, 1, 512), (1, 512, 512), (1, 2048, 2048))


@dataclass
class Row:
    """One measurement; the share is of the limit that it comes closer to."""

    name: str
    us: float
    gb_per_s: float
    gflop_per_s: float
    share_of_gpu: float


@dataclass
class Limits:
    gb_per_s: float
    gflop_per_s: float

    def row(self, name: str, seconds: float, num_bytes: float, flops: float = 0) -> Row:
        rates = num_bytes / seconds / 1e9, flops / seconds / 1e9
        share = max(rates[0] / self.gb_per_s, rates[1] / self.gflop_per_s)
        return Row(name, seconds * 1e6, *rates, share)


def seconds_of(backend: Any, run: Callable[[], object], target: float = 0.1) -> float:
    """Seconds a call of queued calls, the best of three rounds."""
    run()
    backend.synchronize()
    start = time.perf_counter()
    run()
    backend.synchronize()
    count = max(3, min(2000, int(target / max(1e-6, time.perf_counter() - start))))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(count):
            run()
        backend.synchronize()
        best = min(best, (time.perf_counter() - start) / count)
    return best


def bf16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal numbers as bf16 bits, truncated."""
    return (rng.standard_normal(shape, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


def measure_limits(backend: Any, rng: np.random.Generator) -> Limits:
    half = 2**29  # bytes: far more than any cache holds
    cache = [backend.empty_device((2, 1, 1, half // 4), "float32") for _ in range(2)]
    seconds = seconds_of(backend, lambda: backend.copy_blocks([(0, 1)], *cache))
    gb_per_s = 4 * half / seconds / 1e9  # keys and values, read and written
    n = 8192
    x = backend.empty_device((n, n), "float32")
    out = backend.empty_device((n, n), "float32")
    weight = backend.pack_linear([bf16(rng, n, n)], "bfloat16")
    seconds = seconds_of(backend, lambda: backend.linear(x, weight, out=out))
    return Limits(gb_per_s, 2 * n**3 / seconds / 1e9)


def linear_rows(backend: Any, limits: Limits, rng: np.random.Generator) -> Iterator[Row]:
    for n, k in ((4096, 1024), (16384, 2048), (151936, 1024)):
        for dtype, size in (("bfloat16", 2), ("float32", 4)):
            w = bf16(rng, n, k)
            weight = backend.pack_linear([w], dtype)
            for m in (1, 2, 4, 8, 16, 64, 512):  # up to 8: gemv
                x = backend.to_device(rng.standard_normal((m, k), dtype=np.float32))
                out = backend.empty_device((m, n), "float32")

                def run(x: Any = x, out: Any = out, weight: Any = weight) -> None:
                    backend.linear(x, weight, out=out)

                num_bytes = n * k * size + 4 * m * (n + k)
                name = f"linear {dtype} M={m} {n}x{k}"
                yield limits.row(name, seconds_of(backend, run, 0.05), num_bytes, 2 * m * n * k)


def fused_rows(backend: Any, limits: Limits, rng: np.random.Generator) -> Iterator[Row]:
    """A gated MLP's first half and what stands before attention, each as one op and as several."""
    for width, ffn in ((1024, 3072), (4096, 14336)):
        n = 2 * ffn
        weight = backend.pack_linear([bf16(rng, n, width)], "bfloat16")
        norm = backend.to_device(np.ones(width, np.float32))
        for m in (1, 2, 4, 8, 64):
            x = backend.to_device(rng.standard_normal((m, width), dtype=np.float32))
            normed, gate_up, out = (
                backend.empty_device((m, columns), "float32") for columns in (width, n, ffn)
            )

            def fused(x: Any = x, weight: Any = weight, norm: Any = norm, normed: Any = normed,
                      gate_up: Any = gate_up, out: Any = out) -> None:  # fmt: skip
                backend.fused_linear(x, weight, norm_weight=norm, activation="silu", out=out,
                                     normed=normed, gate_up=gate_up)  # fmt: skip

            def composed(x: Any = x, weight: Any = weight, norm: Any = norm, normed: Any = normed,
                         gate_up: Any = gate_up, out: Any = out) -> None:  # fmt: skip
                backend.rms_norm(x, norm, out=normed)
                backend.linear(normed, weight, out=gate_up)
                backend.gated_activation(gate_up, out=out)

            num_bytes = 2 * n * width + 4 * m * (width + ffn)
            for kind, run in (("one op", fused), ("three ops", composed)):
                name = f"norm, linear, gate as {kind} M={m} {n}x{width}"
                yield limits.row(name, seconds_of(backend, run, 0.05), num_bytes, 2 * m * n * width)
    heads, kv_heads, dim, blocks = 16, 8, 128, 256
    caches = [backend.empty_device((blocks, kv_heads, 16, dim), "bfloat16") for _ in range(2)]
    norm = backend.to_device(np.ones(dim, np.float32))
    for tokens in (1, 64, 2048):
        width = (heads + 2 * kv_heads) * dim
        qkv = backend.to_device(rng.standard_normal((tokens, width), dtype=np.float32))
        angles = backend.to_device(rng.standard_normal((tokens, dim), dtype=np.float32))
        slots = np.arange(tokens)

        def prepare(qkv: Any = qkv, angles: Any = angles, slots: Any = slots) -> None:
            backend.prepare_qkv(qkv, heads, *caches, slots, (norm, norm), (angles, angles))

        num_bytes = tokens * (4 * width + 4 * heads * dim + 4 * kv_heads * dim)
        name = f"norms, rotary, cache T={tokens} {heads}/{kv_heads}x{dim}"
        yield limits.row(name, seconds_of(backend, prepare, 0.05), num_bytes)


def attention_rows(backend: Any, limits: Limits, rng: np.random.Generator) -> Iterator[Row]:
    block = 16
    for heads, kv_heads, dim in ((16, 8, 128), (32, 8, 64)):
        for batch, queries, context in ATTENTION_STEPS:
            blocks = context // block
            shape = (batch * blocks, kv_heads, block, dim)
            keys, values = (backend.to_device(bf16(rng, *shape)) for _ in range(2))
            tables = np.arange(batch * blocks, dtype=np.int32).reshape(batch, blocks)
            tokens = batch * queries
            q = backend.to_device(rng.standard_normal((tokens, heads, dim), dtype=np.float32))
            out = backend.empty_device((tokens, heads, dim), "float32")
            starts = np.arange(batch + 1, dtype=np.int32) * queries
            lens = np.full(batch, context, np.int32)

            def run(q: Any = q, keys: Any = keys, values: Any = values, starts: Any = starts,
                    lens: Any = lens, tables: Any = tables, out: Any = out) -> None:  # fmt: skip
                backend.paged_attention(q, keys, values, starts, lens, tables, 0.1, out=out)

            pairs = batch * heads * (context if queries == 1 else queries * (queries + 1) // 2)
            num_bytes = 4 * batch * context * kv_heads * dim + 8 * tokens * heads * dim
            kind = "decode" if queries == 1 else "prefill"
            name = f"attention {kind} {heads}/{kv_heads}x{dim} B={batch} context={context}"
            yield limits.row(name, seconds_of(backend, run, 0.05), num_bytes, 4 * dim * pairs)


def backend_with(choices: dict[str, str]) -> Any:
    """A backend made under these environment variables."""
    before = {name: os.environ.get(name) for name in choices}
    os.environ.update(choices)
    try:
        return testing.make_backend("cuda")
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def plain_rows(_: Any, limits: Limits, rng: np.random.Generator) -> Iterator[Row]:
    """The kernels whose products have the same bits at every M: what that costs."""
    plain = backend_with({"LLMSERVE_CUDA_GEMM": "plain", "LLMSERVE_CUDA_ATTENTION": "plain"})
    invariant = backend_with({"LLMSERVE_CUDA_GEMM": "invariant"})
    for name, backend, make in (
        ("invariant", invariant, linear_rows),
        ("plain", plain, attention_rows),
        ("plain", plain, linear_rows),
    ):
        for row in make(backend, limits, rng):
            row.name = f"{name} {row.name}"
            yield row


def row_op_rows(backend: Any, limits: Limits, rng: np.random.Generator) -> Iterator[Row]:
    tokens, width = 2048, 2048
    x = backend.to_device(rng.standard_normal((tokens, 2 * width), dtype=np.float32))
    narrow = backend.to_device(rng.standard_normal((tokens, width), dtype=np.float32))
    out = backend.empty_device((tokens, width), "float32")
    weight = backend.to_device(np.ones(width, np.float32))
    size = tokens * width * 4
    yield limits.row(
        f"rms_norm {tokens}x{width}",
        seconds_of(backend, lambda: backend.rms_norm(narrow, weight, out=out)),
        2 * size,
    )
    yield limits.row(
        f"gated_activation {tokens}x{width}",
        seconds_of(backend, lambda: backend.gated_activation(x, out=out)),
        3 * size,
    )
    vocabulary, rows = 151936, 16
    logits = backend.to_device(rng.standard_normal((rows, vocabulary), dtype=np.float32))
    counts = [(i, 1, True) for i in range(0, 4000, 4)]
    for kind, params in (
        ("greedy", {"temperature": 0.0}),
        ("whole row", {}),
        ("top_k, top_p", {"top_k": 50, "top_p": 0.9}),
        ("penalties", {"counts": counts, "repetition_penalty": 1.1, "presence_penalty": 0.5}),
        ("mask", {"allowed": [0x55555555] * (vocabulary // 32)}),
        ("20 logprobs", {"num_top": 20}),
    ):
        settings = [{"seed": 1, "position": i, **params} for i in range(rows)]
        name = f"sample {rows}x{vocabulary} {kind}"
        seconds = seconds_of(backend, lambda s=settings: backend.sample(logits, s))
        yield limits.row(name, seconds, rows * vocabulary * 4)


def transfer_rows(backend: Any, _: Limits, rng: np.random.Generator) -> Iterator[Row]:
    """Blocks to and from pinned memory: the link. Weights of a file beside it, as share of it."""
    count, block = 256, (1, 1, 2**18)  # blocks of a MiB, keys and values
    device = [backend.empty_device((count, *block), "float32") for _ in range(2)]
    host = [backend.transfer_array([count, *block]) for _ in range(2)]
    pairs = [(i, i) for i in range(count)]
    weight = bf16(rng, 2**15, 2**13)

    def move(to_host: bool) -> None:
        number = backend.transfer_blocks(pairs, *device, *host, to_host)
        while not backend.is_transferred(number):
            pass

    link = Limits(math.inf, math.inf)
    for to_host in (True, False):
        seconds = seconds_of(backend, lambda to_host=to_host: move(to_host))
        num_bytes = 2 * count * 2**20
        link = Limits(num_bytes / seconds / 1e9, math.inf)
        yield link.row(f"link {'to' if to_host else 'from'} pinned memory", seconds, num_bytes)
    seconds = seconds_of(backend, lambda: backend.pack_linear([weight], "bfloat16"))
    yield link.row("weights to the GPU, bf16 (share of the link)", seconds, weight.nbytes)


def decode_rows(name: str, limits: Limits, max_tokens: int) -> Iterator[Row]:
    """Prompts of 64 tokens. Batch 1: the time between tokens, which a longer run adds. Batch 256:
    a step, and what of it the host takes beside the executor."""
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="llmserve-", dir=folder))
    try:
        write_checkpoint(directory, name)
        num_bytes = 2 * sum(math.prod(dims) for _, dims in tensors_of(SHAPES[name]))  # tied head
        options = {"max_model_len": 2048, "kv_cache_memory_bytes": 2**32, "max_num_seqs": 256}
        with LLM(directory, device="cuda", **options) as llm:

            def seconds(count: int, batch: int = 1) -> float:
                params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
                prompts = [[i, *range(100, 163)] for i in range(batch)]
                start = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                return time.perf_counter() - start

            seconds(4)
            step = (seconds(max_tokens) - seconds(2)) / (max_tokens - 2)
            yield limits.row(f"decode batch 1 {name} bf16", step, num_bytes)
            seconds(max_tokens, 256)
            yield from step_rows(name, limits, llm.trace(), 256, num_bytes)
    finally:
        shutil.rmtree(directory)


def step_rows(
    name: str, limits: Limits, trace: Iterable[Any], batch: int, num_bytes: int
) -> Iterator[Row]:
    """Medians of the decode steps with so many sequences."""
    steps = [s for s in trace if s.phase == "decode" and s.num_sequences == batch]
    host = statistics.median(s.schedule_us + s.execute_us - s.wait_us + s.commit_us for s in steps)
    # Steps overlap: each is launched while the one before is under way.
    starts = [step.start_us for step in steps]
    whole = statistics.median(b - a for a, b in itertools.pairwise(starts))
    yield limits.row(f"decode batch {batch} {name} bf16", whole * 1e-6, num_bytes)
    yield limits.row(f"the host's own time a step, batch {batch} {name}", host * 1e-6, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--models", nargs="*", default=MODELS, choices=MODELS)
    args = parser.parse_args()
    reason = testing.unavailable_reason("cuda")
    if reason:
        raise SystemExit(f"no CUDA here: {reason}")
    backend = testing.make_backend("cuda")
    rng = np.random.default_rng(0)
    limits = measure_limits(backend, rng)
    print(f"{backend.description}\nlimits: {limits}")
    rows: list[Row] = []

    def report(row: Row) -> None:
        rows.append(row)
        print(
            f"{row.name:60} {row.us:10.1f} us {row.gb_per_s:8.1f} GB/s "
            f"{row.gflop_per_s:9.1f} GFLOP/s {row.share_of_gpu:6.1%}"
        )
        if args.json:  # after every row, so that a run cut short leaves what it has
            result = {"device": backend.description, "limits": asdict(limits)}
            args.json.write_text(
                json.dumps({**result, "rows": [asdict(r) for r in rows]}, indent=1)
            )

    for name in args.models:
        for row in decode_rows(name, limits, args.max_tokens):
            report(row)
    for make in (transfer_rows, row_op_rows, fused_rows, attention_rows, linear_rows, plain_rows):
        for row in make(backend, limits, rng):
            report(row)


if __name__ == "__main__":
    main()
