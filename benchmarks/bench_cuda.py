"""Times the CUDA backend's ops next to what the GPU was measured to do, and attention next to
PyTorch's and to its own other kernels.

The limits come from the same run: the bandwidth of copies within the GPU's memory (bytes read and
written) and the largest rate of a bf16 product. Ops work on arrays that stay on the GPU and are
queued back to back, so that one below some ten microseconds shows the host's time to launch it.

Example:
    python benchmarks/bench_cuda.py ops --json bench.json
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from core_testing import testing
from gpu_rows import (
    Limits,
    Row,
    bf16,
    measure_limits,
    read_arguments,
    report,
    seconds_of,
    torch_device,
)
from latent_rows import SMALL as SMALL_LATENTS
from latent_rows import LatentSizes, latent_rows, torch_latent_rows


@dataclass(frozen=True)
class Sizes:
    """The shapes of every op."""

    copy_bytes: int = 2**29
    product: int = 8192
    linears: tuple[tuple[int, int], ...] = ((4096, 1024), (16384, 2048), (151936, 1024))
    linear_rows: tuple[int, ...] = (1, 2, 4, 8, 16, 64, 512)  # up to 8: gemv
    # Those that kernels are compared by: of models of 0.6 and 8 billion parameters.
    products: tuple[tuple[int, int], ...] = (
        (4096, 1024),
        (16384, 2048),
        (151936, 1024),
        (28672, 4096),
        (4096, 14336),
    )
    product_rows: tuple[int, ...] = (1, 8, 16, 32, 64, 128, 256, 512, 2048)
    mlps: tuple[tuple[int, int], ...] = ((1024, 3072), (4096, 14336))  # E, F
    mlp_rows: tuple[int, ...] = (1, 2, 4, 8, 64)
    qkv_tokens: tuple[int, ...] = (1, 64, 2048)
    heads: tuple[tuple[int, int, int], ...] = ((16, 8, 128), (32, 8, 64), (32, 8, 128))  # H, K, D
    # Sequences, tokens of each in the step, and their context.
    attention: tuple[tuple[int, int, int], ...] = (
        (1, 1, 4096),
        (64, 1, 1024),
        (256, 1, 512),
        (256, 1, 2048),
        (1, 512, 512),
        (1, 2048, 2048),
        (1, 8192, 8192),
    )
    prepared: tuple[tuple[int, int], ...] = ((1, 512), (1, 4096), (8, 1024), (64, 1024))
    row_tokens: int = 2048
    row_width: int = 2048
    vocabulary: int = 151936
    sampled_rows: int = 16
    link_blocks: int = 256
    link_block: int = 2**18  # elements
    # Blocks of 16 tokens of Llama-3-8B: keys and values of each layer, in bytes, and their number.
    handed_over: tuple[int, int, int] = (64, 2**15, 64)
    weight: tuple[int, int] = (2**15, 2**13)
    latents: LatentSizes = field(default_factory=LatentSizes)


# What the emulator of tests/cuda runs in seconds: to see that nothing fails.
SMALL = Sizes(
    copy_bytes=2**14,
    product=32,
    linears=((32, 16),),
    linear_rows=(1, 9),
    products=((32, 16),),
    product_rows=(1, 9),
    mlps=((16, 16),),
    mlp_rows=(1, 9),
    qkv_tokens=(1,),
    heads=((2, 1, 64),),
    attention=((2, 1, 32), (1, 80, 80)),  # rows enough for the kernel of prompts
    prepared=((2, 32),),
    row_tokens=4,
    row_width=32,
    vocabulary=96,
    sampled_rows=2,
    link_blocks=4,
    link_block=2**8,
    handed_over=(4, 2**8, 3),
    weight=(32, 64),
    latents=SMALL_LATENTS,
)


def linear_rows(
    backend: Any,
    limits: Limits,
    rng: np.random.Generator,
    sizes: Sizes,
    dtypes: tuple[str, ...] = ("bfloat16", "float32"),
) -> Iterator[Row]:
    for n, k in sizes.linears:
        for dtype in dtypes:
            size = 2 if dtype == "bfloat16" else 4
            w = bf16(rng, n, k)
            weight = backend.pack_linear([w], dtype)
            for m in sizes.linear_rows:
                x = backend.to_device(rng.standard_normal((m, k), dtype=np.float32))
                out = backend.empty_device((m, n), "float32")

                def run(x: Any = x, out: Any = out, weight: Any = weight) -> None:
                    backend.linear(x, weight, out=out)

                num_bytes = n * k * size + 4 * m * (n + k)
                name = f"linear {dtype} M={m} {n}x{k}"
                yield limits.row(name, seconds_of(backend, run, 0.05), num_bytes, 2 * m * n * k)


# Products in bf16 by one kernel or library for any number of rows; the first is what is faster of
# them, which says in the device's line what that is.
PRODUCT_CHOICES = ("fastest", "cublaslt", "wgmma", "invariant")


def product_rows(_: Any, limits: Limits, rng: np.random.Generator, sizes: Sizes) -> Iterator[Row]:
    sizes = replace(sizes, linears=sizes.products, linear_rows=sizes.product_rows)
    for choice in PRODUCT_CHOICES:
        try:
            backend = backend_with({"LLMSERVE_CUDA_GEMM": choice})
        except NotImplementedError as error:  # of another GPU, or without the library
            print(error)
            continue
        for row in linear_rows(backend, limits, rng, sizes, ("bfloat16",)):
            if choice != PRODUCT_CHOICES[0]:
                row.name = f"{choice}: {row.name}"
            yield row


def fused_rows(
    backend: Any, limits: Limits, rng: np.random.Generator, sizes: Sizes
) -> Iterator[Row]:
    """A gated MLP's first half and what stands before attention, each as one op and as several."""
    for width, ffn in sizes.mlps:
        n = 2 * ffn
        weight = backend.pack_linear([bf16(rng, n, width)], "bfloat16")
        norm = backend.to_device(np.ones(width, np.float32))
        for m in sizes.mlp_rows:
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
                backend.gated_activation(gate_up, "silu", out=out)

            num_bytes = 2 * n * width + 4 * m * (width + ffn)
            for kind, run in (("one op", fused), ("three ops", composed)):
                name = f"norm, linear, gate as {kind} M={m} {n}x{width}"
                yield limits.row(name, seconds_of(backend, run, 0.05), num_bytes, 2 * m * n * width)
    heads, kv_heads, dim, blocks = 16, 8, 128, 256
    caches = [backend.empty_device((blocks, kv_heads, 16, dim), "bfloat16") for _ in range(2)]
    norm = backend.to_device(np.ones(dim, np.float32))
    for tokens in sizes.qkv_tokens:
        width = (heads + 2 * kv_heads) * dim
        qkv = backend.to_device(rng.standard_normal((tokens, width), dtype=np.float32))
        angles = backend.to_device(rng.standard_normal((tokens, dim), dtype=np.float32))
        slots = np.arange(tokens)

        def prepare(qkv: Any = qkv, angles: Any = angles, slots: Any = slots) -> None:
            backend.prepare_qkv(qkv, heads, *caches, slots, (norm, norm), (angles, angles))

        num_bytes = tokens * (4 * width + 4 * heads * dim + 4 * kv_heads * dim)
        name = f"norms, rotary, cache T={tokens} {heads}/{kv_heads}x{dim}"
        yield limits.row(name, seconds_of(backend, prepare, 0.05), num_bytes)


