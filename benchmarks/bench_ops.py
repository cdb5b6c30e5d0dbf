"""Times every op of the cpu backend and puts it next to what this machine can do.

Every row gives GB/s (bytes that the op must read and write) and GFLOP/s (2 a multiply-add), and the
larger of the two shares of the machine's read bandwidth and of the best rate of a large matrix
product in the same format: llmserve's in the same instruction set, or, beside the best set,
oneDNN's where torch is installed. Of an op that fills new memory, GB/s read and written, and the
share of a plain copy of as many bytes.

Example:
    pytest benchmarks/bench_ops.py -k quantized --threads 2 --isa all --results ops.json
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from llmserve import _core
from llmserve.bench.machine import GEMM, MachineProbe, medians
from torch_gemm import TorchGemm

testing = _core.testing
TURNS = 4  # of reads and runs in a repeat


@dataclass
class Case:
    """One op on one shape: run() does it once and must move num_bytes and do flops."""

    name: str
    run: Callable[[], object]
    num_bytes: int
    flops: int = 0
    form: str = "float32"  # what is multiplied
    fills_new_memory: bool = False
    check: Callable[[], bool] = lambda: True


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def as_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32, or the upper half of it: bfloat16 by truncation, as uint16."""
    return x if dtype == "float32" else (x.view(np.uint32) >> 16).astype(np.uint16)


def as_float(x: np.ndarray) -> np.ndarray:
    return x if x.dtype == np.float32 else (x.astype(np.uint32) << 16).view(np.float32)


