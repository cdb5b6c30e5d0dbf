"""Times every op of the cpu backend and puts it next to what this machine can do.

Every row gives GB/s (bytes that the op must read and write) and GFLOP/s (2 a multiply-add), and the
larger of the two shares of the machine's read bandwidth and of the best rate of a large matrix
product in the same format: llmserve's in the same instruction set, or, beside the best set,
oneDNN's where torch is installed. Of an op that fills new memory, GB/s read and written, and the
share of a plain copy of as many bytes.

Example:
    pytest benchmarks/bench_ops.py -k quantized --threads 2 --isa all --results ops.json
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time

import numpy as np
import pytest
from attention_cases import attention_cases, cache_cases, latent_cases, prepare_cases
from core_testing import testing
from expert_cases import expert_cases, router_cases
from linear_cases import (
    block_cases,
    format_cases,
    fused_cases,
    layer_cases,
    linear_cases,
    quantized_cases,
)
from llmserve.bench.machine import GEMM, MachineProbe, Rates, arithmetic_of, medians
from op_case import Case
from row_cases import row_cases, sample_cases
from torch_gemm import TorchGemm

TURNS = 4  # of reads and runs in a repeat
# Products are measured again when they are older: in all formats they take longer than most ops.
MAX_AGE_S = 2.0

GROUPS = {
    "linear": linear_cases,
    "quantized": quantized_cases,
    "blocks": block_cases,
    "formats": format_cases,
    "fused": fused_cases,
    "layers": layer_cases,
    "experts": expert_cases,
    "routers": router_cases,
    "attention": attention_cases,
    "latent": latent_cases,
    "cache": cache_cases,
    "prepare": prepare_cases,
    "rows": row_cases,
    "sample": sample_cases,
}


def pytest_generate_tests(metafunc):
    """Every instruction set that can run here, or the one that --isa names."""
    name = metafunc.config.getoption("--isa")
    every = [isa for isa, can_run in testing.cpu_isas() if can_run]
    metafunc.parametrize("backend", every if name == "all" else [name], indirect=True)


@pytest.fixture(scope="module")
def backend(threads, request):
    return testing.make_backend("cpu", threads, request.param)


class Machine:
    """What it can do, measured in the same run."""

    def __init__(self, probe: MachineProbe) -> None:
        self.read_bytes_per_s = probe.read_bytes_per_s
        self.copy_bytes_per_s = probe.copy_bytes_per_s
        self._probe = probe
        self._measured: dict[str, tuple[float, Rates]] = {}

    def rates(self, form: str) -> Rates:
        """Of products with weights of this format, measured at most MAX_AGE_S ago."""
        arithmetic = arithmetic_of(form)
        measured_at, rates = self._measured.get(arithmetic, (-MAX_AGE_S, None))
        if rates is None or time.perf_counter() - measured_at > MAX_AGE_S:
            rates = self._probe.measure([form])
            self._measured[arithmetic] = time.perf_counter(), rates
        return rates


@pytest.fixture(scope="module")
def machine(backend, threads):
    isa = isa_of(backend)
    best = next(name for name, can_run in testing.cpu_isas() if can_run)
    if isa != best or importlib.util.find_spec("torch") is None:
        yield Machine(MachineProbe(threads, [], isa=isa))
        return
    one_dnn = TorchGemm(sys.executable, threads, GEMM)
    yield Machine(MachineProbe(threads, [], {"oneDNN": one_dnn}, isa))
    one_dnn.close()


@pytest.mark.parametrize("group", GROUPS)
def test_ops(group, backend, machine, board, repeats, request):
    wanted = request.config.getoption("--cases")
    for case in GROUPS[group](backend, np.random.default_rng(0)):
        if wanted in case.name:
            board.add(f"{isa_of(backend)} {case.name}", time_case(case, machine, repeats))


def isa_of(backend) -> str:
    return backend.description.removeprefix("cpu/").split(",")[0]


def time_case(case: Case, machine: Machine, repeats: int) -> dict[str, float]:
    """Runs of some milliseconds and reads in turns: memory's rate changes from one to the next."""
    case.run()
    assert case.check(), f"{case.name}: the result is wrong"
    start = time.perf_counter()
    case.run()
    loops = max(1, int(0.005 / max(1e-7, time.perf_counter() - start)))
    seconds, reads, measured, copies = [], [], [], []
    for turn in range(TURNS * repeats):
        if case.flops and turn % TURNS == 0:
            measured.append(machine.rates(case.form))
        reads.append(machine.read_bytes_per_s())
        if case.fills_new_memory:
            copies.append(machine.copy_bytes_per_s(case.num_bytes // 2))
        start = time.perf_counter()
        for _ in range(loops):
            case.run()
        seconds.append((time.perf_counter() - start) / loops)
    s = statistics.median(seconds)
    read_bytes_per_s = statistics.median(reads)
    rates = Rates(read_bytes_per_s, medians(measured).gemm_ops_per_s if case.flops else {})
    bound_s = rates.bound_s(case.num_bytes, case.flops, case.form)
    if case.fills_new_memory:
        bound_s = case.num_bytes / statistics.median(copies)
    return {
        "us": s * 1e6,
        "gb_per_s": case.num_bytes / s * 1e-9,
        "gflop_per_s": case.flops / s * 1e-9,
        "share": bound_s / s,
        "read_gb_per_s": read_bytes_per_s * 1e-9,
        "gemm_gflop_per_s": rates.best_gemm(case.form)[0] * 1e-9 if case.flops else 0.0,
    }
