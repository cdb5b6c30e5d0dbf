"""Plots of plans, with matplotlib (`pip install 'llmserve[plot]'`), imported when asked for."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmserve.common.plotting import axes_or_new
from llmserve.plan.bounds import crossover_ops_per_byte, roofline_flops

if TYPE_CHECKING:
    from llmserve.plan.capacity import Capacity
    from llmserve.plan.memory_plan import MemoryPlan


def plot_roofline(
    flops: float,
    bandwidth: float,
    points: Sequence[tuple[str, float]] = (),
    *,
    axes: Any = None,
) -> Any:
    """The roofline of a device: reachable FLOP/s over operations a byte, its crossover marked, and
    `points` (label, operations a byte) on it. Returns matplotlib's axes."""
    axes = axes_or_new(axes)
    crossover = crossover_ops_per_byte(flops, bandwidth)
    intensities = [crossover * 2.0**exponent for exponent in range(-10, 5)]
    reached = [roofline_flops(intensity, flops, bandwidth) for intensity in intensities]
    axes.loglog(intensities, reached)
    axes.axvline(crossover, linestyle="--", linewidth=1)
    axes.annotate(f"crossover {crossover:.0f}", (crossover, reached[0]))
    for label, intensity in points:
        at = roofline_flops(intensity, flops, bandwidth)
        axes.plot([intensity], [at], "o")
        axes.annotate(label, (intensity, at))
    axes.set_xlabel("operations a byte")
    axes.set_ylabel("operations a second")
    return axes


def plot_users(plan: "Capacity | MemoryPlan", *, axes: Any = None) -> Any:
    """Users that fit over the context, a line a KV dtype; dashed where it does not run yet. Returns
    matplotlib's axes."""
    axes = axes_or_new(axes)
    for row in plan.rows:
        style = "-" if row.is_supported else "--"
        axes.plot(plan.contexts, row.num_users, style, marker="o", label=row.dtype)
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog")
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("users")
    axes.legend()
    return axes
