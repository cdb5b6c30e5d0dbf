"""What the benchmarks of a GPU write: rows beside what the GPU was measured to do."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from core_testing import testing


@dataclass
class Row:
    """One measurement; the share is of the limit that it comes closer to."""

    name: str
    us: float
    gb_per_s: float
    gflop_per_s: float
    share_of_gpu: float
    tokens_per_s: float = 0.0


@dataclass
class Limits:
    """Bytes read and written by copies within the GPU's memory, and a large bf16 product."""

    gb_per_s: float
    gflop_per_s: float

    def row(
        self, name: str, seconds: float, num_bytes: float, flops: float = 0, tokens: float = 0
    ) -> Row:
        rates = num_bytes / seconds / 1e9, flops / seconds / 1e9
        share = max(rates[0] / self.gb_per_s, rates[1] / self.gflop_per_s)
        return Row(name, seconds * 1e6, *rates, share, tokens / seconds)


def read_arguments(doc: str, name: str = "", choices: Collection[str] = ()) -> argparse.Namespace:
    """Those of the command line, one of this name first, if any. Ends the program where no GPU can
    be had."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    if name:
        parser.add_argument(name, choices=choices)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--small", action="store_true", help="so little that an emulator can do it")
    arguments = parser.parse_args()
    if reason := testing.unavailable_reason("cuda"):
        sys.exit(f"no CUDA here: {reason}")
    return arguments


def seconds_of(backend: Any, run: Callable[[], object], target: float = 0.1) -> float:
    """Seconds a call of queued calls, the best of three rounds."""
    run()
    backend.synchronize()
    start = time.perf_counter()
    run()
    backend.synchronize()
    count = max(1, min(2000, int(target / max(1e-6, time.perf_counter() - start))))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(count):
            run()
        backend.synchronize()
        best = min(best, (time.perf_counter() - start) / count)
    return best


def bf16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal numbers as bf16 bits, truncated; drawn once and repeated: time on a GPU is dear."""
    draws = rng.standard_normal(min(math.prod(shape), 4_194_301), dtype=np.float32)
    return np.resize((draws.view(np.uint32) >> 16).astype(np.uint16), shape)


def measure_limits(backend: Any, num_bytes: int, side: int) -> Limits:
    """Copies of `num_bytes`, far more than any cache holds, and a product of `side` cubed."""
    rng = np.random.default_rng(0)
    cache = [backend.empty_device((2, 1, 1, num_bytes // 4), "float32") for _ in range(2)]
    seconds = seconds_of(backend, lambda: backend.copy_blocks([(0, 1)], *cache))
    gb_per_s = 4 * num_bytes / seconds / 1e9  # keys and values, read and written
    x = backend.empty_device((side, side), "float32")
    out = backend.empty_device((side, side), "float32")
    weight = backend.pack_linear([bf16(rng, side, side)], "bfloat16")
    seconds = seconds_of(backend, lambda: backend.linear(x, weight, out=out))
    return Limits(gb_per_s, 2 * side**3 / seconds / 1e9)


def measure_device(sizes: Any) -> tuple[str, Limits]:
    """The GPU's description and limits, by `sizes.copy_bytes` and `sizes.product`; its memory is
    given back."""
    backend = testing.make_backend("cuda")
    return backend.description, measure_limits(backend, sizes.copy_bytes, sizes.product)


def torch_device(is_small: bool) -> str:
    """Empty, and why on the standard output, where there is nothing to compare with."""
    try:
        import torch
    except ImportError:
        print("torch is not installed: nothing to compare with")
        return ""
    if torch.cuda.is_available():
        return "cuda"
    if is_small:
        return "cpu"
    print("this torch has no CUDA: nothing to compare with")
    return ""


def report(device: str, limits: Limits, rows: Iterable[Row], path: Path | None) -> None:
    """Prints each row as it comes, and writes the file anew, so that a run cut short leaves what it
    has."""
    print(f"{device}\nlimits: {limits}")
    done: list[Row] = []
    for row in rows:
        done.append(row)
        print(
            f"{row.name:64} {row.us:12.1f} us {row.gb_per_s:8.1f} GB/s "
            f"{row.gflop_per_s:9.1f} GFLOP/s {row.share_of_gpu:6.1%}"
            + (f" {row.tokens_per_s:9.1f} tokens/s" if row.tokens_per_s else "")
        )
        if path:
            result = {"device": device, "limits": asdict(limits)}
            path.write_text(json.dumps({**result, "rows": [asdict(r) for r in done]}, indent=1))
