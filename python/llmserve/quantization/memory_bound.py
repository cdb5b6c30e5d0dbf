"""What a run takes in memory: said before it starts, and read off the process when it is done."""

import os
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.quantization.layer_plan import LayerPlan
from llmserve.quantization.tensor_files import TensorFolder

# What OpenBLAS takes for each thread that calls it.
_BLAS_BYTES = 32 << 20
_BATCH_TOKENS = 2048


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
    its inputs, and the copies that rounding makes of as many groups as there are threads.
    has_moments: inputs' outer products are summed; has_factors: they are inverted."""
    stored = 2 if tensors.stored_dtype == "bfloat16" else 4
    most = 0
    for plan in plans:
        weights = 0
        for name in plan.names():
            n, k = tensors.shape(f"{name}.weight")
            weights += n * k
        # Floats, their float16-sized codes and scales, and what is written.
        layer = weights * (4 + 2 + 1)
        moments = 0
        work = []
        for group in plan.groups:
            rows = sum(tensors.shape(weight)[0] for weight in group.weights)
            k = tensors.shape(group.weights[0])[1]
            moments += 4 * k * k
            # Rounding holds the weight some six times; a factor takes four matrices of K x K.
            factor = 16 * k * k if has_factors else 0
            work.append(24 * rows * k + factor)
        for name in plan.others:
            if ".experts." not in name:
                moments += 4 * tensors.shape(f"{name}.weight")[1] ** 2
        run = weights * (stored + 4)
        at_once = sum(sorted(work)[-num_threads:])
        total = layer + (moments if uses_text and has_moments else 0)
        most = max(most, total + max(at_once, run if uses_text else 0))
    most += most // 4  # pages of files, and what allocators keep; measured up to a seventh
    most += _BLAS_BYTES * (num_threads + 1)
    if uses_text:
        hidden = int(config["hidden_size"])
        wide = max(int(config.get("intermediate_size") or 0), hidden)
        most += _BATCH_TOKENS * (6 * hidden + 3 * wide) * 4  # a batch's activations
    return most


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
