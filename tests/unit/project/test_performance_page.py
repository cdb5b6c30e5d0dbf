"""Pages with figures say what benchmarks/results holds."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("script", ["peers/run.py", "gpu_stages.py", "bench_quantization.py"])
def test_the_pages_show_the_results_as_they_are(script: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / script), "report", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
