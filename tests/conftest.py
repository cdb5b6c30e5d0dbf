"""The header of a run; and Ctrl-C reaches the tests also where a shell has started them in the
background, ignoring it."""

import gc
import signal
from collections.abc import Iterator

import pytest

try:
    from llmserve import _core_testing
except ImportError as error:
    raise pytest.UsageError(
        f"the tests need llmserve's testing bindings, and there are none ({error}); build them: "
        "pip install '.[test]' -C cmake.define.LLMSERVE_TESTING=ON, or, to work in the source "
        "tree, as CONTRIBUTING.md says"
    ) from error

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """The instruction set that models run on, which LLMSERVE_CPU_ISA caps."""
    return f"backend: {_core_testing.make_backend('cpu').description}"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """For tests of Ctrl-C: a KeyboardInterrupt is lost if it comes up in a callback of the
    collector, and Hypothesis has one."""
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = callbacks
