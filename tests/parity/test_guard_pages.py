"""The ops between guard pages: each operand of each op ends right before a page that nobody may
touch, or begins right after one. Reading or writing past it ends the process, so that the tests of
the ops run in another one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OPS = ["ops", "fused_ops", "op_invariance", "grouped_linear", "fp8_cache", "quantized_linear"]
OPS += ["ref_ops", "sampling_op", "sampling_edits", "stored_types"]
DEADLINE_S = 1800.0


def run(side: str, names: list[str], every: int = 1) -> None:
    files = [str(HERE / f"test_{name}.py") for name in names]
    command = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *files],
        env={
            **os.environ,
            "LLMSERVE_GUARD_OPERANDS": side,
            "LLMSERVE_GUARD_EVERY": str(every),
        },
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("side", ["begin", "end"])
def test_ops_stay_within_their_operands(side: str) -> None:
    run(side, ["ops", "fused_ops"], every=25)


@pytest.mark.long
@pytest.mark.parametrize("side", ["begin", "end"])
@pytest.mark.parametrize("name", OPS)
def test_all_ops_stay_within_their_operands(side: str, name: str) -> None:
    run(side, [name])


@pytest.mark.parametrize(("side", "idx"), [("end", 8), ("begin", -1)])
def test_a_guard_page_is_where_it_should_be(side: str, idx: int) -> None:
    code = f"""
import numpy as np
from llmserve import _core_testing as testing
testing.guard_operands({side!r})
backend, array = testing.make_backend("cpu"), np.ones(8, "f4")
assert [testing.read_operand(backend, array, i) for i in range(8)] == [1.0] * 8
print("read", flush=True)
testing.read_operand(backend, array, {idx})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("read\n", -signal.SIGSEGV), done.stderr