def attention_rows(
    backend: Any,
    limits: Limits,
    rng: np.random.Generator,
    sizes: Sizes,
    kind: str = "",
    is_f8: bool = False,
) -> Iterator[Row]:
    """Of decoding and of prompts, or of the kind that is named, over a cache in bf16 or f8."""
    block = 16
    for heads, kv_heads, dim in sizes.heads:
        for batch, queries, context in sizes.attention:
            if kind not in ("", attention_kind(queries)):
                continue
            blocks = context // block
            shape = (batch * blocks, kv_heads, block, dim)
            make = f8_cache if is_f8 else bf16
            keys, values = (backend.to_device(make(rng, *shape)) for _ in range(2))
            tables = np.arange(batch * blocks, dtype=np.int32).reshape(batch, blocks)
            tokens = batch * queries
            q = backend.to_device(rng.standard_normal((tokens, heads, dim), dtype=np.float32))
            out = backend.empty_device((tokens, heads, dim), "float32")
            starts = np.arange(batch + 1, dtype=np.int32) * queries
            lens = np.full(batch, context, np.int32)

            def run(q: Any = q, keys: Any = keys, values: Any = values, starts: Any = starts,
                    lens: Any = lens, tables: Any = tables, out: Any = out) -> None:  # fmt: skip
                backend.paged_attention(q, keys, values, starts, lens, tables, 0.1, out=out)

            row_bytes = dim + 4 if is_f8 else 2 * dim
            num_bytes = 2 * batch * context * kv_heads * row_bytes + 8 * tokens * heads * dim
            name = attention_name(heads, kv_heads, dim, batch, queries, context)
            flops = attention_flops(heads, dim, batch, queries, context)
            yield limits.row(name, seconds_of(backend, run, 0.05), num_bytes, flops)


