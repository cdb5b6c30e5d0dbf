"""Importing llmserve beside the main interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

DEADLINE_S = 60.0  # tells an answer from a hang


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="the module has another name")
def test_a_sub_interpreter_is_refused() -> None:
    inner = """
try:
    import llmserve
except ImportError as error:
    assert "main interpreter only" in str(error), error
else:
    raise AssertionError
"""
    code = f"""
import _xxsubinterpreters as interpreters
interpreters.run_string(interpreters.create(), {inner!r})
import llmserve
print(llmserve._core.__name__, llmserve._core.Engine.__module__)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.stdout.split() == ["llmserve._core", "llmserve._core"], done.stderr
    assert done.returncode == 0, done.stderr