def in_layout(keys: np.ndarray, layout: str) -> np.ndarray:
    """Rows [N, K, P, D] as the engine's cache holds them (KeyLayout of csrc/kernels/ops.h)."""
    if layout == "rows":
        return keys
    n, heads, block, dim = keys.shape
    pair = 2 if keys.dtype == np.uint16 else 1
    tiles = keys.reshape(n, heads, block // 16, 16, dim // pair, pair)
    return np.ascontiguousarray(tiles.swapaxes(3, 4)).reshape(keys.shape)


def linear_cases(backend, rng) -> Iterator[Case]:
    n, k = 32_000, 2048  # TinyLlama's head: more than the last cache holds
    for dtype in ("bfloat16", "float32"):
        w = as_dtype(normal(rng, n, k), dtype)
        weight = backend.pack_linear([w], dtype)
        yield Case(
            f"pack_linear {dtype} {n}x{k}",
            lambda w=w, dtype=dtype: backend.pack_linear([w], dtype),
            2 * w.nbytes,
            fills_new_memory=True,
        )
        for m in (1, 4, 8, 32, 128, 512):
            x, out = normal(rng, m, k), np.empty((m, n), np.float32)

            def check(x=x, out=out, w=w, dtype=dtype):
                columns = np.s_[:: n // 8]
                # Some instruction sets round x to bfloat16 beside such weights: 2^-9 a term.
                atol = 1e-3 if dtype == "float32" else 4 * 2**-9 * k**0.5
                return np.allclose(out[:, columns], x @ as_float(w[columns]).T, atol=atol)

            yield Case(
                f"linear {dtype} M={m} {n}x{k}",
                lambda x=x, out=out, weight=weight: backend.linear(x, weight, out=out),
                w.nbytes + x.nbytes + out.nbytes,
                2 * m * n * k,
                dtype,
                check=check,
            )


def quantized_cases(backend, rng) -> Iterator[Case]:
    n, k = 32_000, 2048
    w = normal(rng, n, k)
    for name, _ in _core.supported_quantizations():
        weight = backend.pack_quantized(w, name)
        yield Case(
            f"pack_quantized {name} {n}x{k}",
            lambda name=name: backend.pack_quantized(w, name),
            w.nbytes + weight.num_bytes,
        )
        for m in (1, 4, 8, 32, 128, 512):
            x, out = normal(rng, m, k), np.empty((m, n), np.float32)

            def check(x=x, out=out):
                columns = np.s_[:: n // 8]  # within the rounding of 4 bits
                return np.abs(out[:, columns] - x @ w[columns].T).std() < 0.15 * k**0.5

            yield Case(
                f"linear {name} M={m} {n}x{k}",
                lambda x=x, out=out, weight=weight: backend.linear(x, weight, out=out),
                weight.num_bytes + x.nbytes + out.nbytes,
                2 * m * n * k,
                name,
                check=check,
            )


# Sequences, queries of each, context.
ATTENTION_SHAPES = ((8, 1, 4096), (32, 1, 1024), (32, 1, 4096), (1, 512, 512), (1, 2048, 2048))


def attention_cases(backend, rng) -> Iterator[Case]:
    block = 16
    for heads, kv_heads, dim in ((32, 4, 64), (16, 8, 128)):
        for dtype in ("bfloat16", "float32"):
            for batch, queries, context in ATTENTION_SHAPES:
                blocks = context // block
                keys, values = (  # of every sequence the same, in blocks of its own
                    np.tile(
                        as_dtype(normal(rng, blocks, kv_heads, block, dim), dtype), (batch, 1, 1, 1)
                    )
                    for _ in range(2)
                )
                tables = np.arange(batch * blocks, dtype=np.int32).reshape(batch, blocks)
                q = normal(rng, batch * queries, heads, dim)
                out = np.empty_like(q)
                starts = np.arange(batch + 1, dtype=np.int32) * queries
                lens = np.full(batch, context, np.int32)
                pairs = batch * heads * (context if queries == 1 else queries * (queries + 1) // 2)

                layout = backend.key_layout(block, dim, dim, dtype)
                cache = in_layout(keys, layout), values

                def run(
                    q=q,
                    cache=cache,
                    starts=starts,
                    lens=lens,
                    tables=tables,
                    out=out,
                    layout=layout,
                ):
                    backend.paged_attention(
                        q,
                        *cache,
                        starts,
                        lens,
                        tables,
                        q.shape[-1] ** -0.5,
                        out=out,
                        key_layout=layout,
                    )

                def check(q=q, keys=keys, values=values, out=out, blocks=blocks, starts=starts):
                    # The last query of the first sequence, head 0, sees everything.
                    k, v = (
                        as_float(part[:blocks, 0]).reshape(-1, q.shape[-1])
                        for part in (keys, values)
                    )
                    last = len(q) // (len(starts) - 1) - 1
                    s = k @ q[last, 0] * q.shape[-1] ** -0.5
                    p = np.exp(s - s.max())
                    # Some instruction sets round queries and probabilities beside such a cache.
                    atol = 1e-4 if keys.dtype == np.float32 else 4 * 2**-9
                    return np.allclose(out[last, 0], p @ v / p.sum(), atol=atol)

                kind = f"decode B={batch}" if queries == 1 else f"prefill T={queries}"
                yield Case(
                    f"attention {dtype} {heads}/{kv_heads}x{dim} {kind} context={context}",
                    run,
                    keys.nbytes + values.nbytes + q.nbytes + out.nbytes,
                    4 * dim * pairs,
                    dtype,
                    check=check,
                )


def cache_cases(backend, rng) -> Iterator[Case]:
    tokens, blocks, heads, dim, block = 512, 1024, 8, 128, 16
    kv = normal(rng, tokens, heads, dim)
    slots = rng.permutation(blocks * block)[:tokens]
    pairs = [(i, blocks - 1 - i) for i in range(blocks // 2)]
    for dtype in ("bfloat16", "float32"):
        empty = np.zeros((blocks, heads, block, dim), np.float32)
        caches = [as_dtype(empty, dtype).copy() for _ in range(2)]
        for layout in ("rows", "panels"):
            yield Case(
                f"store_kv {dtype} {layout} {tokens}x{heads}x{dim}",
                lambda caches=caches, layout=layout: backend.store_kv(
                    kv, kv, slots, *caches, layout
                ),
                2 * kv.nbytes + 2 * kv.size * caches[0].itemsize,
            )
        yield Case(
            f"copy_blocks {dtype} {len(pairs)}x{heads}x{block}x{dim}",
            lambda caches=caches: backend.copy_blocks(pairs, *caches),
            2 * caches[0].nbytes,  # half of the blocks of two caches, read and written
        )


def row_cases(backend, rng) -> Iterator[Case]:
    tokens, width, ffn = 512, 2048, 5632
    x, weight, out = (
        normal(rng, tokens, width),
        normal(rng, width),
        np.empty((tokens, width), np.float32),
    )
    residual, rows, ids = np.zeros_like(x), rng.permutation(tokens), rng.integers(0, 32_000, tokens)
    for name, run, copies in (
        ("rms_norm", lambda: backend.rms_norm(x, weight, out=out), 2),
        ("layer_norm", lambda: backend.layer_norm(x, weight, weight, out=out), 2),
        ("add_rms_norm", lambda: backend.add_rms_norm(residual, x, weight, out=out), 4),
        ("add", lambda: backend.add(residual, x), 3),
        ("cap_logits", lambda: backend.cap_logits(residual, 1.0, 30.0), 2),
        ("gather_rows", lambda: backend.gather_rows(x, rows, out=out), 2),
    ):
        yield Case(f"{name} {tokens}x{width}", run, copies * x.nbytes)
    for dtype in ("bfloat16", "float32"):
        table = as_dtype(normal(rng, 32_000, width), dtype)
        yield Case(
            f"embedding {dtype} {tokens}x{width}",
            lambda table=table: backend.embedding(table, ids, out=out),
            tokens * width * (table.itemsize + 4),
        )
    gate_up, activated = normal(rng, tokens, 2 * ffn), np.empty((tokens, ffn), np.float32)
    for activation in ("silu", "gelu_tanh", "gelu"):
        yield Case(
            f"gated_activation {activation} {tokens}x{ffn}",
            lambda activation=activation: backend.gated_activation(
                gate_up, activation, out=activated
            ),
            gate_up.nbytes + activated.nbytes,
        )
    yield Case(
        f"activation gelu {tokens}x{ffn}",
        lambda: backend.activation(gate_up[:, :ffn], "gelu", out=activated),
        2 * activated.nbytes,
    )
    heads = normal(rng, tokens, 32, 64)
    positions, inv_freq = np.arange(tokens), (1e4 ** (-np.arange(32) / 32)).astype(np.float32)
    table = backend.rotary_table(positions, inv_freq)
    yield Case(
        f"rotary_table {tokens}x64",
        lambda: backend.rotary_table(positions, inv_freq),
        table.nbytes,
    )
    yield Case(f"rotary {tokens}x32x64", lambda: backend.rotary(heads, table), 2 * heads.nbytes)
    for dtype in ("bfloat16", "float32"):
        big = as_dtype(np.ones(1 << 26, np.float32), dtype)
        yield Case(
            f"first_non_finite {dtype} {big.nbytes >> 20} MiB",
            lambda big=big: backend.first_non_finite(big),
            big.nbytes,
        )


def sample_cases(backend, rng) -> Iterator[Case]:
    for rows, vocabulary in ((1, 151_936), (32, 32_000)):
        logits = normal(rng, rows, vocabulary) * 3
        for label, params in (
            ("greedy", {"temperature": 0.0}),
            ("plain", {}),
            ("top_k=50 top_p=0.9", {"top_k": 50, "top_p": 0.9}),
            ("top_p=0.9 logprobs=5", {"top_p": 0.9, "num_top": 5}),
        ):
            params = [{"seed": 1, "position": i, **params} for i in range(rows)]
            yield Case(
                f"sample {rows}x{vocabulary} {label}",
                lambda logits=logits, params=params: backend.sample(logits, params),
                logits.nbytes,
            )


GROUPS = {
    "linear": linear_cases,
    "quantized": quantized_cases,
    "attention": attention_cases,
    "cache": cache_cases,
    "rows": row_cases,
    "sample": sample_cases,
}


def pytest_generate_tests(metafunc):
    """Every instruction set that can run here, or the one that --isa names."""
    name = metafunc.config.getoption("--isa")
    every = [isa for isa, can_run in testing.cpu_isas() if can_run]
    metafunc.parametrize("backend", every if name == "all" else [name], indirect=True)


@pytest.fixture(scope="module")
def backend(threads, request):
    return testing.make_backend("cpu", threads, request.param)


@pytest.fixture(scope="module")
def probe(backend, threads):
    isa = isa_of(backend)
    best = next(name for name, can_run in testing.cpu_isas() if can_run)
    if isa != best or importlib.util.find_spec("torch") is None:
        yield MachineProbe(threads, [], isa=isa)
        return
    one_dnn = TorchGemm(sys.executable, threads, GEMM)
    yield MachineProbe(threads, [], {"oneDNN": one_dnn}, isa)
    one_dnn.close()


@pytest.mark.parametrize("group", GROUPS)
def test_ops(group, backend, probe, board, repeats, request):
    wanted = request.config.getoption("--cases")
    for case in GROUPS[group](backend, np.random.default_rng(0)):
        if wanted in case.name:
            board.add(f"{isa_of(backend)} {case.name}", time_case(case, probe, repeats))


def isa_of(backend) -> str:
    return backend.description.removeprefix("cpu/").split(",")[0]


def time_case(case: Case, probe: MachineProbe, repeats: int) -> dict[str, float]:
    """Runs of some milliseconds and reads in turns: memory's rate changes from one to the next."""
    case.run()
    assert case.check(), f"{case.name}: the result is wrong"
    start = time.perf_counter()
    case.run()
    loops = max(1, int(0.005 / max(1e-7, time.perf_counter() - start)))
    forms = [case.form] if case.flops else []
    seconds, reads, measured, copies = [], [], [], []
    for turn in range(TURNS * repeats):
        if turn % TURNS == 0:
            measured.append(probe.measure(forms))
        reads.append(probe.read_bytes_per_s())
        if case.fills_new_memory:
            copies.append(probe.copy_bytes_per_s(case.num_bytes // 2))
        start = time.perf_counter()
        for _ in range(loops):
            case.run()
        seconds.append((time.perf_counter() - start) / loops)
    s = statistics.median(seconds)
    rates = replace(medians(measured), read_bytes_per_s=statistics.median(reads))
    bound_s = rates.bound_s(case.num_bytes, case.flops, case.form)
    if case.fills_new_memory:
        bound_s = case.num_bytes / statistics.median(copies)
    return {
        "us": s * 1e6,
        "gb_per_s": case.num_bytes / s * 1e-9,
        "gflop_per_s": case.flops / s * 1e-9,
        "share": bound_s / s,
        "read_gb_per_s": rates.read_bytes_per_s * 1e-9,
        "gemm_gflop_per_s": rates.best_gemm(case.form)[0] * 1e-9 if case.flops else 0.0,
    }
