"""Pages with figures say what benchmarks/results holds."""

import importlib
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


def test_kernels_of_one_run_of_a_gpu_stand_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    page = importlib.import_module("gpu_page")
    decode, prompt = "attention decode 32/8x64 B=64 context=1024", "attention prefill 32/8x64 B=1"

    def row(name: str, us: float) -> dict[str, object]:
        return {"name": name, "us": us, "gb_per_s": 3000, "gflop_per_s": 4e5 / us}

    def stage(*rows: dict[str, object]) -> dict[str, object]:
        limits = {"gb_per_s": 4000, "gflop_per_s": 8e5}
        return {"status": 0, "bench": {"device": "cuda", "limits": limits, "rows": list(rows)}}

    attention = stage(
        row(decode, 50),
        row(f"all spans a warp: {decode}", 40),
        row(f"torch: {decode}", 38),
        row("prepared by kernel: 32/8x64 B=8 context=1024", 9),
        row("prepared by attention: 32/8x64 B=8 context=1024", 7),
        row(f"{prompt} context=2048", 1),
        row(f"torch: {prompt} context=2048", 4),
    )
    stages = {
        "bench-attention": attention,
        "bench-ops": stage(row("rms_norm 4x32", 7)),
        "bench-products": stage(row(f"fastest: {prompt} context=2048", 2)),
    }
    text = "\n".join(page.tables(stages, {}))
    for line in (
        "| 32/8x64 | 64 of 1,024 | 50.0 | 75% | 38.0 |",
        "| 32/8x64, 64 of 1,024 | 50.0 | 40.0 |",
        "| 32/8x64, 8 of 1,024 | 9.0 | 7.0 |",
        "| 32/8x64 | 400 (50%) |",
        "| 32/8x64, by wgmma | 200 (25%) |",
        "| 32/8x64, PyTorch | 100 (12%) |",
        "| rms_norm 4x32 | 7.0 | 3,000 |",
    ):
        assert line in text
