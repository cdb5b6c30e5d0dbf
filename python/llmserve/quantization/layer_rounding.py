"""Rounds one layer's linear weights by a method, once calibration has seen their inputs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from llmserve.quantization.activation_stats import InputStats
from llmserve.quantization.gptq import GptqOptions, gptq
from llmserve.quantization.layer_plan import (
    LayerPlan,
    LinearGroup,
    LinearSource,
    Tensors,
    fold,
)
from llmserve.quantization.number_formats import MAX_E4M3, Floats
from llmserve.quantization.schemes import Scheme
from llmserve.quantization.smoothing import awq_factors, output_error, smoothquant_factors
from llmserve.quantization.weight_grid import (
    Quantized,
    round_to,
    scales_of,
    search_scales,
    shared_global_scale,
)
from llmserve.quantization.workers import Workers

FEW_TOKENS = 64  # an expert that saw fewer is named in the report


@dataclass(frozen=True, slots=True)
class RoundingOptions:
    """What a method does, apart from the scheme. alpha is SmoothQuant's."""

    method: str
    scale_dtype: str
    alpha: float = 0.8
    gptq: GptqOptions = field(default_factory=GptqOptions)
    observer: str = "percentile"
    percentile: float = 99.99

    @property
    def has_moments(self) -> bool:
        """Whether the inputs' outer products are summed."""
        return "gptq" in self.method or self.method == "awq"


@dataclass(slots=True)
class RoundedLayer:
    """weights by name without ".weight"; input_scales of static activations; errors are relative,
    |dW x|^2 / |W x|^2, or |dW|^2 / |W|^2 where no inputs were seen; notes for people."""

    weights: dict[str, Quantized] = field(default_factory=dict)
    input_scales: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def join(self, other: "RoundedLayer") -> None:
        """Takes in what was rounded of other linear layers."""
        self.weights |= other.weights
        self.input_scales |= other.input_scales
        self.errors |= other.errors
        self.notes += other.notes


def round_layer(
    plan: LayerPlan,
    tensors: Tensors,
    dtypes: Mapping[str, str],
    stats: Mapping[str, InputStats],
    schemes: Mapping[str, Scheme],
    options: RoundingOptions,
    workers: Workers,
) -> RoundedLayer:
    """Quantizes the layers that `schemes` names, by name without ".weight"; `tensors` are changed
    where factors are folded. `stats` are by role of the group, or by name of another layer, and
    empty for "rtn"."""
    out = RoundedLayer()
    factors = {}
    for group in plan.groups:
        factor = _factor(plan, group, tensors, stats.get(group.role), schemes, options)
        if factor is not None:
            factors[group.role] = fold(group, factor, tensors, dtypes)
    tasks = []
    for group in plan.groups:
        names = [name for name in group.names if name in schemes]
        if not names:
            continue
        seen = stats.get(group.role)
        factor = factors.get(group.role)
        _set_input_scales(out, names, schemes, seen, factor, options)
        if seen is not None and factor is not None:
            seen = seen.scaled(factor)
        for scheme in {schemes[name].name: schemes[name] for name in names}.values():
            members = [name for name in names if schemes[name].name == scheme.name]
            tasks.append((members, seen, scheme))
    for name in plan.others:
        if name in schemes:
            tasks.append(([name], stats.get(name), schemes[name]))
            if options.method != "rtn" and name not in stats:
                out.notes.append(f"{name}: no inputs are seen here; rounded to nearest")
    out.notes += _expert_notes(plan, stats, schemes, options)
    # The largest first, so that no thread waits for it alone.
    tasks.sort(key=lambda task: -sum(tensors[f"{name}.weight"].size for name in task[0]))
    for part in workers.map(lambda task: _round_group(*task, tensors, options), tasks):
        out.join(part)
    return out


def _expert_notes(
    plan: LayerPlan,
    stats: Mapping[str, InputStats],
    schemes: Mapping[str, Scheme],
    options: RoundingOptions,
) -> list[str]:
    """Which experts of the plan saw no token, or few."""
    groups = [g for g in plan.expert_groups if any(name in schemes for name in g.names)]
    if options.method == "rtn" or not groups:
        return []
    rows = {g.expert: stats[g.role].num_rows if g.role in stats else 0 for g in groups}
    unseen = [expert for expert, count in rows.items() if count == 0]
    few = {expert: count for expert, count in rows.items() if 0 < count < FEW_TOKENS}
    notes = []
    where = f"{plan.prefix.removesuffix('.')}: of {plan.num_experts} experts"
    if unseen:
        numbers = ", ".join(map(str, unseen))
        notes.append(f"{where} no token came to {numbers}; rounded to nearest")
    if few:
        numbers = ", ".join(f"{expert} ({count})" for expert, count in few.items())
        notes.append(f"{where} fewer than {FEW_TOKENS} tokens came to {numbers}")
    return notes


