"""Factors that move size between activations and weights before rounding: AWQ and SmoothQuant.

y = W x = (W s) (x / s). Dividing x by s is left to what makes x: the norm before, or the linear
layer before, whose rows are divided. Sources: Lin et al. 2023, "AWQ", section 3.2; Xiao et al.
2022, "SmoothQuant", equation 4.
"""

import numpy as np

from llmserve.quantization.activation_stats import InputStats
from llmserve.quantization.grids import Grid
from llmserve.quantization.number_formats import Floats
from llmserve.quantization.weight_grid import grouped, round_to, scales_of

_NUM_RATIOS = 20
_LEAST = 1e-4


def output_error(change: Floats, moments: Floats) -> float:
    """sum |change x|^2 over the inputs whose outer products `moments` [K, K] sums up."""
    return float(np.einsum("nk,nk->", change @ moments, change, dtype=np.float64))


def awq_factors(
    weights: list[Floats], stats: InputStats, grid: Grid, scale_dtype: str
) -> tuple[Floats, float]:
    """s [K] for weights [N_i, K] that read the same x, and the ratio that gave it: the one of
    0, 1/20 … 19/20 after which rounding to nearest changes the outputs least. Ratio 0 with
    weights alone may still scale; no scaling at all is also tried, and is ratio -1."""
    stacked = np.concatenate(weights)
    mean_x = stats.sum_magnitude / np.float32(max(stats.num_rows, 1))
    groups = np.abs(grouped(stacked, grid))
    share = groups / np.maximum(groups.max(-1, keepdims=True), np.float32(1e-12))
    mean_w = share.reshape(stacked.shape[0], -1)[:, : stacked.shape[1]].mean(0)
    ones = np.ones_like(mean_x)
    best, chosen, ratio_of_it = np.inf, ones, -1.0
    for ratio in [-1.0, *(i / _NUM_RATIOS for i in range(_NUM_RATIOS))]:
        factor = ones
        if ratio >= 0:
            factor = mean_x**ratio / (mean_w ** (1 - ratio) + np.float32(1e-4))
            factor = np.maximum(factor, np.float32(_LEAST))
            factor = (factor / np.sqrt(factor.max() * factor.min())).astype(np.float32)
        scaled = stacked * factor
        scales = scales_of(scaled, grid, scale_dtype)
        change = round_to(scaled, grid, scales).values() / factor - stacked
        error = output_error(change, stats.moments)
        if error < best:
            best, chosen, ratio_of_it = error, factor, ratio
    return chosen, ratio_of_it


def smoothquant_factors(weights: list[Floats], stats: InputStats, alpha: float) -> Floats:
    """s [K] = max |x|^alpha / max |w|^(1 - alpha), 1 for inputs that are always 0."""
    largest_w = np.max([np.abs(weight).max(0) for weight in weights], axis=0)
    largest_x = stats.largest
    factor = np.maximum(largest_x, np.float32(1e-5)) ** alpha / (
        np.maximum(largest_w, np.float32(1e-5)) ** (1 - alpha)
    )
    factor = np.where((largest_x > 0) & (largest_w > 0), factor, 1)
    return np.clip(factor, 1e-3, 1e3).astype(np.float32)
