"""A model whose disk or memory fails at one step after the other of its load: it is refused by a
typed error or answers with the same tokens."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint

HERE = Path(__file__).parent
# glibc's own end of a process whose thread-local data cannot be had: nobody can catch it.
NO_THREAD_DATA = "cannot allocate memory for thread-local data: ABORT"


def run(what: str, preload: Sequence[Path] = ()) -> tuple[list[dict[str, Any]], str]:
    """The worker's tries, and what it wrote beside them."""
    done = subprocess.run(
        [sys.executable, str(HERE / "fault_worker.py"), what, str(checkpoint("llama"))],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "LD_PRELOAD": ":".join(map(str, preload)),
        },
    )
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    to = tmp_path_factory.mktemp("shim") / "disk_faults.so"
    source = str(HERE / "disk_faults.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(to), source, "-ldl"], check=True)
    return to


@pytest.mark.parametrize("fault", ["EIO", "ENOMEM", "short"])
def test_a_disk_that_fails_once_is_an_error_or_does_no_harm(fault: str, shim: Path) -> None:
    tries, errors = run(fault, [shim])
    assert tries[-1]["faults"] == 0, errors  # all calls have had their turn
    assert len(tries) > 10
    assert [each for each in tries if "finding" in each] == []
    good = tries[0]["tokens"]
    assert all(each.get("tokens", good) == good for each in tries)
    refused = [each["refused"] for each in tries if "refused" in each]
    assert bool(refused) == (fault != "short")  # of a short read the rest is read
    assert all("ResourceExhausted" in text or "CorruptFile" in text for text in refused)


@pytest.mark.long
def test_memory_that_does_not_suffice_is_an_error() -> None:
    tries, errors = run("memory")
    assert [each for each in tries if "finding" in each] == []
    assert sum("refused" in each for each in tries) > 10
    assert tries[-1].get("tokens") == tries[0]["tokens"] or NO_THREAD_DATA in errors
