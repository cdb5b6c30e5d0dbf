"""GPTQ: rounds a weight column by column, each time moving what it lost into the columns to come.

Source: Frantar et al. 2023, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", algorithm 1. Act order is static: columns go by the size of their inputs, groups and
their scales stay those of the weight as it lies, so that no order has to be stored.
"""

from dataclasses import dataclass

import numpy as np

from llmserve.quantization.grids import Grid
from llmserve.quantization.number_formats import Floats
from llmserve.quantization.schemes import DAMP
from llmserve.quantization.weight_grid import (
    Quantized,
    decode,
    encode,
    group_of,
    reciprocal,
    search_scales,
)

_BLOCK = 128  # columns whose losses reach the later ones together
_SUB_BLOCK = 16  # of these, columns that reach the rest of the block together
_TRIANGLE = 256  # inverted at once


@dataclass(frozen=True, slots=True)
class GptqOptions:
    """damp is the share of the mean diagonal that is added to it, raised tenfold, at most to 1,
    until the matrix has a Cholesky factor."""

    damp: float = DAMP
    act_order: bool = True


def inverse_factor(moments: Floats) -> Floats:
    """U, upper, with U^T U = H^-1, of a positive definite H [K, K]. Raises LinAlgError."""
    # With P the reversal, P H P = L L^T. So R = P L P is upper, H = R R^T, and U = R^-1.
    lower = np.linalg.cholesky(moments[::-1, ::-1])
    return _invert_upper(np.ascontiguousarray(lower[::-1, ::-1]))


def _invert_upper(upper: Floats) -> Floats:
    k = upper.shape[0]
    if k <= _TRIANGLE:
        return np.triu(np.linalg.inv(upper))
    half = k // 2
    out = np.zeros_like(upper)
    out[:half, :half] = _invert_upper(upper[:half, :half])
    out[half:, half:] = _invert_upper(upper[half:, half:])
    out[:half, half:] = -out[:half, :half] @ (upper[:half, half:] @ out[half:, half:])
    return out


def damped_factor(moments: Floats, damp: float) -> tuple[Floats, float] | None:
    """The factor of H plus damp times its mean diagonal, and the damp that it took; None where no
    damp up to 1 gives one."""
    mean = float(np.mean(np.diag(moments)))
    if not np.isfinite(mean) or mean <= 0:
        return None
    while damp <= 1:
        try:
            damped = moments.copy()
            damped[np.diag_indices_from(damped)] += np.float32(damp * mean)
            factor = inverse_factor(damped)
            if np.isfinite(factor).all():
                return factor, damp
        except np.linalg.LinAlgError:
            pass
        damp *= 10
    return None


def gptq(
    weight: Floats,
    moments: Floats,
    grid: Grid,
    scale_dtype: str,
    options: GptqOptions,
    *,
    global_scale: float | None = None,
) -> tuple[Quantized, float] | None:
    """A weight [N, K] on its grid, given H [K, K], the sum of its inputs' outer products, and the
    damp that it took. None where H has no factor: the caller rounds to nearest, and says so."""
    diagonal = np.diag(moments)
    is_dead = diagonal == 0  # no input ever came: its weights are free
    moments = moments.copy()
    moments[is_dead, is_dead] = 1
    weight = np.where(is_dead, np.float32(0), weight)
    scales = search_scales(weight, grid, scale_dtype, moments, global_scale=global_scale)
    k = weight.shape[1]
    order = np.argsort(-diagonal, kind="stable") if options.act_order else np.arange(k)
    factored = damped_factor(moments[np.ix_(order, order)], options.damp)
    if factored is None:
        return None
    factor, damp = factored
    columns = np.ascontiguousarray(weight.T[order])  # [K, N]
    group = group_of(grid, k)[order]
    scale = np.ascontiguousarray(scales.effective().T)  # [G, N]
    inverse = reciprocal(scale)
    zero = None if scales.zero is None else np.ascontiguousarray(scales.zero.T)
    codes = np.empty(columns.shape, np.int8 if grid.kind == "int" else np.uint8)
    for begin in range(0, k, _BLOCK):
        end = min(begin + _BLOCK, k)
        lost = np.empty((end - begin, columns.shape[1]), np.float32)
        for first in range(begin, end, _SUB_BLOCK):
            last = min(first + _SUB_BLOCK, end)
            for j in range(first, last):
                g = group[j]
                offset = 0 if zero is None else zero[g]
                code = encode(grid, columns[j] * inverse[g], offset)
                codes[order[j]] = code
                error = (columns[j] - decode(grid, code, offset) * scale[g]) / factor[j, j]
                lost[j - begin] = error
                columns[j + 1 : last] -= np.outer(factor[j, j + 1 : last], error)
            columns[last:end] -= factor[first:last, last:end].T @ lost[first - begin : last - begin]
        columns[end:] -= factor[begin:end, end:].T @ lost
    return Quantized(grid, np.ascontiguousarray(codes.T), scales), damp
