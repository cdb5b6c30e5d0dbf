"""Backends for the op tests: every instruction set of the build, CUDA with and without cuBLAS."""

import functools
import os

import numpy as np
import op_formulas as formulas
import pytest
from llmserve import _core_testing as testing
from llmserve.errors import NotSupported

CPU_ISAS = dict(testing.cpu_isas())
# test_guard_pages.py runs the tests of this folder so, all or every n-th.
testing.guard_operands(os.environ.get("LLMSERVE_GUARD_OPERANDS", ""))
GUARD_EVERY = int(os.environ.get("LLMSERVE_GUARD_EVERY", "1"))


def pytest_collection_modifyitems(items):
    """Where every test runs, nothing."""
    if GUARD_EVERY > 1:
        items[:] = [item for item in items if "cuda" not in item.keywords][::GUARD_EVERY]


@pytest.fixture(scope="session")
def ref():
    return testing.make_backend("ref")


GEMMS = ("plain", "auto", "fastest", "cublaslt", "invariant", "wgmma")
CUDA = [pytest.param(f"cuda-{gemm}", marks=pytest.mark.cuda) for gemm in GEMMS]


def make_cuda(gemm):
    reason = testing.unavailable_reason("cuda")
    if reason:
        pytest.skip(f"no CUDA here: {reason}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMSERVE_CUDA_GEMM", gemm)
        patch.setenv("LLMSERVE_CUDA_ATTENTION", "plain" if gemm == "plain" else "mma")
        try:
            return testing.make_backend("cuda", 2)
        except NotSupported as error:
            pytest.skip(str(error))


def make_fast(name):
    """The cpu backend on two threads with an instruction set, or a CUDA backend."""
    if name.startswith("cuda-"):
        return make_cuda(name.removeprefix("cuda-"))
    if not CPU_ISAS[name]:
        pytest.skip(f"this machine has no {name}")
    return testing.make_backend("cpu", 2, name)


@pytest.fixture(scope="session", params=[*CPU_ISAS, *CUDA])
def fast(request):
    """Every backend that is not the reference."""
    return make_fast(request.param)


@pytest.fixture(scope="session", params=["ref", *CPU_ISAS, *CUDA])
def any_backend(request, ref):
    return ref if request.param == "ref" else make_fast(request.param)


@pytest.fixture(scope="session")
def ref_of_fast(fast, ref):
    """The reference that sums products of bf16 as `fast` does."""
    return testing.make_backend("ref", 1, formulas.isa_of(fast)) if fast.name == "cpu" else ref


@pytest.fixture(scope="session")
def attention_tolerance(fast, has_bf16_products):
    """How near attention over a cache of a dtype is to `ref_of_fast`."""

    def tolerance(dtype):
        if dtype != "float32" and "tiled attention" in fast.description:
            return formulas.ROUNDED_ATTENTION_TOLERANCE
        if dtype != "float32" and has_bf16_products and not sums_as_the_manual_says():
            return formulas.ROUNDED_ATTENTION_TOLERANCE  # a sum's last bit may turn a rounding
        return formulas.SUM_TOLERANCE

    return tolerance


@pytest.fixture(scope="session")
def has_bf16_products(fast):
    """Whether `fast` is a CPU whose attention over bf16 and fp8 rounds what it multiplies."""
    return formulas.multiplies_bf16(fast)


@functools.cache
def sums_as_the_manual_says():
    """Whether this machine's dot products of bf16 have the bits of the instruction's manual."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((40, 301), dtype=np.float32) for _ in range(2))
    backends = (testing.make_backend(name, 1, "avx512_bf16") for name in ("cpu", "ref"))
    got, expected = (b.linear(x, b.pack_linear([w], "bfloat16")) for b in backends)
    return np.array_equal(got, expected)


@pytest.fixture(scope="session")
def fast_one_thread(fast):
    """The same on one thread; a GPU has no such thing."""
    if fast.name == "cuda":
        return fast
    return testing.make_backend("cpu", 1, formulas.isa_of(fast))


@pytest.fixture
def rng():
    return np.random.default_rng(0)
