"""docs/performance.md says what benchmarks/results holds."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_results_as_they_are() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/peers/run.py"), "report", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
