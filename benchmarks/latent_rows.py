"""Rows of bench_cuda.py for latent attention, whose query heads all read one row a token, in bf16:
decoding and prompts, beside PyTorch's attention over the same rows laid side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from gpu_rows import Limits, Row, bf16, seconds_of

BLOCK = 16


@dataclass(frozen=True)
class LatentSizes:
    # Query heads, width of a row, and of its first part, which is the value: DeepSeek-V2-Lite,
    # GLM-4.7-Flash, Mistral Small 4, DeepSeek-V3.
    kinds: tuple[tuple[int, int, int], ...] = (
        (16, 576, 512),
        (20, 576, 512),
        (32, 320, 256),
        (128, 576, 512),
    )
    # Sequences, tokens of each in the step, and their context.
    shapes: tuple[tuple[int, int, int], ...] = (
        (1, 1, 4096),
        (64, 1, 1024),
        (64, 1, 4096),
        (1, 1, 65536),
        (1, 2048, 2048),
    )


SMALL = LatentSizes(((3, 48, 32),), ((2, 1, 32), (1, 20, 20)))


def name_of(kind: tuple[int, int, int], shape: tuple[int, int, int]) -> str:
    heads, width, value_width = kind
    batch, queries, context = shape
    step = "decode" if queries == 1 else "prefill"
    return f"latent attention {step} {heads}x{width}/{value_width} B={batch} context={context}"


def work_of(kind: tuple[int, int, int], shape: tuple[int, int, int]) -> tuple[int, int]:
    """Bytes of the cache, queries and outputs, each once, and operations."""
    heads, width, value_width = kind
    batch, queries, context = shape
    pairs = context if queries == 1 else queries * (queries + 1) // 2
    num_bytes = 2 * batch * context * width + 4 * batch * queries * heads * (width + value_width)
    return num_bytes, 2 * batch * heads * pairs * (width + value_width)


def latent_rows(
    backend: Any, limits: Limits, rng: np.random.Generator, sizes: LatentSizes
) -> Iterator[Row]:
    for kind in sizes.kinds:
        heads, width, value_width = kind
        for shape in sizes.shapes:
            batch, queries, context = shape
            blocks = context // BLOCK + (context % BLOCK > 0)
            cache = backend.to_device(bf16(rng, batch * blocks, 1, BLOCK, width))
            tables = np.arange(batch * blocks, dtype=np.int32).reshape(batch, blocks)
            tokens = batch * queries
            q = backend.to_device(rng.standard_normal((tokens, heads, width), dtype=np.float32))
            out = backend.empty_device((tokens, heads, value_width), "float32")
            starts = np.arange(batch + 1, dtype=np.int32) * queries
            lens = np.full(batch, context, np.int32)

            arguments = (q, cache, value_width, starts, lens, tables, 0.1)

            def run(arguments: Any = arguments, out: Any = out) -> None:
                backend.paged_attention(*arguments, out=out)

            yield limits.row(
                name_of(kind, shape), seconds_of(backend, run, 0.05), *work_of(kind, shape)
            )


def torch_latent_rows(limits: Limits, sizes: LatentSizes, device: str) -> Iterator[Row]:
    import torch
    import torch.nn.functional as F

    def ended() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    count = 10 if device == "cuda" else 1
    for kind in sizes.kinds:
        heads, width, value_width = kind
        for shape in sizes.shapes:
            batch, queries, context = shape
            keys = torch.randn(batch, 1, context, width, device=device, dtype=torch.bfloat16)
            q = torch.randn(batch, heads, queries, width, device=device, dtype=torch.bfloat16)
            best = float("inf")
            with torch.inference_mode():
                for _ in range(3):
                    start = ended()
                    for _ in range(count):
                        F.scaled_dot_product_attention(
                            *(q, keys, keys[..., :value_width]),
                            is_causal=queries > 1,
                            enable_gqa=True,
                        )
                    best = min(best, (ended() - start) / count)
            yield limits.row(f"torch: {name_of(kind, shape)}", best, *work_of(kind, shape))