def _factor(
    plan: LayerPlan,
    group: LinearGroup,
    tensors: Tensors,
    stats: InputStats | None,
    schemes: Mapping[str, Scheme],
    options: RoundingOptions,
) -> Floats | None:
    """What the inputs are to be divided by; None: nothing."""
    if stats is None or stats.num_rows == 0 or group.source is None:
        return None
    touched = list(group.names)
    if isinstance(group.source, LinearSource):
        touched.append(group.source.name)
    if not all(name in schemes for name in touched):
        return None  # floats that stay would have to be rounded again
    weights = [tensors[weight] for weight in group.weights]
    if options.method == "awq":
        factor, ratio = awq_factors(
            weights, stats, schemes[group.names[0]].grid, options.scale_dtype
        )
        return None if ratio < 0 else factor
    if options.method.startswith("smoothquant"):
        return smoothquant_factors(weights, stats, options.alpha)
    return None


def _set_input_scales(
    out: RoundedLayer,
    names: list[str],
    schemes: Mapping[str, Scheme],
    stats: InputStats | None,
    factor: Floats | None,
    options: RoundingOptions,
) -> None:
    activations = schemes[names[0]].activations
    if activations is None or not activations.is_static or stats is None:
        return
    if factor is None and stats.histogram is not None:
        largest = stats.histogram.amax(options.observer, options.percentile)
    else:  # a histogram of single elements says nothing of them once channels are divided
        largest = float((stats.largest / (1 if factor is None else factor)).max())
    steps = 127 if activations.kind == "int" else MAX_E4M3
    for name in names:
        out.input_scales[name] = max(largest, 1e-6) / steps


def _round_group(
    names: list[str],
    stats: InputStats | None,
    scheme: Scheme,
    tensors: Tensors,
    options: RoundingOptions,
) -> RoundedLayer:
    """Weights that read the same inputs, as one."""
    out = RoundedLayer()
    weights = [tensors[f"{name}.weight"] for name in names]
    for name, weight in zip(names, weights, strict=True):
        scheme.grid.check_fits(f"{name}.weight", weight.shape[1])
    stacked = np.concatenate(weights) if len(weights) > 1 else weights[0]
    if scheme.grid.is_block and len(weights) > 1:  # blocks end where a tensor does
        for name in names:
            out.join(_round_group([name], stats, scheme, tensors, options))
        return out
    rounded = _round(out, names, stacked, stats, scheme, options)
    change = rounded.values() - stacked
    has_inputs = stats is not None and stats.moments.size > 0 and stats.num_rows > 0
    begin = 0
    for name, weight in zip(names, weights, strict=True):
        end = begin + weight.shape[0]
        out.weights[name] = rounded.rows(begin, end)
        if has_inputs:
            assert stats is not None
            whole = output_error(weight, stats.moments)
            out.errors[name] = output_error(change[begin:end], stats.moments) / max(whole, 1e-30)
        else:
            whole = float(np.square(weight, dtype=np.float64).sum())
            lost = float(np.square(change[begin:end], dtype=np.float64).sum())
            out.errors[name] = lost / max(whole, 1e-30)
        begin = end
    return out


def _round(
    out: RoundedLayer,
    names: list[str],
    weight: Floats,
    stats: InputStats | None,
    scheme: Scheme,
    options: RoundingOptions,
) -> Quantized:
    grid, dtype = scheme.grid, options.scale_dtype
    whole = shared_global_scale([weight]) if grid.kind == "nvfp4" else None
    if stats is not None and stats.num_rows == 0:
        out.notes.append(f"{', '.join(names)}: no token came here; rounded to nearest")
        stats = None
    if stats is not None and stats.moments.size and "gptq" in options.method:
        result = gptq(weight, stats.moments, grid, dtype, options.gptq, global_scale=whole)
        if result is not None:
            quantized, damp = result
            if damp > options.gptq.damp:
                out.notes.append(f"{', '.join(names)}: damp raised to {damp:g}")
            return quantized
        out.notes.append(f"{', '.join(names)}: no Cholesky factor; rounded to nearest")
    if stats is not None and options.method == "awq":
        scales = search_scales(weight, grid, dtype, stats.moments, global_scale=whole)
    else:
        scales = scales_of(weight, grid, dtype, global_scale=whole)
    return round_to(weight, grid, scales)