def f8_cache(rng: np.random.Generator, blocks: int, heads: int, rows: int, dim: int) -> np.ndarray:
    """Codes that are numbers, and behind those of a block's head their rows' scales."""
    cache = np.empty((blocks, heads, rows * (dim + 4)), np.uint8)
    cache[..., : rows * dim] = rng.integers(0, 0x78, rows * dim, np.uint8)
    cache[..., rows * dim :] = np.full(rows, 2.0**-6, np.float32).view(np.uint8)
    return cache.reshape(blocks, heads, rows, dim + 4)


def attention_kind(queries: int) -> str:
    return "decode" if queries == 1 else "prefill"


def attention_name(
    heads: int, kv_heads: int, dim: int, batch: int, queries: int, context: int
) -> str:
    kind = attention_kind(queries)
    return f"attention {kind} {heads}/{kv_heads}x{dim} B={batch} context={context}"


def attention_flops(heads: int, dim: int, batch: int, queries: int, context: int) -> int:
    """Of a token a sequence, or of a causal prompt."""
    pairs = context if queries == 1 else queries * (queries + 1) // 2
    return 4 * dim * batch * heads * pairs


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


# Kernels that the default's are to be compared with, by the kind of attention: whether their cache
# is in f8, and what chooses them.
ATTENTION_CHOICES: dict[str, list[tuple[str, bool, dict[str, str]]]] = {
    "decode": [
        *(
            (f"{n} spans a warp", False, {"LLMSERVE_CUDA_DECODE_SPANS": n})
            for n in ("two", "enough", "all")
        ),
        ("merged by the last block", False, {"LLMSERVE_CUDA_MERGE": "last"}),
        ("merged by a kernel", False, {"LLMSERVE_CUDA_MERGE": "kernel"}),
        ("fp8 cache", True, {}),
        ("fp8 cache by registers", True, {"LLMSERVE_CUDA_DECODE_F8": "registers"}),
    ],
}


def fast_prompt_rows(
    _: Any, limits: Limits, rng: np.random.Generator, sizes: Sizes
) -> Iterator[Row]:
    backend = backend_with({"LLMSERVE_CUDA_ATTENTION": "fastest"})
    for row in attention_rows(backend, limits, rng, sizes, "prefill", False):
        row.name = f"fastest: {row.name}"
        yield row


def other_attention_rows(
    _: Any, limits: Limits, rng: np.random.Generator, sizes: Sizes
) -> Iterator[Row]:
    for kind, choices in ATTENTION_CHOICES.items():
        for name, is_f8, environment in choices:
            backend = backend_with(environment)
            for row in attention_rows(backend, limits, rng, sizes, kind, is_f8):
                row.name = f"{name}: {row.name}"
                yield row


# Of latents, how they are split and the plain kernel.
LATENT_CHOICES = {
    "": {},
    "whole stretches: ": {"LLMSERVE_CUDA_DECODE_SPANS": "all"},
    "plain: ": {"LLMSERVE_CUDA_ATTENTION": "plain"},
}


def all_latent_rows(
    _: Any, limits: Limits, rng: np.random.Generator, sizes: Sizes
) -> Iterator[Row]:
    for name, environment in LATENT_CHOICES.items():
        backend = backend_with(environment)
        for row in latent_rows(backend, limits, rng, sizes.latents):
            row.name = f"{name}{row.name}"
            yield row


