"""GPTQ, AWQ, SmoothQuant and scales, against what they minimise, on small matrices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from llmserve.quantization.activation_stats import Histogram, InputStats
from llmserve.quantization.gptq import GptqOptions, damped_factor, gptq, inverse_factor
from llmserve.quantization.grids import Grid
from llmserve.quantization.layer_plan import (
    LayerPlan,
    LinearGroup,
    LinearSource,
    NormSource,
    fold,
)
from llmserve.quantization.layer_rounding import RoundingOptions, round_layer
from llmserve.quantization.number_formats import rounded
from llmserve.quantization.schemes import find_scheme
from llmserve.quantization.smoothing import awq_factors, output_error, smoothquant_factors
from llmserve.quantization.weight_grid import CLIPS, round_to, scales_of, search_scales
from llmserve.quantization.workers import Workers

INT4 = Grid("int", 4, 128)
WHOLE_INT4 = Grid("int", 4)
GRIDS = [
    INT4,
    WHOLE_INT4,
    Grid("int", 4, 32, is_symmetric=False),
    Grid("int", 8),
    Grid("int", 3, 64),
    Grid("fp8", 8),
    Grid("fp8", 8, 128, is_block=True),
    Grid("nvfp4", 4, 16),
    Grid("mxfp4", 4, 32),
]


def grid_name(grid: Grid) -> str:
    return f"{grid.kind}{grid.bits}-{grid.group_size}"


def inputs(k: int, rows: int = 400, seed: int = 1) -> np.ndarray:
    """[rows, K], correlated, with a few large channels."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((k, k)) / np.sqrt(k)
    x = rng.standard_normal((rows, k)) @ (mix + np.eye(k))
    x[:, ::17] *= 8
    return x.astype(np.float32)


