"""The ops around the paged cache: preparing and storing keys and values, copying, attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from op_case import Case, aligned, as_dtype, as_float, empty, empty_cache, in_layout, normal

BLOCK = 16
DTYPES = ("bfloat16", "float32", "fp8")
HEADS = ((32, 4, 64), (16, 8, 128))  # of queries, of keys, width of each
# Sequences, queries of each, context.
SHAPES = ((8, 1, 4096), (32, 1, 1024), (32, 1, 4096), (1, 512, 512), (1, 2048, 2048))
# What layers of Gemma have besides, on one decode and one prefill.
EDITS = ({"window": 1024}, {"soft_cap": 50.0})
EDITED_SHAPES = ((8, 1, 4096), (1, 2048, 2048))
# Latent attention: heads of queries, which all read rows of key_dim, whose first value_dim elements
# are the value. DeepSeek-V2-Lite, GLM-4.7-Flash, Mistral Small 4, DeepSeek-V3.
LATENTS = ((16, 576, 512), (20, 576, 512), (32, 320, 256), (128, 576, 512))
LATENT_SHAPES = ((8, 1, 4096), (1, 512, 512))
# Of stored numbers, relative to a row's largest: bfloat16 has 8 bits, e4m3 has 4.
STORED_ERROR = {"float32": 0.0, "bfloat16": 2**-8, "fp8": 2**-4}


@dataclass(frozen=True)
class Shape:
    """Attention of `queries` tokens at the end of each of `batch` sequences of `context` tokens."""

    heads: int
    kv_heads: int
    dim: int
    dtype: str
    batch: int
    queries: int
    context: int
    window: int = 0
    soft_cap: float = 0.0

    def num_seen(self) -> np.ndarray:
        """Positions that each query of a sequence sees, [queries]."""
        seen = np.arange(self.context - self.queries, self.context) + 1
        return np.minimum(seen, self.window) if self.window else seen

    def name(self) -> str:
        kind = f"decode B={self.batch}" if self.queries == 1 else f"prefill T={self.queries}"
        edits = f" window={self.window}" if self.window else ""
        edits += f" soft_cap={self.soft_cap:g}" if self.soft_cap else ""
        heads = f"{self.heads}/{self.kv_heads}x{self.dim}"
        return f"attention {self.dtype} {heads} {kind} context={self.context}{edits}"


def attention_cases(backend, rng) -> Iterator[Case]:
    for heads in HEADS:
        for dtype in DTYPES:
            for shape in SHAPES:
                yield attention_case(backend, rng, Shape(*heads, dtype, *shape))
    for dtype in DTYPES:
        for shape in EDITED_SHAPES:
            for edits in EDITS:
                yield attention_case(backend, rng, Shape(*HEADS[1], dtype, *shape, **edits))


def attention_case(backend, rng, shape: Shape) -> Case:
    blocks = shape.context // BLOCK
    keys, values = (  # of every sequence the same, in blocks of its own
        np.tile(stored(backend, rng, blocks, shape), (shape.batch, 1, 1, 1)) for _ in range(2)
    )
    layout = backend.key_layout(BLOCK, shape.dim, shape.dim, shape.dtype)
    cache = aligned(in_layout(keys, layout)), aligned(values)
    tables = np.arange(shape.batch * blocks, dtype=np.int32).reshape(shape.batch, blocks)
    q = normal(rng, shape.batch * shape.queries, shape.heads, shape.dim)
    out = empty(*q.shape)
    starts = np.arange(shape.batch + 1, dtype=np.int32) * shape.queries
    lens = np.full(shape.batch, shape.context, np.int32)
    scale = shape.dim**-0.5

    def run():
        backend.paged_attention(
            *(q, *cache, starts, lens, tables, scale, shape.window, shape.soft_cap),
            out=out,
            key_layout=layout,
        )

    def check():
        # The last query of the first sequence, head 0.
        last, seen = shape.queries - 1, shape.num_seen()[-1]
        k, v = (
            as_float(part[:blocks, 0]).reshape(-1, shape.dim)[-seen:] for part in (keys, values)
        )
        s = k @ q[last, 0] * scale
        if shape.soft_cap:
            s = shape.soft_cap * np.tanh(s / shape.soft_cap)
        p = np.exp(s - s.max())
        # Some instruction sets round queries and probabilities beside caches of bfloat16 and fp8.
        atol = 4 * 2**-9 if shape.dtype != "float32" else 1e-4
        return np.allclose(out[last, 0], p @ v / p.sum(), atol=atol)

    share_read = shape.num_seen()[-1] / shape.context if shape.queries == 1 else 1.0
    return Case(
        shape.name(),
        run,
        int((keys.nbytes + values.nbytes) * share_read) + q.nbytes + out.nbytes,
        4 * shape.dim * shape.heads * shape.batch * int(shape.num_seen().sum()),
        "bfloat16" if shape.dtype == "fp8" else shape.dtype,
        check=check,
    )


def latent_cases(backend, rng) -> Iterator[Case]:
    for heads, key_dim, value_dim in LATENTS:
        for dtype in DTYPES:
            for batch, queries, context in LATENT_SHAPES:
                shape = Shape(heads, 1, key_dim, dtype, batch, queries, context)
                yield latent_case(backend, rng, shape, value_dim)


def latent_case(backend, rng, shape: Shape, value_dim: int) -> Case:
    blocks = shape.context // BLOCK
    rows = stored(backend, rng, blocks, shape)
    cache = aligned(np.tile(rows, (shape.batch, 1, 1, 1)))
    tables = np.arange(shape.batch * blocks, dtype=np.int32).reshape(shape.batch, blocks)
    q = normal(rng, shape.batch * shape.queries, shape.heads, shape.dim)
    out = empty(*q.shape[:2], value_dim)
    starts = np.arange(shape.batch + 1, dtype=np.int32) * shape.queries
    lens = np.full(shape.batch, shape.context, np.int32)
    scale = shape.dim**-0.5

    def run():
        backend.paged_attention(q, cache, value_dim, starts, lens, tables, scale, out=out)

    def check():
        # The last query of the first sequence, head 0.
        keys = as_float(cache[:blocks, 0]).reshape(-1, shape.dim)
        s = keys @ q[shape.queries - 1, 0] * scale
        p = np.exp(s - s.max())
        atol = 4 * 2**-9 if shape.dtype != "float32" else 1e-4
        expected = p @ keys[:, :value_dim] / p.sum()
        return np.allclose(out[shape.queries - 1, 0], expected, atol=atol)

    return Case(
        f"latent {shape.name()} values={value_dim}",
        run,
        cache.nbytes + q.nbytes + out.nbytes,
        2 * (shape.dim + value_dim) * shape.heads * shape.batch * int(shape.num_seen().sum()),
        "bfloat16" if shape.dtype == "fp8" else shape.dtype,
        check=check,
    )


def stored(backend, rng, blocks: int, shape: Shape) -> np.ndarray:
    """Random keys or values of one sequence, in rows."""
    rows = normal(rng, blocks, shape.kv_heads, BLOCK, shape.dim)
    if shape.dtype != "fp8":
        return as_dtype(rows, shape.dtype)
    caches = [empty_cache(*rows.shape, "fp8") for _ in range(2)]
    tokens = rows.swapaxes(1, 2).reshape(-1, shape.kv_heads, shape.dim)
    backend.store_kv(tokens, tokens, np.arange(len(tokens)), *caches)
    return caches[0]


def cache_cases(backend, rng) -> Iterator[Case]:
    tokens, blocks, heads, dim = 512, 1024, 8, 128
    kv = normal(rng, tokens, heads, dim)
    slots = rng.permutation(blocks * BLOCK)[:tokens]
    pairs = [(i, blocks - 1 - i) for i in range(blocks // 2)]
    for dtype in DTYPES:
        caches = [empty_cache(blocks, heads, BLOCK, dim, dtype) for _ in range(2)]
        for layout in ("rows", "panels"):

            def check(dtype=dtype, layout=layout):
                rows, laid_out = (
                    [empty_cache(blocks, heads, BLOCK, dim, dtype) for _ in range(2)]
                    for _ in range(2)
                )
                backend.store_kv(kv, kv, slots, *rows)
                backend.store_kv(kv, kv, slots, *laid_out, layout)
                found = as_float(rows[0])[slots // BLOCK, :, slots % BLOCK]
                error = np.abs(found - kv) / np.abs(kv).max(-1, keepdims=True)
                return (
                    error.max() <= STORED_ERROR[dtype]
                    and np.array_equal(rows[0], rows[1])
                    and np.array_equal(in_layout(rows[0], layout), laid_out[0])
                    and np.array_equal(rows[1], laid_out[1])
                )

            yield Case(
                f"store_kv {dtype} {layout} {tokens}x{heads}x{dim}",
                lambda caches=caches, layout=layout: backend.store_kv(
                    kv, kv, slots, *caches, layout
                ),
                2 * kv.nbytes + 2 * tokens * caches[0][0, :, 0].nbytes,
                check=check,
            )

        def is_copied(caches=caches):
            half = blocks // 2
            return all(np.array_equal(c[:half], c[half:][::-1]) for c in caches)

        yield Case(
            f"copy_blocks {dtype} {len(pairs)}x{heads}x{BLOCK}x{dim}",
            lambda caches=caches: backend.copy_blocks(pairs, *caches),
            2 * caches[0].nbytes,  # half of the blocks of two caches, read and written
            check=is_copied,
        )


def prepare_cases(backend, rng) -> Iterator[Case]:
    """Norms of heads, rotation and the cache as one op, on a chunk of a prompt."""
    tokens, (heads, kv_heads, dim) = 512, HEADS[1]
    begin_v = (heads + kv_heads) * dim
    qkv = normal(rng, tokens, begin_v + kv_heads * dim)
    inv_freq = (1e4 ** (-np.arange(dim // 2) / (dim // 2))).astype(np.float32)
    table = backend.rotary_table(np.arange(tokens), inv_freq)
    slots = rng.permutation(tokens)
    for dtype in DTYPES:
        layout = backend.key_layout(BLOCK, dim, dim, dtype)
        for label, norms in (("", None), (" norms", (normal(rng, dim), normal(rng, dim)))):
            caches = [empty_cache(tokens // BLOCK, kv_heads, BLOCK, dim, dtype) for _ in range(2)]

            def run(rows, caches, norms=norms, layout=layout):
                backend.prepare_qkv(
                    rows, heads, *caches, slots, norms, (table, table), key_layout=layout
                )

            def check(run=run, caches=caches, norms=norms, layout=layout):
                got, expected = ([np.zeros_like(c) for c in caches] for _ in range(2))
                rows = qkv.copy()
                run(rows, got)
                parts = np.split(qkv, [heads * dim, begin_v], axis=1)
                q, k, v = (part.reshape(tokens, -1, dim).copy() for part in parts)
                if norms is not None:
                    q, k = (backend.rms_norm(x, w) for x, w in zip((q, k), norms, strict=True))
                for x in (q, k):
                    backend.rotary(x, table)
                backend.store_kv(k, v, slots, *expected, layout)
                return np.array_equal(rows[:, : heads * dim], q.reshape(tokens, -1)) and all(
                    np.array_equal(a, b) for a, b in zip(got, expected, strict=True)
                )

            rows = qkv.copy()
            yield Case(
                f"prepare_qkv {dtype}{label} {tokens}x{heads}/{kv_heads}x{dim}",
                lambda run=run, rows=rows, caches=caches: run(rows, caches),
                qkv.nbytes + tokens * heads * dim * 4 + 2 * caches[0].nbytes,
                check=check,
            )
