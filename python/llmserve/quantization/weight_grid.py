"""What a quantized weight is: codes of a grid, scales of groups, and how floats are rounded to it.

Letters: N out, K in, G groups of a row.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from llmserve.quantization.grids import BLOCK, Grid
from llmserve.quantization.number_formats import (
    MAX_E2M1,
    MAX_E4M3,
    Array,
    Floats,
    e2m1_to_f32,
    e4m3_to_f32,
    e8m0_of,
    e8m0_to_f32,
    f32_to_e2m1,
    f32_to_e4m3,
    rounded,
)

_MAX_NVFP4 = MAX_E2M1 * MAX_E4M3
# Shares of the largest magnitude that a group's grid may end at: AutoAWQ's half way down.
CLIPS = tuple(1 - 0.05 * i for i in range(11))


def group_of(grid: Grid, k: int) -> Array:
    """[K]: the group of each element of a row."""
    return np.arange(k) // (grid.group_size or k)


def encode(grid: Grid, ratio: Floats, zero: Array | float = 0) -> Array:
    """Codes of values that have been divided by their scales: integers, or bytes of floats."""
    if grid.kind == "fp8":
        return f32_to_e4m3(ratio)
    if grid.kind == "int":
        return np.clip(np.rint(ratio) + zero, grid.lowest, grid.highest).astype(np.int8)
    return f32_to_e2m1(ratio)


def decode(grid: Grid, codes: Array, zero: Array | float = 0) -> Floats:
    """What encode() has made, still to be multiplied by scales."""
    if grid.kind == "fp8":
        return e4m3_to_f32(codes)
    if grid.kind == "int":
        return np.asarray(codes.astype(np.float32) - zero, np.float32)
    return e2m1_to_f32(codes)


@dataclass(slots=True)
class Scales:
    """Of a weight [N, K]: what its ratios are multiplied by.

    scale and zero are [N, G] f32, exactly as stored, which for nvfp4 is times global_scale.
    """

    scale: Floats
    zero: Floats | None = None
    global_scale: float | None = None

    def effective(self) -> Floats:
        """[N, G]: what a decoded code is multiplied by."""
        if self.global_scale is None:
            return self.scale
        return np.asarray(self.scale / np.float32(self.global_scale))

    def rows(self, begin: int, end: int) -> "Scales":
        """Of rows [begin, end)."""
        zero = None if self.zero is None else self.zero[begin:end]
        return dataclasses.replace(self, scale=self.scale[begin:end], zero=zero)


@dataclass(slots=True)
class Quantized:
    """A weight [N, K] on a grid: codes [N, K] and their scales."""

    grid: Grid
    codes: Array
    scales: Scales

    def values(self) -> Floats:
        """[N, K] f32: what it stands for."""
        k = self.codes.shape[1]
        group = group_of(self.grid, k)
        zero = 0 if self.scales.zero is None else self.scales.zero[:, group]
        return decode(self.grid, self.codes, zero) * self.scales.effective()[:, group]

    def rows(self, begin: int, end: int) -> "Quantized":
        """Rows [begin, end)."""
        return Quantized(self.grid, self.codes[begin:end], self.scales.rows(begin, end))


def reciprocal(scale: Floats) -> Floats:
    """1 / scale, and 0 where that is no number: the scale of a group of zeros."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scale
    return np.asarray(np.where(np.isfinite(inverse), inverse, np.float32(0)).astype(np.float32))


def grouped(values: Floats, grid: Grid) -> Floats:
    """[N, K] as [N, G, K / G], the last group filled up with zeros."""
    n, k = values.shape
    size = grid.group_size or k
    missing = -k % size
    if missing:
        values = np.pad(values, ((0, 0), (0, missing)))
    return values.reshape(n, -1, size)


def shared_global_scale(weights: list[Floats]) -> float:
    """NVFP4's, of weights that one product multiplies: engines that fuse them expect one."""
    largest = max(float(np.max(np.abs(weight), initial=0)) for weight in weights)
    return _MAX_NVFP4 / largest if largest > 0 else 1.0


