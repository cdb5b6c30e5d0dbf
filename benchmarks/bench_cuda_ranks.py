"""Times a model on one GPU and on two (tensor_parallel_size=2): with steps recorded as graphs,
exchanges included, and with one kernel asked for after another.

Without two GPUs, NCCL_MULTI_RANK_GPU_ENABLE=1 lets two ranks share one, which says what the host
takes and not what a second GPU gains. Without both, or without NCCL, one GPU is timed.

Example:
    python benchmarks/bench_cuda_ranks.py qwen3-0.6b --json ranks.json
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_cuda_forms import options
from bench_cuda_models import SMALL, Bench, Sizes, checkpoint_folder
from gpu_rows import Row, measure_device, read_arguments, report
from llmserve import LLM
from llmserve.errors import NotSupported
from random_models import SHAPES, write_checkpoint

MODES: dict[str, dict[str, Any]] = {
    "one GPU: ": {},
    "two ranks, graphs: ": {"tensor_parallel_size": 2},
    "two ranks, no graphs: ": {"tensor_parallel_size": 2, "enforce_eager": True},
}
# The host's part is what differs: steps of one sequence, and of some.
SIZES = replace(Sizes(), prefills=(2048,), batch=32)


def mode_rows(bench: Bench, path: Path, label: str, more: dict[str, Any]) -> Iterator[Row]:
    try:
        llm = LLM(path, **options(bench, **more))
    except NotSupported as error:  # GPUs, or NCCL
        print(f"{label}{error}")
        return
    with llm:
        yield from bench.short_rows(llm, label)


def all_rows(bench: Bench) -> Iterator[Row]:
    folder = checkpoint_folder(bench.config)
    try:
        write_checkpoint(folder, bench.name)
        for label, more in MODES.items():
            yield from mode_rows(bench, folder, label, more)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    args = read_arguments(__doc__, "model", SHAPES)
    sizes = replace(SMALL, prefills=(16,)) if args.small else SIZES
    device, limits = measure_device(sizes)
    bench = Bench("tiny" if args.small else args.model, limits, sizes)
    report(device, limits, all_rows(bench), args.json)


if __name__ == "__main__":
    main()
