"""The matrix products of oneDNN through torch, which a bound knows beside llmserve's own.

A process of an interpreter that has torch, and imports no other package:

    python torch_gemm.py NUM_THREADS ROWS OUTPUTS INPUTS

reads names of arithmetic, one a line, and answers each with operations a second, 0 where it has
none. Weights are packed beforehand, as an engine's would be.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from line_process import LineProcess


class TorchGemm(LineProcess):
    """That process; call it with the name of an arithmetic."""

    def __init__(self, python: str, num_threads: int, gemm: tuple[int, int, int]) -> None:
        super().__init__(
            __file__,
            [python, __file__, *map(str, (num_threads, *gemm))],
            {"OMP_NUM_THREADS": str(num_threads)},
        )

    def __call__(self, arithmetic: str) -> float:
        return float(self.ask(arithmetic))


def product_of(arithmetic: str, rows: int, outputs: int, inputs: int) -> Callable[[], Any] | None:
    """Multiplies once; None where oneDNN has no such arithmetic here, or only imitates it."""
    import torch

    if arithmetic == "int8":
        x = torch.randint(0, 256, (rows, inputs), dtype=torch.uint8)
        w = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
        packed = torch.ops.onednn.qlinear_prepack(w, [rows, inputs])
        scales, zeros = torch.ones(outputs), torch.zeros(outputs, dtype=torch.int64)
        return lambda: torch.ops.onednn.qlinear_pointwise(
            x, 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
    if arithmetic == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    dtype = getattr(torch, arithmetic)
    x = torch.randn(rows, inputs).to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(torch.randn(outputs, inputs).to(dtype), rows)
    return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def main() -> None:
    import torch

    num_threads, *gemm = map(int, sys.argv[1:])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    torch.set_num_threads(num_threads)
    products: dict[str, Callable[[], Any] | None] = {}
    with torch.inference_mode():
        for line in sys.stdin:
            arithmetic = line.strip()
            if arithmetic not in products:
                products[arithmetic] = product_of(arithmetic, *gemm)
            product = products[arithmetic]
            rate = 0.0 if product is None else rate_of(product, *gemm)
            print(rate, file=answers, flush=True)


def rate_of(product: Callable[[], Any], rows: int, outputs: int, inputs: int) -> float:
    """Of the second of two runs: the first wakes the threads."""
    for _ in range(2):
        start = time.perf_counter()
        product()
        elapsed_s = time.perf_counter() - start
    return 2.0 * rows * outputs * inputs / elapsed_s


if __name__ == "__main__":
    main()
