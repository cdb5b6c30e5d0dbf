"""What a run takes in memory: said before it starts, and read off the process when it is done."""

import dataclasses
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.quantization.layer_plan import LayerPlan, LinearGroup
from llmserve.quantization.tensor_files import TensorFolder

# What OpenBLAS takes for each thread that calls it.
_BLAS_BYTES = 32 << 20
_BATCH_TOKENS = 2048
# Of the moments of experts: where those of a layer are more, its experts are calibrated in several
# passes over the text.
_MAX_EXPERT_BYTES = 4 << 30


def calibration_parts(
    plan: LayerPlan, tensors: TensorFolder, *, has_moments: bool
) -> list[LayerPlan]:
    """The layer's groups as they are calibrated: what all tokens go through and as many experts as
    have room, then, pass by pass, the others."""
    parts: list[list[LinearGroup]] = [list(plan.shared_groups)]
    used = 0
    for expert in range(plan.num_experts):
        groups = [group for group in plan.expert_groups if group.expert == expert]
        size = sum(_moment_bytes(group, tensors) for group in groups) if has_moments else 0
        if used and used + size > _MAX_EXPERT_BYTES:
            parts.append([])
            used = 0
        parts[-1] += groups
        used += size
    return [
        dataclasses.replace(plan, groups=tuple(groups), others=plan.others if i == 0 else ())
        for i, groups in enumerate(parts)
    ]


def _moment_bytes(group: LinearGroup, tensors: TensorFolder) -> int:
    return 4 * int(tensors.shape(group.weights[0])[1] ** 2)


def planned_bytes(
    plans: Sequence[LayerPlan],
    tensors: TensorFolder,
    config: Mapping[str, Any],
    *,
    uses_text: bool,
    has_moments: bool,
    has_factors: bool,
    num_threads: int,
) -> int:
    """The most that a run has in memory: a layer as floats and as it is run, what is summed up of
    its inputs, and the copies that rounding makes of as many groups as there are threads. `config`
    is the core's. has_moments: inputs' outer products are summed; has_factors: they are
    inverted."""
    stored = 2 if tensors.stored_dtype == "bfloat16" else 4
    most = 0
    for plan in plans:
        weights = 0
        for name in plan.names():
            n, k = tensors.shape(f"{name}.weight")
            weights += n * k
        # Floats, their float16-sized codes and scales, and what is written.
        layer = weights * (4 + 2 + 1)
        run = weights * (stored + 4)
        for part in calibration_parts(plan, tensors, has_moments=uses_text and has_moments):
            moments = sum(_moment_bytes(group, tensors) for group in part.groups)
            moments += sum(4 * tensors.shape(f"{name}.weight")[1] ** 2 for name in part.others)
            total = layer + (moments if uses_text and has_moments else 0)
            at_once = sum(_work_bytes(part, tensors, has_factors=has_factors)[-num_threads:])
            most = max(most, total + max(at_once, run if uses_text else 0))
    most += most // 4  # pages of files, and what allocators keep; measured up to a seventh
    most += _BLAS_BYTES * (num_threads + 1)
    if uses_text:
        most += _BATCH_TOKENS * max(_token_bytes(plan, tensors, config) for plan in plans)
    return most


def _work_bytes(plan: LayerPlan, tensors: TensorFolder, *, has_factors: bool) -> list[int]:
    """What rounding each group takes, in order. It holds the weight some six times; a factor takes
    four matrices of K x K."""
    work = []
    for group in plan.groups:
        rows = sum(tensors.shape(weight)[0] for weight in group.weights)
        k = tensors.shape(group.weights[0])[1]
        work.append(24 * rows * k + (16 * k * k if has_factors else 0))
    return sorted(work)


def _token_bytes(plan: LayerPlan, tensors: TensorFolder, config: Mapping[str, Any]) -> int:
    """A token's activations, and what is kept of them until they are summed up."""
    hidden = int(config["hidden_size"])
    wide = max(int(config["intermediate_size"]), hidden)
    count = 6 * hidden + 3 * wide
    if plan.expert_groups:
        inputs = [tensors.shape(g.weights[0])[1] for g in plan.expert_groups if g.expert == 0]
        count += plan.top_k * (2 * sum(inputs) + 3 * max(inputs))
    return 4 * count


def peak_bytes() -> int:
    """The most that the process has ever had in memory."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def resident_bytes() -> int:
    """What the process has in memory; where the system does not say, the most it had."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return peak_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")
