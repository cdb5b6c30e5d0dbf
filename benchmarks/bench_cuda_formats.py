"""Times products with weights of every kind of format on the GPU beside the same in bf16, at the
shapes of an 8B model: own integers, blocks of GGUF files, E4M3.

Example:
    python benchmarks/bench_cuda_formats.py --json formats.json
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from core_testing import testing
from gpu_rows import Limits, Row, bf16, measure_limits, read_arguments, report, seconds_of
from random_models import drawn_rows

# E4M3: how many columns share a scale, and whether activations are E4M3, too, where they may be.
FP8 = {
    "fp8 rows": (0, True),
    "fp8 blocks": (128, True),
    "fp8 rows, weights alone": (0, False),
}


@dataclass(frozen=True)
class Sizes:
    copy_bytes: int = 2**29
    product: int = 8192
    # Queries, keys and values; gate and up; down.
    weights: tuple[tuple[int, int], ...] = ((6144, 4096), (28672, 4096), (4096, 14336))
    rows: tuple[int, ...] = (1, 8, 16, 64, 128, 256, 512, 2048)
    integers: tuple[str, ...] = ("int8", "int4", "int4-g32")
    blocks: tuple[str, ...] = ("Q8_0", "Q4_K")


# What the emulator of tests/cuda runs in seconds: to see that nothing fails.
SMALL = Sizes(
    copy_bytes=2**14,
    product=32,
    weights=((32, 256),),
    rows=(1, 66),
    integers=("int4",),
    blocks=("Q4_K",),
)


def packed(backend: Any, rng: np.random.Generator, n: int, k: int, sizes: Sizes) -> Iterator[Any]:
    """Names and weights, one at a time."""
    yield "bfloat16", backend.pack_linear([bf16(rng, n, k)], "bfloat16")
    draws = rng.standard_normal(min(n * k, 4_194_301), dtype=np.float32)
    rows = np.resize(draws, (n, k))
    for name in sizes.integers:
        yield name, backend.pack_quantized(rows, name)
    del rows
    for kind in sizes.blocks:
        yield kind, backend.pack_blocks(drawn_rows(kind, n, k), kind)
    codes = np.resize(rng.integers(0, 127, min(n * k, 4_194_301)).astype(np.int8), (n, k))
    for name, (group, rounds) in FP8.items():
        traits = testing.make_format(is_fp8=True, group_size=group, rounds_to_fp8=rounds)
        scales = np.full((n, k // (group or k)), k**-0.5 / 448, np.float32)
        yield name, backend.pack_numbers(traits, codes, scales)


def all_rows(backend: Any, limits: Limits, sizes: Sizes) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    for n, k in sizes.weights:
        for name, weight in packed(backend, rng, n, k, sizes):
            for m in sizes.rows:
                x = backend.to_device(rng.standard_normal((m, k), dtype=np.float32))
                out = backend.empty_device((m, n), "float32")

                def run(x: Any = x, out: Any = out, weight: Any = weight) -> None:
                    backend.linear(x, weight, out=out)

                num_bytes = weight.num_bytes + 4 * m * (n + k)
                row = f"quantized {name} M={m} {n}x{k}"
                yield limits.row(row, seconds_of(backend, run, 0.03), num_bytes, 2 * m * n * k)


def main() -> None:
    args = read_arguments(__doc__)
    sizes = SMALL if args.small else Sizes()
    backend = testing.make_backend("cuda")
    limits = measure_limits(backend, sizes.copy_bytes, sizes.product)
    report(backend.description, limits, all_rows(backend, limits, sizes), args.json)


if __name__ == "__main__":
    main()