def prepared_rows(_: Any, limits: Limits, rng: np.random.Generator, sizes: Sizes) -> Iterator[Row]:
    """From a step's queries, keys and values to what its output layer makes, with what stands
    before attention in a kernel of its own and within attention."""
    block = 16
    for choice in ("kernel", "attention"):
        backend = backend_with({"LLMSERVE_CUDA_PREPARE": choice})
        for heads, kv_heads, dim in sizes.heads:
            weight = backend.pack_linear([bf16(rng, sizes.row_width // 2, heads * dim)], "bfloat16")
            norm = backend.to_device(np.ones(dim, np.float32))
            for batch, context in sizes.prepared:
                blocks = context // block
                shape = (batch * blocks, kv_heads, block, dim)
                keys, values = (backend.to_device(bf16(rng, *shape)) for _ in range(2))
                tables = np.arange(batch * blocks, dtype=np.int32).reshape(batch, blocks)
                slots = (np.arange(batch) + 1) * context - 1
                width = (heads + 2 * kv_heads) * dim
                qkv = backend.to_device(rng.standard_normal((batch, width), dtype=np.float32))
                angles = backend.to_device(rng.standard_normal((batch, dim), dtype=np.float32))
                attended = backend.empty_device((batch, heads * dim), "float32")
                out = backend.empty_device((batch, weight.out_features), "float32")
                starts = np.arange(batch + 1, dtype=np.int32)
                lens = np.full(batch, context, np.int32)

                def run(backend: Any = backend, heads: int = heads, weight: Any = weight,
                        norm: Any = norm, keys: Any = keys, values: Any = values,
                        tables: Any = tables, slots: Any = slots, qkv: Any = qkv,
                        angles: Any = angles, attended: Any = attended, out: Any = out,
                        starts: Any = starts, lens: Any = lens) -> None:  # fmt: skip
                    backend.prepared_attention(
                        *(qkv, heads, keys, values, slots, starts, lens, tables, 0.1, weight),
                        *((norm, norm), (angles, angles)),
                        attended=attended,
                        out=out,
                    )

                num_bytes = (
                    4 * batch * context * kv_heads * dim + 2 * heads * dim * weight.out_features
                )
                name = f"prepared by {choice}: {heads}/{kv_heads}x{dim} B={batch} context={context}"
                yield limits.row(name, seconds_of(backend, run, 0.05), num_bytes)


def plain_rows(_: Any, limits: Limits, rng: np.random.Generator, sizes: Sizes) -> Iterator[Row]:
    """The kernels whose products have the same bits at every M: what that costs."""
    plain = backend_with({"LLMSERVE_CUDA_GEMM": "plain", "LLMSERVE_CUDA_ATTENTION": "plain"})
    invariant = backend_with({"LLMSERVE_CUDA_GEMM": "invariant"})
    for name, backend, make in (
        ("invariant", invariant, linear_rows),
        ("plain", plain, attention_rows),
        ("plain", plain, linear_rows),
    ):
        for row in make(backend, limits, rng, sizes):
            row.name = f"{name} {row.name}"
            yield row


def row_op_rows(
    backend: Any, limits: Limits, rng: np.random.Generator, sizes: Sizes
) -> Iterator[Row]:
    tokens, width = sizes.row_tokens, sizes.row_width
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
        seconds_of(backend, lambda: backend.gated_activation(x, "silu", out=out)),
        3 * size,
    )
    vocabulary, rows = sizes.vocabulary, sizes.sampled_rows
    logits = backend.to_device(rng.standard_normal((rows, vocabulary), dtype=np.float32))
    counts = [(i, 1, True) for i in range(0, min(4000, vocabulary), 4)]
    for kind, params in (
        ("greedy", {"temperature": 0.0}),
        ("whole row", {}),
        ("top_k, top_p", {"top_k": 50, "top_p": 0.9}),
        ("penalties", {"counts": counts, "repetition_penalty": 1.1, "presence_penalty": 0.5}),
        ("mask", {"allowed": [0x55555555] * (vocabulary // 32)}),
        ("20 logprobs", {"num_top": 20}),
    ):
        settings = testing.SampleRows([{"seed": 1, "position": i, **params} for i in range(rows)])
        name = f"sample {rows}x{vocabulary} {kind}"
        seconds = seconds_of(backend, lambda s=settings: backend.sample(logits, s))
        yield limits.row(name, seconds, rows * vocabulary * 4)


def transfer_rows(backend: Any, _: Limits, rng: np.random.Generator, sizes: Sizes) -> Iterator[Row]:
    """Blocks to and from pinned memory: the link. Weights of a file beside it, as share of it."""
    count, block = sizes.link_blocks, (1, 1, sizes.link_block)  # keys and values
    device = [backend.empty_device((count, *block), "float32") for _ in range(2)]
    host = [backend.transfer_array([count, *block]) for _ in range(2)]
    pairs = [(i, i) for i in range(count)]
    weight = bf16(rng, *sizes.weight)

    def move(to_host: bool) -> None:
        number = backend.transfer_blocks(pairs, *device, *host, to_host)
        while not backend.is_transferred(number):
            pass

    link = Limits(math.inf, math.inf)
    links = {}
    for to_host in (True, False):
        seconds = seconds_of(backend, lambda to_host=to_host: move(to_host))
        num_bytes = 2 * count * 4 * sizes.link_block
        link = links[to_host] = Limits(num_bytes / seconds / 1e9, math.inf)
        yield link.row(f"link {'to' if to_host else 'from'} pinned memory", seconds, num_bytes)
    for threads in sorted({1, os.cpu_count() or 1}):  # that fill pinned memory, as a model's do
        filling = testing.make_backend("cuda", threads)
        seconds = seconds_of(filling, lambda b=filling: b.pack_linear([weight], "bfloat16"))
        of = f"{threads} thread{'s' if threads > 1 else ''}"
        yield link.row(
            f"weights to the GPU, bf16, {of} (share of the link)", seconds, weight.nbytes
        )
    yield from handed_over_rows(backend, links, sizes)


def handed_over_rows(backend: Any, links: dict[bool, Limits], sizes: Sizes) -> Iterator[Row]:
    """Blocks as they go to a peer and come from one, without the wire between: by threads of the
    host, a block at a time, through pinned memory."""
    num_parts, part_bytes, num_blocks = sizes.handed_over
    pools = backend.empty_device((num_parts * num_blocks * part_bytes // 4,), "float32")
    copies = backend.make_copies(num_parts * part_bytes)
    pieces = [
        [(pools, (part * num_blocks + block) * part_bytes, part_bytes) for part in range(num_parts)]
        for block in range(num_blocks)
    ]
    buffers = [np.zeros(num_parts * part_bytes, np.uint8) for _ in range(num_blocks)]
    for to_host, move in ((True, copies.read), (False, copies.write)):
        for num_threads in (1, 4):
            with ThreadPoolExecutor(num_threads) as pool:
                seconds = seconds_of(
                    backend,
                    lambda pool=pool, move=move: list(pool.map(move, pieces, buffers)),
                )
            direction = "from" if to_host else "to"
            threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
            name = f"hand-over {direction} the GPU, {threads} (share of the link)"
            yield links[to_host].row(name, seconds, num_blocks * num_parts * part_bytes)


def torch_rows(limits: Limits, sizes: Sizes, device: str) -> Iterator[Row]:
    """PyTorch's attention over contiguous keys and values."""
    import torch_model

    for heads, kv_heads, dim in sizes.heads:
        for batch, queries, context in sizes.attention:
            seconds = torch_model.attention_seconds(
                device, batch, heads, kv_heads, dim, context, queries
            )
            num_bytes = 4 * batch * context * kv_heads * dim
            name = f"torch: {attention_name(heads, kv_heads, dim, batch, queries, context)}"
            flops = attention_flops(heads, dim, batch, queries, context)
            yield limits.row(name, seconds, num_bytes, flops)


Make = Callable[[Any, Limits, np.random.Generator, Sizes], Iterator[Row]]
# What is wanted first comes first: time on a GPU may run out.
PARTS: dict[str, tuple[Make, ...]] = {
    "attention": (attention_rows, other_attention_rows, prepared_rows, all_latent_rows),
    "ops": (transfer_rows, row_op_rows, fused_rows, linear_rows, plain_rows),
    "products": (product_rows, fast_prompt_rows),
}


def all_rows(
    part: str, backend: Any, limits: Limits, sizes: Sizes, is_small: bool
) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    for make in PARTS[part]:
        yield from make(backend, limits, rng, sizes)
    if part == "attention" and (device := torch_device(is_small)):
        yield from torch_rows(limits, sizes, device)
        yield from torch_latent_rows(limits, sizes.latents, device)


def main() -> None:
    args = read_arguments(__doc__, "part", PARTS)
    sizes = SMALL if args.small else Sizes()
    backend = testing.make_backend("cuda")
    limits = measure_limits(backend, sizes.copy_bytes, sizes.product)
    rows = all_rows(args.part, backend, limits, sizes, args.small)
    report(backend.description, limits, rows, args.json)


if __name__ == "__main__":
    main()