def scales_of(
    weight: Floats,
    grid: Grid,
    scale_dtype: str,
    *,
    clip: Floats | float = 1.0,
    global_scale: float | None = None,
) -> Scales:
    """The scales by which a weight [N, K] spans its grid, or `clip` [N, G] of it, as `scale_dtype`
    holds them. Symmetric integers: largest / ((2^b - 1) / 2), as compressed-tensors has it."""
    groups = grouped(weight, grid)
    if grid.kind == "int" and not grid.is_symmetric:
        low = np.minimum(groups.min(-1), 0) * clip
        high = np.maximum(groups.max(-1), 0) * clip
        scale = rounded((high - low) / np.float32((1 << grid.bits) - 1), scale_dtype)
        zero = grid.lowest - np.rint(low * reciprocal(scale))
        return Scales(scale, np.clip(zero, grid.lowest, grid.highest).astype(np.float32))
    largest = np.abs(groups).max(-1)
    if grid.is_block:
        n = largest.shape[0]
        padded = np.pad(largest, ((0, -n % BLOCK), (0, 0)))
        blocks = padded.reshape(-1, BLOCK, largest.shape[1]).max(1)
        largest = np.repeat(blocks, BLOCK, 0)[:n]
    largest = (largest * clip).astype(np.float32)
    if grid.kind == "int":
        return Scales(rounded(largest / np.float32(((1 << grid.bits) - 1) / 2), scale_dtype))
    if grid.kind == "fp8":
        return Scales(rounded(largest / np.float32(MAX_E4M3), scale_dtype))
    if grid.kind == "nvfp4":
        whole = shared_global_scale([weight]) if global_scale is None else global_scale
        whole = float(np.float32(whole))
        ratio = largest / np.float32(MAX_E2M1) * np.float32(whole)
        return Scales(e4m3_to_f32(f32_to_e4m3(ratio)), None, whole)
    _, exponent = np.frexp(largest)  # largest = m * 2^exponent with m in [0.5, 1)
    # MX 1.0, section 6.3, takes the exponent of the largest less that of 6: what is above 6 is cut.
    return Scales(e8m0_to_f32(e8m0_of(np.where(largest > 0, exponent - 3, -127))))


def round_to(weight: Floats, grid: Grid, scales: Scales) -> Quantized:
    """Each element to the nearest of its grid."""
    group = group_of(grid, weight.shape[1])
    zero = 0 if scales.zero is None else scales.zero[:, group]
    ratio = weight * reciprocal(scales.effective())[:, group]
    return Quantized(grid, encode(grid, ratio, zero), scales)


def search_scales(
    weight: Floats,
    grid: Grid,
    scale_dtype: str,
    moments: Floats | None,
    *,
    global_scale: float | None = None,
) -> Scales:
    """Scales whose grids end where rounding costs least: for each row and group the clip c of CLIPS
    that minimises d H d^T. d is what rounding changes. H is the group's own block of `moments`
    [K, K] of the inputs, of a whole row their diagonal, and the identity for None. After AWQ's
    clipping (Lin et al. 2023). Blocks and MXFP4 have too few scales to choose."""
    plain = scales_of(weight, grid, scale_dtype, global_scale=global_scale)
    if grid.is_block or grid.kind == "mxfp4":
        return plain
    n, k = weight.shape
    groups = grid.num_groups(k)
    size = grid.group_size or k
    best = np.full((n, groups), np.inf, np.float32)
    chosen = np.ones((n, groups), np.float32)
    blocks = None
    if moments is not None and grid.group_size:
        blocks = np.stack([moments[i : i + size, i : i + size] for i in range(0, k, size)])
    for clip in CLIPS:
        scales = scales_of(weight, grid, scale_dtype, clip=clip, global_scale=global_scale)
        change = round_to(weight, grid, scales).values() - weight
        if moments is None:
            loss = np.square(grouped(change, grid)).sum(-1)
        elif blocks is None:
            loss = (np.square(change) @ np.diag(moments))[:, None]
        else:
            by_group = change.reshape(n, groups, size).transpose(1, 0, 2)
            loss = np.einsum("gnk,gnk->gn", by_group @ blocks, by_group).T
        is_better = loss < best
        best = np.where(is_better, loss, best)
        chosen = np.where(is_better, np.float32(clip), chosen)
    return scales_of(weight, grid, scale_dtype, clip=chosen, global_scale=global_scale)
