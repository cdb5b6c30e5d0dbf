"""What the benchmarks of ops have in common: a case, and arrays as the ops take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

SCALE_BYTES = 4  # of a row of 8-bit floats


@dataclass
class Case:
    """One op on one shape: run() does it once and must move num_bytes and do flops.

    check() is called after a first run() and says whether the op's results are right.
    """

    name: str
    run: Callable[[], object]
    num_bytes: int
    flops: int = 0
    form: str = "float32"  # what is multiplied
    fills_new_memory: bool = False
    check: Callable[[], bool] = lambda: True


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins with a cache line, as the engine's tensors do. NumPy's large arrays begin
    16 bytes behind one, so that every vector of 64 bytes lies in two."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return aligned(rng.standard_normal(shape, dtype=np.float32))


def empty(*shape: int) -> np.ndarray:
    """For an op's float32 results."""
    return aligned(np.empty(shape, np.float32))


def as_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32, or the upper half of it: bfloat16 by truncation, as uint16."""
    return x if dtype == "float32" else aligned((x.view(np.uint32) >> 16).astype(np.uint16))


def as_float(x: np.ndarray) -> np.ndarray:
    """The numbers of floats, of bfloat16, and of blocks of 8-bit floats [..., P, D + 4]: P rows of
    codes and then P scales (cache_part of csrc/kernels/ops.h)."""
    if x.dtype == np.float32:
        return x
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    *outer, block, row = x.shape
    width = row - SCALE_BYTES
    flat = x.reshape(*outer, block * row)
    codes = flat[..., : block * width].astype(np.uint32).reshape(*outer, block, width)
    scales = np.ascontiguousarray(flat[..., block * width :]).view(np.float32)
    # e4m3 is float32 with fewer bits and another bias.
    numbers = ((codes & 0x80) << 24 | (codes & 0x7F) << 20).view(np.float32) * np.float32(2.0**120)
    return numbers * scales[..., None]


def empty_cache(blocks: int, heads: int, block: int, dim: int, dtype: str) -> np.ndarray:
    """Keys or values of a paged cache [N, K, P, D] that holds zeros."""
    if dtype == "fp8":
        return aligned(np.zeros((blocks, heads, block, dim + SCALE_BYTES), np.uint8))
    element = np.uint16 if dtype == "bfloat16" else np.float32
    return aligned(np.zeros((blocks, heads, block, dim), element))


def in_layout(keys: np.ndarray, layout: str) -> np.ndarray:
    """Rows [N, K, P, D] as the engine's cache holds them (KeyLayout of csrc/kernels/ops.h)."""
    if layout == "rows":
        return keys
    n, heads, block, dim = keys.shape
    dim -= SCALE_BYTES if keys.dtype == np.uint8 else 0
    elements, scales = np.split(keys.reshape(n, heads, -1), [block * dim], axis=2)
    run = 4 // keys.itemsize
    tiles = elements.reshape(n, heads, block // 16, 16, dim // run, run)
    panels = tiles.swapaxes(3, 4).reshape(elements.shape)
    return np.concatenate([panels, scales], axis=2).reshape(keys.shape)


def agree(op: Callable[..., Any], one: Any, other: Any, *arrays: np.ndarray) -> bool:
    """Whether an op gives nearly the same on two backends, and leaves the same in its arrays."""
    results = []
    for backend in (one, other):
        copies = [array.copy() for array in arrays]
        results.append([op(backend, *copies), *copies])
    return all(
        a is b is None or np.allclose(a, b, rtol=1e-4, atol=1e-4)
        for a, b in zip(*results, strict=True)
    )
