"""docs/performance.md says what benchmarks/results holds."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_results_as_they_are():
    peers = runpy.run_path(str(ROOT / "benchmarks/peers/run.py"))
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    assert page == peers["rendered"](), "run: python benchmarks/peers/run.py report"
