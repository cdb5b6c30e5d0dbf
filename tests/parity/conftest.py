"""Backends for the op tests: every instruction set of the build that this machine can run."""

import numpy as np
import pytest
from llmserve import _core

testing = _core.testing
CPU_ISAS = dict(testing.cpu_isas())


@pytest.fixture(scope="session")
def ref():
    return testing.make_backend("ref")


def make_cpu(isa):
    """The cpu backend on two threads."""
    if not CPU_ISAS[isa]:
        pytest.skip(f"this machine has no {isa}")
    return testing.make_backend("cpu", 2, isa)


@pytest.fixture(scope="session", params=list(CPU_ISAS))
def cpu(request):
    return make_cpu(request.param)


@pytest.fixture(scope="session", params=["ref", *CPU_ISAS])
def any_backend(request, ref):
    return ref if request.param == "ref" else make_cpu(request.param)


@pytest.fixture(scope="session")
def cpu_one_thread(cpu):
    isa = cpu.description.removeprefix("cpu/").split(",")[0]
    return testing.make_backend("cpu", 1, isa)


@pytest.fixture
def rng():
    return np.random.default_rng(0)