def weight_of(n: int, k: int, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


def stats_of(x: np.ndarray) -> InputStats:
    stats = InputStats.make(x.shape[1], has_moments=True, has_histogram=True)
    with Workers(2) as workers:
        for part in np.array_split(x, 3):
            stats.add(part, workers)
    stats.finish()
    return stats


def plain_gptq(weight: np.ndarray, moments: np.ndarray, scale: float, damp: float) -> np.ndarray:
    """One row, as the paper's equations 2 and 3 have it: the inverse is taken anew for the columns
    that are left, and no factor is used. Codes."""
    w = weight.astype(np.float64).copy()
    h = moments.astype(np.float64)
    h = h + np.eye(len(w)) * damp * np.mean(np.diag(h))
    codes = np.zeros(len(w), int)
    for j in range(len(w)):
        inverse = np.linalg.inv(h[j:, j:])
        codes[j] = np.clip(np.rint(w[j] / scale), -8, 7)
        error = w[j] - codes[j] * scale
        w[j:] -= error / inverse[0, 0] * inverse[0]
    return codes


def test_gptq_is_the_papers_greedy_step_by_step() -> None:
    for seed in range(20):
        x = inputs(8, 64, seed)
        weight = weight_of(1, 8, seed)
        result = gptq(weight, x.T @ x, WHOLE_INT4, "float32", GptqOptions(0.01, act_order=False))
        assert result is not None
        quantized, damp = result
        scale = float(quantized.scales.scale[0, 0])
        expected = plain_gptq(weight[0], x.T @ x, scale, 0.01)
        assert damp == 0.01
        assert quantized.codes[0].tolist() == expected.tolist()


def test_gptq_comes_near_the_best_of_all_roundings() -> None:
    """Of 8 columns, each at one of the four integers around it: 65,536 candidates a row."""
    gptq_loss = nearest_loss = best_loss = 0.0
    for seed in range(12):
        x = inputs(8, 64, seed)
        moments = x.T @ x
        weight = weight_of(1, 8, seed)
        result = gptq(weight, moments, WHOLE_INT4, "float32", GptqOptions())
        assert result is not None
        scales = result[0].scales
        scale = float(scales.scale[0, 0])
        around = np.array(list(itertools.product((-1, 0, 1, 2), repeat=8)), np.float32)
        change = np.clip(np.floor(weight / scale) + around, -8, 7) * scale - weight
        best_loss += float(np.einsum("nk,nk->n", change @ moments, change).min())
        nearest = round_to(weight, WHOLE_INT4, scales)
        nearest_loss += output_error(nearest.values() - weight, moments)
        gptq_loss += output_error(result[0].values() - weight, moments)
    assert best_loss <= gptq_loss < 0.6 * nearest_loss
    assert gptq_loss < 2 * best_loss


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(
    "grid", GRIDS, ids=lambda grid: f"{grid.kind}{grid.bits}-{grid.group_size}"
)
def test_gptq_loses_less_than_rounding_to_nearest_on_every_grid(
    grid: Grid, act_order: bool
) -> None:
    x = inputs(384)
    moments = x.T @ x
    weight = weight_of(130, 384)
    result = gptq(weight, moments, grid, "bfloat16", GptqOptions(act_order=act_order))
    assert result is not None
    nearest = round_to(weight, grid, scales_of(weight, grid, "bfloat16"))
    lost = output_error(result[0].values() - weight, moments)
    assert lost < 0.8 * output_error(nearest.values() - weight, moments)


def test_the_factor_is_of_the_inverse() -> None:
    x = inputs(300)
    moments = x.T @ x + np.eye(300, dtype=np.float32)
    factor = inverse_factor(moments)
    assert np.array_equal(factor, np.triu(factor))
    assert np.allclose(factor.T @ factor @ moments, np.eye(300), atol=2e-3)


def test_dead_inputs_get_weights_of_zero() -> None:
    x = inputs(128)
    x[:, [3, 77]] = 0
    result = gptq(weight_of(4, 128), x.T @ x, INT4, "float32", GptqOptions())
    assert result is not None
    assert not result[0].codes[:, [3, 77]].any()


def test_damp_is_raised_until_there_is_a_factor_and_none_is_told() -> None:
    rank_one = np.ones((4, 4), np.float32)
    assert damped_factor(rank_one, 0.01) is not None
    indefinite = np.diag([1.0, 1.0, -0.05, 1.0]).astype(np.float32)
    factored = damped_factor(indefinite, 0.01)
    assert factored is not None
    assert factored[1] == pytest.approx(0.1)
    assert damped_factor(np.diag([1.0, -9.0, 9.0, 1.0]).astype(np.float32), 0.01) is None
    assert damped_factor(np.zeros((3, 3), np.float32), 0.01) is None


@pytest.mark.parametrize(
    "grid", GRIDS, ids=lambda grid: f"{grid.kind}{grid.bits}-{grid.group_size}"
)
def test_searched_scales_lose_no_more_than_any_clip(grid: Grid) -> None:
    x = inputs(256)
    moments = x.T @ x
    weight = weight_of(6, 256)
    if grid.group_size:  # what the search knows of the inputs: the blocks on the diagonal
        group = np.arange(256) // grid.group_size
        moments = moments * (group[:, None] == group)
    else:
        moments = np.diag(np.diag(moments))
    best = search_scales(weight, grid, "float32", moments)
    loss = output_error(round_to(weight, grid, best).values() - weight, moments)
    clips = (1.0,) if grid.is_block or grid.kind == "mxfp4" else CLIPS
    for clip in clips:
        scales = scales_of(weight, grid, "float32", clip=clip)
        other = output_error(round_to(weight, grid, scales).values() - weight, moments)
        assert loss <= other * 1.0001


def test_symmetric_scales_are_those_of_compressed_tensors() -> None:
    weight = np.array([[1.5, -3.0, 0, 0]], np.float32)
    assert scales_of(weight, WHOLE_INT4, "float32").scale[0, 0] == pytest.approx(3 / 7.5)
    assert scales_of(weight, Grid("int", 8), "float32").scale[0, 0] == pytest.approx(3 / 127.5)
    assert scales_of(weight, Grid("fp8", 8), "float32").scale[0, 0] == pytest.approx(3 / 448)


def test_a_group_of_zeros_has_no_scale_and_stays_zero() -> None:
    for grid in GRIDS:
        weight = np.zeros((2, 384), np.float32)
        weight[0, 0] = 1.0
        values = round_to(weight, grid, scales_of(weight, grid, "bfloat16")).values()
        assert np.isfinite(values).all()
        assert values[0, 0] == pytest.approx(1, rel=0.15)  # 3 bits reach 3 of 3.5
        assert np.count_nonzero(values) == 1


def test_moments_are_the_sum_of_outer_products_whatever_the_panels() -> None:
    x = inputs(600, 2400)
    stats = stats_of(x)
    assert np.allclose(stats.moments, x.T @ x, rtol=1e-4, atol=0.5)
    assert stats.num_rows == 2400
    assert np.array_equal(stats.largest, np.abs(x).max(0))
    factor = np.linspace(0.5, 2, 600).astype(np.float32)
    scaled = stats.scaled(factor)
    assert np.allclose(scaled.moments, (x / factor).T @ (x / factor), rtol=1e-3, atol=0.5)


def test_moments_of_few_rows_lean_on_their_mean_diagonal() -> None:
    x = inputs(600, 50)
    moments = x.T @ x
    more = 0.3 * 600 / 50 * np.diag(moments).mean()
    expected = moments + more * np.eye(600, dtype=np.float32)
    assert np.allclose(stats_of(x).moments, expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(("decay", "share"), [(0.5, 1.0), (1.0, 0.75), (1.5, 0.4)])
def test_few_rows_never_make_gptq_worse_than_rounding_to_nearest(
    decay: float, share: float
) -> None:
    """On inputs that calibration has not seen: experts see few. Spectra k^-decay and some noise."""
    k = 256
    rng = np.random.default_rng(5)
    turn, _ = np.linalg.qr(rng.standard_normal((k, k)))
    size = np.arange(1, k + 1) ** (-decay / 2)

    def draw(rows: int) -> np.ndarray:
        noise = 0.3 * size.mean() * rng.standard_normal((rows, k))
        return (rng.standard_normal((rows, k)) * size @ turn.T + noise).astype(np.float32)

    weight = weight_of(96, k)
    others = draw(4000)
    others = others.T @ others
    nearest = round_to(weight, INT4, scales_of(weight, INT4, "bfloat16")).values()
    worst = output_error(nearest - weight, others)
    for rows in (16, 128, 256, 900):
        result = gptq(weight, stats_of(draw(rows)).moments, INT4, "bfloat16", GptqOptions())
        assert result is not None
        assert output_error(result[0].values() - weight, others) / worst < share, rows


def test_awq_picks_factors_that_lose_less_than_none() -> None:
    x = inputs(256)
    weights = [weight_of(24, 256), weight_of(8, 256, 3)]
    factor, ratio = awq_factors(weights, stats_of(x), INT4, "bfloat16")
    assert 0 <= ratio < 1
    assert factor.shape == (256,)
    stacked = np.concatenate(weights)
    plain = round_to(stacked, INT4, scales_of(stacked, INT4, "bfloat16")).values() - stacked
    scaled = stacked * factor
    change = round_to(scaled, INT4, scales_of(scaled, INT4, "bfloat16")).values() / factor - stacked
    assert output_error(change, x.T @ x) < 0.7 * output_error(plain, x.T @ x)


def test_smoothquant_divides_by_the_papers_factor() -> None:
    x = inputs(64)
    x[:, 5] = 0
    weight = weight_of(10, 64)
    factor = smoothquant_factors([weight], stats_of(x), 0.8)
    assert factor[5] == 1
    expected = np.abs(x[:, 0]).max() ** 0.8 / np.abs(weight[:, 0]).max() ** 0.2
    assert factor[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_factor_folded_into_a_norm_keeps_the_function_in_its_own_dtype(offset: float) -> None:
    rng = np.random.default_rng(3)
    norm = rounded(rng.standard_normal(64).astype(np.float32), "bfloat16")
    norm[7] = -offset  # multiplies by 0
    tensors = {"n.weight": norm.copy(), "a.weight": weight_of(8, 64), "b.weight": weight_of(4, 64)}
    before = {name: value.copy() for name, value in tensors.items()}
    group = LinearGroup("up", ("a", "b"), NormSource("n", offset, has_bias=False))
    factor = np.exp(rng.standard_normal(64)).astype(np.float32)
    actual = fold(group, factor, tensors, {"n.weight": "bfloat16"})
    assert actual is not None
    assert actual == pytest.approx(np.where(np.arange(64) == 7, 1, factor), rel=0.08)
    assert np.array_equal(rounded(tensors["n.weight"], "bfloat16"), tensors["n.weight"])
    x = rng.standard_normal((5, 64)).astype(np.float32)
    for name in ("a.weight", "b.weight"):
        old = (x * (before["n.weight"] + offset)) @ before[name].T
        new = (x * (tensors["n.weight"] + offset)) @ tensors[name].T
        assert new == pytest.approx(old, rel=1e-4, abs=1e-4)


def test_a_factor_folded_into_the_layer_before_keeps_the_function() -> None:
    tensors = {
        "up.weight": weight_of(20, 6),
        "up.bias": weight_of(1, 20)[0],
        "down.weight": weight_of(3, 10, 4),
    }
    before = {name: value.copy() for name, value in tensors.items()}
    group = LinearGroup("down", ("down",), LinearSource("up", 10))
    factor = np.linspace(0.25, 4, 10).astype(np.float32)
    assert fold(group, factor, tensors, {}) is factor
    assert np.array_equal(tensors["up.weight"][:10], before["up.weight"][:10])

    def run(weights: dict[str, np.ndarray]) -> np.ndarray:
        x = np.arange(6, dtype=np.float32)
        up = weights["up.weight"] @ x + weights["up.bias"]
        return weights["down.weight"] @ (up[10:] * np.tanh(up[:10]))

    assert run(tensors) == pytest.approx(run(before), rel=1e-5)


def test_layers_of_other_kinds_are_calibrated_where_they_were_seen() -> None:
    x = inputs(128)
    tensors = {"seen.weight": weight_of(40, 128), "unseen.weight": weight_of(40, 128, 3)}
    plan = LayerPlan(0, "", (), ("seen", "unseen"))
    schemes = {name: find_scheme("int4") for name in plan.others}
    options = RoundingOptions("gptq", "bfloat16")
    with Workers(1) as workers:
        out = round_layer(plan, tensors, {}, {"seen": stats_of(x)}, schemes, options, workers)
    nearest = round_to(
        tensors["seen.weight"], INT4, scales_of(tensors["seen.weight"], INT4, "bfloat16")
    )
    change = output_error(nearest.values() - tensors["seen.weight"], x.T @ x)
    assert out.errors["seen"] < 0.7 * change / output_error(tensors["seen.weight"], x.T @ x)
    assert out.notes == ["unseen: no inputs are seen here; rounded to nearest"]


def test_a_group_that_no_token_reached_is_rounded_to_nearest_and_told() -> None:
    plan = LayerPlan(0, "", (LinearGroup("up", ("expert",)),))
    tensors = {"expert.weight": weight_of(8, 128)}
    nothing = InputStats.make(128, has_moments=True, has_histogram=False)
    schemes = {"expert": find_scheme("int4")}
    with Workers(1) as workers:
        out = round_layer(
            plan, tensors, {}, {"up": nothing}, schemes, RoundingOptions("gptq", "float32"), workers
        )
    weight = tensors["expert.weight"]
    expected = round_to(weight, INT4, scales_of(weight, INT4, "float32"))
    assert np.array_equal(out.weights["expert"].codes, expected.codes)
    assert out.notes == ["expert: no token came here; rounded to nearest"]


def test_a_histogram_grows_and_keeps_its_counts() -> None:
    histogram = Histogram()
    values = np.random.default_rng(1).standard_normal(50000).astype(np.float32)
    for part in (values * 0.01, values, values * 3):
        histogram.add(part)
    assert histogram.counts.sum() == 150000
    assert histogram.largest == pytest.approx(np.abs(values).max() * 3)
    assert histogram.limit >= histogram.largest
    everything = np.abs(np.concatenate([values * 0.01, values, values * 3]))
    got = histogram.amax("percentile", 99.0)
    assert got == pytest.approx(np.percentile(everything, 99), rel=0.01)
    assert histogram.amax("minmax") == histogram.largest


@pytest.mark.parametrize("observer", ["percentile", "entropy", "mse"])
def test_an_outlier_does_not_stretch_a_static_range(observer: str) -> None:
    histogram = Histogram()
    values = np.random.default_rng(1).standard_normal(200000).astype(np.float32)
    values[0] = 100
    histogram.add(values)
    amax = histogram.amax(observer, 99.99)
    assert 2 < amax < 60
    step = amax / 127
    error = values - np.clip(np.rint(values / step), -127, 127) * step
    wide = values - np.rint(values / (100 / 127)) * (100 / 127)
    assert np.median(np.abs(error)) < np.median(np.abs(wide)) / 1.5
