"""Ctrl-C reaches the tests also where a shell has started them in the background, ignoring it."""

import gc
import signal
from collections.abc import Iterator

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """For tests of Ctrl-C: a KeyboardInterrupt is lost if it comes up in a callback of the
    collector, and Hypothesis has one."""
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = callbacks
