"""Start, latency and throughput of an engine in this process, beside the machine's bound.

The same measurements as `llmserve bench`, on one model: the demo model, or --model DIR.

Example:
    pytest benchmarks/bench_engine.py --model ./TinyLlama-1.1B --results engine.json
"""

import statistics
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
from llmserve.bench.run import Workload, run_latency, run_startup, run_throughput
from llmserve.checkpoint.model_files import demo_model_path


@pytest.fixture(scope="module")
def model(request):
    return request.config.getoption("--model") or str(demo_model_path())


@pytest.fixture(scope="module")
def arguments(threads):
    return {"num_threads": threads}


def quietly(numbers, what):
    return iter(numbers)


def details(result):
    whole = asdict(result)
    return {key: whole[key] for key in ("settings", "rates", "runs_s")}


def test_import(board, repeats):
    """`import llmserve` in a fresh interpreter, beside an interpreter that imports NumPy alone."""
    seconds = {"numpy": [], "llmserve": []}
    for _ in range(repeats):
        for package, times in seconds.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", f"import {package}"], check=True)
            times.append(time.perf_counter() - start)
    figures = {f"import_{package}_s": statistics.median(t) for package, t in seconds.items()}
    board.add("process start and import", figures)


def test_startup(model, arguments, board, repeats):
    result = run_startup(model, repeats, arguments, quietly)
    board.add("startup", result.figures, details(result))


@pytest.mark.parametrize("batch_size", [1, 8, 32])
def test_latency(batch_size, model, arguments, board, repeats):
    workload = Workload(batch_size, input_len=32, output_len=64)
    result = run_latency(model, workload, repeats, 1, arguments, quietly)
    board.add(f"latency of {batch_size} x (32 + 64)", result.figures, details(result))


def test_throughput(model, arguments, board, repeats):
    workload = Workload(128, input_len=64, output_len=64)
    result = run_throughput(model, workload, repeats, arguments, quietly)
    board.add("throughput of 128 x (64 + 64)", result.figures, details(result))
